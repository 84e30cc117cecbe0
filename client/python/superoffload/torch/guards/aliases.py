"""Moves parameters to other memory together with whoever shares theirs: views, ties through ``.data``, saved states."""

import contextlib
import gc
from collections.abc import Container, Iterator, Sequence

import grpc
import torch

from superoffload._core.error import Error


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses of its first byte, and behind its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _living(storages: set[int], devices: set[torch.device]) -> Iterator[torch.Tensor]:
    """Tensors of this process with one of the storages. Those that only autograd has keep what they were."""
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and thing.device in devices and thing.layout == torch.strided:
            try:
                ours = thing.untyped_storage()._cdata in storages
            except (NotImplementedError, RuntimeError):  # of a subclass that has none
                continue
            if ours and thing.numel() > 0 and not thing.is_inference():
                yield thing


class Sharers:
    """Who shares memory with tensors that are going to move, one by one.

    Raises Error, with nothing moved, for a tensor that has elements of one and of others. ``padded``: storages of
    one tensor each, and behind it of elements of which nobody reads a bit.
    """

    def __init__(self, named: Sequence[tuple[str, torch.Tensor]], padded: Container[int] = ()) -> None:
        own = {id(tensor) for _, tensor in named}
        places: dict[int, list[tuple[int, int, int]]] = {}
        for index, (_, tensor) in enumerate(named):
            places.setdefault(tensor.untyped_storage()._cdata, []).append((*_span(tensor), index))
        names = [name for name, _ in named]
        devices = {tensor.device for _, tensor in named}
        found = None
        with contextlib.suppress(Error):  # it may be about garbage
            found = _sharers(names, places, own, devices, padded)
        if found is None:
            gc.collect()
            found = _sharers(names, places, own, devices, padded)
        self._tensors: list[torch.Tensor | None] = [tensor for _, tensor in named]
        self._sharers = found

    def span(self, index: int) -> int:
        """Bytes from the beginning of the tensor to the end of who shares its memory."""
        ends = [begin + _span(tensor)[1] - _span(tensor)[0] for tensor, begin in self._sharers.get(index, [])]
        return max(ends, default=0)

    @torch.no_grad()
    def move(self, index: int, target: torch.Tensor) -> None:
        """The tensor's data become ``target``, and those of who shares its memory the same part of it."""
        self.move_sharers(index, target)
        tensor = self._tensors[index]
        assert tensor is not None, "each moves once"
        self._tensors[index] = None
        tensor.data = target

    @torch.no_grad()
    def move_sharers(self, index: int, target: torch.Tensor) -> None:
        for tensor, begin in self._sharers.pop(index, []):
            elements = target.reshape(-1).view(tensor.dtype)
            offset = elements.storage_offset() + begin // tensor.element_size()
            tensor.data = elements.as_strided(tensor.shape, tensor.stride(), offset)


def _sharers(
    names: Sequence[str],
    places: dict[int, list[tuple[int, int, int]]],
    own: set[int],
    devices: set[torch.device],
    padded: Container[int],
) -> dict[int, list[tuple[torch.Tensor, int]]]:
    """Returns living tensors that share the memory of each that moves, by its index, and at which byte they begin.

    ``places``: by storage, first address, last address and index of those that move; ``own``: their ids.
    """
    sharers: dict[int, list[tuple[torch.Tensor, int]]] = {}
    for tensor in _living(set(places), devices):
        if id(tensor) in own:
            continue
        begin, end = _span(tensor)
        for first, last, index in places[tensor.untyped_storage()._cdata]:
            if begin >= last or end <= first:
                continue
            if begin < first or (end > last and tensor.untyped_storage()._cdata not in padded):
                raise Error(
                    grpc.StatusCode.INVALID_ARGUMENT,
                    f"a tensor of shape {list(tensor.shape)} has elements of parameter {names[index]} and others, but "
                    "on a GPU each parameter moves to memory of its own; make such tensors anew after building the "
                    "optimizer",
                )
            sharers.setdefault(index, []).append((tensor, begin - first))
    return sharers
