"""Has superoffload.torch take the CPU's tensors for a GPU's, whose driver is the fake one.

The host may not touch the fake driver's device memory, so torch computes on its alias, and on the default stream, which
is the calling thread; with `late_gpu` on a stream of the fake driver's, late. Torch's own memory stands for GPU memory,
too. Everything but superoffload.torch.cuda, whose functions ask torch's CUDA support, is what runs on a GPU.
"""

import contextlib
import ctypes
import gc
from collections.abc import Callable

import grpc
import pytest
import torch
from tests.support import late_torch
from tests.support.late_torch import DRIVER

import superoffload.torch
from superoffload.torch import cuda
from superoffload.torch.gpu import residents
from superoffload.torch.guards.reads import drop_orphans

_STREAMS = {
    name: getattr(cuda, name)
    for name in ("stream_of", "current_stream", "beside", "keep_for_stream", "side_stream", "on", "wait", "handle")
}

registered: list[int] = []  # addresses of host memory
_viewed: list[tuple[int, int]] = []  # begin and end of the fake GPU's memory that torch has


def driver_count(name: str) -> int:
    """A size_t of the fake driver's."""
    function = getattr(ctypes.CDLL(DRIVER), name)
    function.restype = ctypes.c_size_t
    return function()


def _view(pointer: int, like: torch.Tensor, owner: object, device: object = None) -> torch.Tensor:
    alias = ctypes.CDLL(DRIVER).fakeCudaAlias
    alias.restype, alias.argtypes = ctypes.c_uint64, [ctypes.c_uint64]
    region = type("Region", (ctypes.c_byte * (like.numel() * like.element_size()),), {}).from_address(alias(pointer))
    region.owner = owner
    _viewed.append((alias(pointer), alias(pointer) + ctypes.sizeof(region)))
    return torch.frombuffer(region, dtype=like.dtype, count=like.numel()).view(like.shape)


def _begin_read(flag: torch.Tensor) -> Callable[[], bool]:
    copy = flag.clone()
    return lambda: bool(copy.numpy())


def make_current(driver: ctypes.CDLL) -> ctypes.c_void_p:
    """The calling thread's context is the GPU's from now on, which stays open for ever, as torch's does."""
    context = ctypes.c_void_p()
    assert driver.cuInit(0) == 0 and driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert driver.cuCtxSetCurrent(context) == 0
    return context


class TorchAllocator:
    """What torch's allocator does with GPU memory: it keeps what tensors leave until it is told to give it back."""

    def __init__(self) -> None:
        self._driver = ctypes.CDLL(DRIVER)
        self._cached: list[int] = []
        self._context = make_current(self._driver)

    def take_in(self, model: torch.nn.Module) -> None:
        """The model's parameters lie in memory of the fake GPU afterwards, each in a block of its own."""
        for parameter in model.parameters():
            pointer = ctypes.c_uint64()
            self._driver.cuCtxSetCurrent(self._context)
            code = self._driver.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(parameter.nbytes))
            assert code == 0, code
            block = _Block(self._cached, pointer.value)
            tensor = _view(pointer.value, parameter.detach(), block)
            tensor.copy_(parameter.detach())
            parameter.data = tensor

    def release_cached(self, device: object = None) -> None:
        self._driver.cuCtxSetCurrent(self._context)
        while self._cached:
            assert self._driver.cuMemFree_v2(ctypes.c_uint64(self._cached.pop())) == 0

    def cached_bytes(self, device: object = None) -> int:
        return 0


class _Block:
    def __init__(self, cached: list[int], pointer: int) -> None:
        self._cached, self._pointer = cached, pointer

    def __del__(self) -> None:
        self._cached.append(self._pointer)


