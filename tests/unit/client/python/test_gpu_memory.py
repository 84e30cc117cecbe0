"""Memory of a GPU is given back once nothing is in it, in whatever order Python ends what is left."""

import gc
import weakref

import pytest
import torch

from superoffload._core import gpu_memory, library
from superoffload.torch import cuda

PIECE = 1 << 21


class Released:
    """Of the library's functions on memory: handles that are there, and what was called of those that are not."""

    def __init__(self):
        self.live, self.late, self.given_back = set(), [], []

    def call(self, name, *arguments):
        if name == "gpu_reserve":
            handle, address = arguments[-2:]
            handle._obj.value = 1 + len(self.live)
            address._obj.value = 1 << 40
            self.live.add(handle._obj.value)
        else:
            assert name == "gpu_back" and arguments[0].value in self.live
            arguments[2]._obj.value, arguments[3]._obj.value = PIECE, 4 * PIECE

    def function(self, name):
        def give_back(handle, piece, stream):
            (self.given_back if handle.value in self.live else self.late).append(piece)
            return 0

        return {
            "gpu_give_back": give_back,
            "gpu_give_units_back": lambda handle, stream: give_back(handle, "units", stream),
            "gpu_release": lambda handle: self.live.discard(handle.value),
        }[name]


@pytest.fixture
def released(monkeypatch):
    fake = Released()
    monkeypatch.setattr(library, "call", fake.call)
    monkeypatch.setattr(library, "function", fake.function)
    return fake


def open_memory():
    return gpu_memory.GpuMemory(1, None, gpu_memory.structures.GpuOptions(), lambda: 0)


def test_a_piece_goes_back_with_its_last_hold(released):
    memory = open_memory()
    one, other = memory.hold(0, PIECE + 1), memory.hold(PIECE, 2 * PIECE)
    memory.leave_to_views()
    assert released.given_back == ["units", 2, 3]
    del one
    assert released.given_back == ["units", 2, 3, 0]
    del other
    assert released.given_back == ["units", 2, 3, 0, 1]
    del memory
    assert not released.live and not released.late


def test_what_streams_goes_back_with_its_last_hold(released):
    memory = open_memory()
    one, other = memory.hold_units(), memory.hold_units()
    del one
    memory.leave_to_views()
    assert released.given_back == [0, 1, 2, 3]
    del other
    assert released.given_back == [0, 1, 2, 3, "units"]


def test_memory_and_holds_that_end_together_end_once(released):
    for first in ("memory", "hold"):  # a collection ends what refers to each other in the order of its birth
        ring = []
        memory = open_memory()
        memory.ring = ring
        ring += [memory.hold(0, PIECE), memory] if first == "hold" else [memory, memory.hold(0, PIECE)]
        memory.leave_to_views()
        del memory, ring
        gc.collect()
        assert not released.live and not released.late


def test_memory_that_was_never_opened_ends(released, monkeypatch):
    def refuse(*arguments):
        raise MemoryError

    monkeypatch.setattr(library, "call", refuse)
    with pytest.raises(MemoryError):
        open_memory()


def test_what_a_view_keeps_goes_with_it(monkeypatch):
    class Owner:
        pass

    monkeypatch.setattr(torch, "as_tensor", lambda region, device: regions.append(region) or torch.empty(8).byte())
    regions, owner = [], Owner()
    gone = weakref.ref(owner)
    gc.disable()
    try:
        cuda.view(1 << 40, torch.empty(2), owner, torch.device("cpu"))
        interface = regions[0].__cuda_array_interface__
        assert interface["shape"] == (8,) and interface["data"] == (1 << 40, False)
        del owner
        assert gone() is not None
        regions.clear()
        assert gone() is None, "no collection is needed"
    finally:
        gc.enable()
