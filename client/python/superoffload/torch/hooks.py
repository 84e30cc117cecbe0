"""Hooks that torch and training loops keep, and what torch.compile leaves as it is."""

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils.hooks import RemovableHandle

_Result = TypeVar("_Result")

# torch.compile does not trace what this decorates: optimizers and their hooks, which no graph could hold. Traced, they
# would break a compiled step in a dozen places and be compiled piece by piece. torch's own optimizers have the first
# of the two, which imports torch._dynamo (half a second) when it is called, not before.
eager = getattr(torch, "_disable_dynamo", None) or torch.compiler.disable


def gone_with(owner: object, handle: RemovableHandle) -> RemovableHandle:
    """The handle of a hook of all optimizers, say, which is removed with the owner if nobody does that before."""
    weakref.finalize(owner, handle.remove).atexit = False
    return handle


def weakly(method: Callable[..., _Result], *given: Any, passes: int = 0) -> Callable[..., _Result | None]:
    """Returns a hook that calls a bound method as long as the method's object lives; after that it returns None.

    A model that keeps the hook does not keep the optimizer. The method gets ``given``, and after that the first
    ``passes`` of the arguments that the hook is called with. The hook returns what the method returns.
    """
    owner, function = weakref.ref(method.__self__), method.__func__  # type: ignore[attr-defined]

    def call(*arguments: Any) -> _Result | None:
        alive = owner()
        return None if alive is None else function(alive, *given, *arguments[:passes])

    return call