def install(patch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Until `patch` is undone. Returns the tensors that the adapter has asked to be kept for the pack stream."""
    ctypes.CDLL(DRIVER, mode=ctypes.RTLD_GLOBAL)  # found by its name when the client library asks for the driver
    patch.setenv("LD_LIBRARY_PATH", str(DRIVER.parent))  # of daemons
    patch.setenv("FAKE_CUDA_DELAY", "300")
    patch.setenv("FAKE_CUDA_HOST_IS_GPU", "1")
    patch.setenv("FAKE_CUDA_NO_THREADS", "1")
    kept = []
    patch.setattr(cuda, "is_on_gpu", lambda tensor: True)
    patch.setattr(cuda, "resolve", lambda device: torch.device("cpu"))
    patch.setattr(cuda, "ordinal", lambda device: 0)
    patch.setattr(cuda, "stream_of", lambda device: 0)
    patch.setattr(cuda, "synchronize", lambda device: None)
    patch.setattr(cuda, "release_cached", lambda device: None)
    patch.setattr(cuda, "cached_bytes", lambda device: 0)
    patch.setattr(cuda, "allocated_bytes", lambda device: 0)
    patch.setattr(cuda, "is_integrated", lambda device: False)
    patch.setattr(cuda, "reserved_bytes", lambda device: 0)
    patch.setattr(cuda, "peak_reserved_bytes", lambda device: 0)
    patch.setattr(cuda, "free_bytes", lambda device: 80 << 30)
    patch.setattr(cuda, "total_bytes", lambda device: 80 << 30)
    patch.setattr(cuda, "used_bytes", lambda device: driver_count("fakeCudaUsedBytes"))
    patch.setattr(cuda, "current_stream", lambda tensor: 0)
    patch.setattr(cuda, "is_capturing", lambda: False)
    patch.setattr(cuda, "beside", lambda device: contextlib.nullcontext())
    patch.setattr(cuda, "side_stream", lambda device: None)
    patch.setattr(cuda, "on", lambda stream, *others: contextlib.nullcontext())
    patch.setattr(cuda, "wait", lambda device, stream: None)
    patch.setattr(cuda, "register_host", lambda memory: registered.append(memory.data_ptr()))
    patch.setattr(cuda, "unregister_host", lambda memory: registered.remove(memory.data_ptr()))
    patch.setattr(cuda, "handle", lambda stream: 0)
    patch.setattr(cuda, "view", _view)
    patch.setattr(cuda, "pinned_like", torch.empty_like)
    patch.setattr(cuda, "begin_read", _begin_read)
    patch.setattr(cuda, "keep_for_stream", lambda tensor, stream: kept.append(tensor))
    patch.setattr(residents, "_STALL", 1e6)  # how long copies take here says nothing: they come where a test says so
    return kept


@pytest.fixture
def fake_gpu(monkeypatch):
    """Returns a list of the tensors that the adapter has asked to be kept for the pack stream."""
    return install(monkeypatch)


@pytest.fixture
def nothing_stays(fake_gpu):
    """What a test's model keeps, and hooks and modes of all optimizers with it, is gone before the next test."""
    yield
    gc.collect()
    drop_orphans()


@pytest.fixture
def late_gpu(fake_gpu, monkeypatch):
    """Torch's work is late, on a stream that is not the calling thread, and slower than ours. Returns its mode."""
    memory = late_torch.Memory()
    for name, function in _STREAMS.items():
        monkeypatch.setattr(cuda, name, function)
    monkeypatch.setattr(cuda, "is_allocators", lambda tensor: not memory.of_graphs)
    monkeypatch.setattr(torch.cuda, "Stream", late_torch.Stream)
    monkeypatch.setattr(torch.cuda, "ExternalStream", late_torch.Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", late_torch.current_stream)
    monkeypatch.setattr(torch.cuda, "stream", late_torch.on)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: memory.record_stream(tensor, stream))
    with monkeypatch.context() as slow:
        slow.setenv("FAKE_CUDA_DELAY", "1500")
        stream = late_torch.Stream()
        stream.settle()
    with late_torch.on(stream), late_torch.LateTorch(memory, _viewed) as mode:
        yield mode
        mode.finish()
    assert not memory.failures


@pytest.fixture
def gpu_daemon(fake_gpu, daemon):
    """A daemon that takes parameters on the fake GPU."""
    probe = torch.nn.Linear(2, 2)
    try:
        superoffload.torch.AdamW(probe.parameters(), endpoint=daemon.endpoint).close()
    except superoffload.Error as error:
        if error.code == grpc.StatusCode.UNIMPLEMENTED:
            pytest.skip("built without nvcc")
        raise
    return daemon
