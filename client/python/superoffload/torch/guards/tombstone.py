"""What takes the place of a gradient whose memory was given back before step()."""

import math
from collections.abc import Callable

import grpc
import torch

from superoffload._core.error import Error


class Tombstones:
    """All of one dtype and device are views of one NaN.

    Torch refuses to write to more than one element of such a view. What it lets through, ``zero_()`` for one, changes
    the NaN or its version.
    """

    def __init__(self) -> None:
        self._bases: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
        self._versions: dict[int, int] = {}  # by address

    def instead_of(self, gradient: torch.Tensor) -> torch.Tensor:
        key = gradient.dtype, gradient.device
        base = self._bases.get(key)
        if base is None:
            base = self._bases[key] = torch.full((), math.nan, dtype=gradient.dtype, device=gradient.device)
            self._versions[base.data_ptr()] = base._version
        return base.expand(gradient.shape)

    def is_one(self, gradient: torch.Tensor | None) -> bool:
        return gradient is not None and bool(self._versions) and gradient.data_ptr() in self._versions

    def begin_check(self, begin_read: Callable[[torch.Tensor], Callable[[], bool]]) -> Callable[[], None]:
        """What is returned raises Error if somebody had written to one by now; it waits for what is read."""
        bases = list(self._bases.values())
        whole = all(base._version == self._versions[base.data_ptr()] for base in bases)
        are_nan = [begin_read(torch.isnan(base)) for base in bases]

        def check() -> None:
            if not whole or not all(is_nan() for is_nan in are_nan):
                self._bases.clear()
                self._versions.clear()
                raise was_written()

        return check


def _error(message: str) -> Error:
    return Error(grpc.StatusCode.FAILED_PRECONDITION, message)


def goes_on(name: str) -> Error:
    return _error(
        f"the gradient of {name} goes on from the step before, but it has left the GPU; call zero_grad() after each "
        "step, or build the optimizer with overlap=False"
    )


def was_written() -> Error:
    return _error(
        "a gradient was written after it had left the GPU; call zero_grad() and compute the gradients again, and build "
        "the optimizer with overlap=False if gradients are changed between backward and step"
    )


def grew(name: str, no_room: bool) -> Error:
    """``no_room``: the GPU's memory does not hold the gradients of all parameters."""
    remedy = (
        "the GPU has no memory to keep the gradients of all parameters between backward passes: run one backward pass "
        "per step, or shard the model over more GPUs"
        if no_room
        else "call zero_grad() and compute its gradients again, or build the optimizer with overlap=False if the "
        "number of backward passes changes"
    )
    return _error(
        f"{name} got another gradient after its first ones had left the GPU: this step runs more backward passes than "
        f"those before. It was abandoned; {remedy}"
    )


def was_set(name: str) -> Error:
    return _error(
        f"a gradient of {name} was set after that from backward had left the GPU; call zero_grad() and compute the "
        "gradients again, and build the optimizer with overlap=False if gradients are changed between backward and step"
    )


def gone(name: str) -> Error:
    return _error(
        f"the step was abandoned after the gradient of {name} had left the GPU; call zero_grad() and compute the "
        "gradients again (overlap=False keeps them until step())"
    )
