"""What ``optimizer.state`` has handed out, and what of it the loop has written."""

import dataclasses
import functools
import sys
from collections.abc import Callable

import grpc
import torch

from superoffload._core.error import Error
from superoffload.torch.fingerprint import digests


@dataclasses.dataclass
class _Copy:
    tensor: torch.Tensor
    digest: int | None  # as it was handed out; None: the loop has set it

    def is_written(self) -> bool:
        return self.digest is None or self.digest != _digest(self.tensor)


def _digest(tensor: torch.Tensor) -> int:
    return int(digests([tensor])[0])


class StateCopies:
    """Copies of one moment, by index of the parameter and key; those that nobody has and nobody has written go."""

    def __init__(self) -> None:
        self._present: dict[tuple[int, str], _Copy] = {}
        self._past: list[_Copy] = []  # of moments before, which somebody still has

    def get(self, index: int, key: str, copy: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Returns the same tensor as long as the moment lasts."""
        if (index, key) not in self._present:
            self._present = {
                place: kept for place, kept in self._present.items() if _is_held(kept) or kept.is_written()
            }
            tensor = copy()
            self._present[index, key] = _Copy(tensor, _digest(tensor))
        return self._present[index, key].tensor

    def set(self, index: int, key: str, tensor: torch.Tensor) -> None:
        self._present[index, key] = _Copy(tensor, None)

    def written(self) -> dict[int, dict[str, torch.Tensor]]:
        """Returns what was written, by index and key. Raises Error for what was written to a copy of another moment."""
        if any(copy.is_written() for copy in self._past):
            self._past = []
            raise Error(
                grpc.StatusCode.FAILED_PRECONDITION,
                "a tensor was written that optimizer.state had given before the last step; it is a copy of that "
                "moment. Nothing was committed: take it from optimizer.state again and write that, then step() again",
            )
        result: dict[int, dict[str, torch.Tensor]] = {}
        for (index, key), copy in self._present.items():
            if copy.is_written():
                result.setdefault(index, {})[key] = copy.tensor
        return result

    def clear(self) -> None:
        """Nothing was handed out."""
        self._present, self._past = {}, []

    def on_another_moment(self) -> None:
        """What was written is in the optimizer's state, or that is another one."""
        given = [*self._past, *self._present.values()]
        self._past = [copy for copy in given if copy.digest is not None and _is_held(copy)]
        for copy in self._past:
            copy.digest = _digest(copy.tensor)
        self._present = {}


def _uses(copy: _Copy) -> tuple[int, int]:
    """Counts who uses the tensor in Python, and its memory anywhere."""
    return sys.getrefcount(copy.tensor), torch._C._storage_Use_Count(copy.tensor.untyped_storage()._cdata)


def _is_held(copy: _Copy) -> bool:
    return any(now > of_nobody for now, of_nobody in zip(_uses(copy), _uses_of_nobody(), strict=True))


@functools.cache
def _uses_of_nobody() -> tuple[int, int]:
    return _uses(_Copy(torch.zeros(1, dtype=torch.float32, device="cpu"), 0))
