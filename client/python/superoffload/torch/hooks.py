"""Hooks that torch and training loops keep, and what torch.compile leaves as it is."""

import weakref
from collections.abc import Callable
from typing import Any

import torch

# torch.compile does not trace what this decorates: optimizers and their hooks, which no graph could hold. Traced, they
# would break a compiled step in a dozen places and be compiled piece by piece. torch's own optimizers have the first
# of the two, which imports torch._dynamo (half a second) when it is called, not before.
eager = getattr(torch, "_disable_dynamo", None) or torch.compiler.disable


def weakly(method: Callable[..., Any], *index: int) -> Callable[..., None]:
    """Returns a hook that calls a bound method, with ``index`` if it is given, as long as the method's object lives.

    A model that keeps the hook does not keep the optimizer. What the hook is called with is not passed on.
    """
    owner, function = weakref.ref(method.__self__), method.__func__  # type: ignore[attr-defined]

    def call(*_: Any) -> None:
        alive = owner()
        if alive is not None:
            function(alive)

    def call_with_index(*_: Any) -> None:
        alive = owner()
        if alive is not None:
            function(alive, number)

    if not index:
        return call
    (number,) = index
    return call_with_index


def weakly_passing(method: Callable[[Any], Any]) -> Callable[..., None]:
    """Returns a hook like `weakly`, which passes on the first thing that it is called with."""
    owner, function = weakref.ref(method.__self__), method.__func__  # type: ignore[attr-defined]

    def call(told: Any, *_: Any) -> None:
        alive = owner()
        if alive is not None:
            function(alive, told)

    return call
