"""Finds code that uses gradients while they are not yet what it expects of them: it reads, sets or has ``.grad``."""

import functools
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

_grad = torch._C.TensorBase.grad
_get_grad, _set_grad, _delete_grad = _grad.__get__, _grad.__set__, _grad.__delete__
_watches: "weakref.WeakValueDictionary[int, GradientWatch]" = weakref.WeakValueDictionary()  # by id of the tensor


def _before_access(tensor: torch.Tensor) -> None:
    watch = _watches.get(id(tensor))
    if watch is not None and not sys._getframe(2).f_globals.get("__name__", "").startswith("superoffload."):
        watch.end()
        watch.on_use()


def _get(tensor: torch.Tensor) -> torch.Tensor | None:
    if _watches:
        _before_access(tensor)
    return _get_grad(tensor)


def _set(tensor: torch.Tensor, value: Any) -> None:
    if _watches:
        _before_access(tensor)
    _set_grad(tensor, value)


def _delete(tensor: torch.Tensor) -> None:
    if _watches:
        _before_access(tensor)
    _delete_grad(tensor)


@functools.cache
def _install() -> None:
    """Replaces the attribute for good: each change of a class makes Python forget what it has learned of it."""
    torch.Tensor.grad = property(_get, _set, _delete, _grad.__doc__)
    # A subclass of Tensor gets the gradient as it is.
    torch.overrides.get_default_nowrap_functions().add(torch.Tensor.grad.__get__)


class GradientWatch:
    """``on_use`` is called before the first access to ``.grad`` of one of the tensors from outside of this package.

    ``sees_memory``: nobody but the loop has the memory of gradients.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], on_use: Callable[[], None], sees_memory: bool) -> None:
        self._tensors = tensors
        self._sees_memory = sees_memory
        self.on_use = on_use

    def begin(self) -> None:
        _install()
        for tensor in self._tensors:
            _watches[id(tensor)] = self

    def end(self) -> None:
        for tensor in self._tensors if _watches else ():
            _watches.pop(id(tensor), None)

    def is_late(self) -> bool:
        """Whether somebody has one of the gradients already, or its memory."""
        return any(map(_is_held, self._tensors)) or (self._sees_memory and _is_memory_held(self._tensors))


def _references(tensor: torch.Tensor) -> int:
    return sys.getrefcount(tensor.grad)


def _is_held(tensor: torch.Tensor) -> bool:
    return tensor.grad is not None and _references(tensor) > _references_of_nobody()


@functools.cache
def _references_of_nobody() -> int:
    return _references(_with_gradient())


def _uses(gradient: torch.Tensor) -> tuple[int, int]:
    """Counts the tensors that use its memory, arrays of numpy among them, and the storage's users in Python."""
    storage = gradient.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)


def _is_memory_held(tensors: Sequence[torch.Tensor]) -> bool:
    """Gradients may lie in one storage."""
    others: dict[int, int] = {}  # by storage, the tensors that are none of these gradients
    tensors_of_nobody, references_of_nobody = _uses_of_nobody()
    for tensor in tensors:
        gradient = tensor.grad
        if gradient is None or gradient.layout != torch.strided:
            continue
        if gradient.untyped_storage().nbytes() < gradient.nbytes:
            continue  # it stands for one that has gone
        uses, references = _uses(gradient)
        if references > references_of_nobody:
            return True
        address = gradient.untyped_storage()._cdata
        others[address] = others.get(address, uses - tensors_of_nobody + 1) - 1
    return any(others.values())


@functools.cache
def _uses_of_nobody() -> tuple[int, int]:
    gradient = _with_gradient().grad
    assert gradient is not None
    return _uses(gradient)


def _with_gradient() -> torch.Tensor:
    tensor = torch.zeros(1, dtype=torch.float32, device="cpu")
    tensor.grad = torch.zeros_like(tensor)
    return tensor
