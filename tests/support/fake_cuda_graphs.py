"""torch's CUDA graphs on the CPU: what is captured is computed, and computed again where it was by each replay.

As on a GPU, a replay calls no hooks and runs no Python of the model. The stream that captures is one of the fake
driver's, so what may not be in a graph is refused. torch.cuda.make_graphed_callables is torch's own.
"""

import contextlib
import ctypes

import pytest
import torch
from tests.support.fake_torch_gpu import DRIVER, make_current
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from superoffload.torch import cuda

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


class Graph(TorchDispatchMode):
    def __init__(self, *_: object, **__: object) -> None:
        super().__init__()
        self._calls: list[tuple] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        self._calls.append((function, args, kwargs or {}, results))
        return results

    @torch.no_grad()
    def replay(self) -> None:
        for function, args, kwargs, results in self._calls:
            again = function(*args, **kwargs)
            for before, now in zip(tree_leaves(results), tree_leaves(again), strict=True):
                if isinstance(now, torch.Tensor) and now.data_ptr() != before.data_ptr():
                    before.copy_(now)


def _make_stream() -> ctypes.c_void_p:
    driver, stream = ctypes.CDLL(DRIVER), ctypes.c_void_p()
    assert make_current(driver) and driver.cuStreamCreate(ctypes.byref(stream), 0) == 0
    return stream


@contextlib.contextmanager
def capture(graph: Graph, **_: object):
    """Stands for torch.cuda.graph. As torch's streams do, the one that captures lives on."""
    driver, stream, result = ctypes.CDLL(DRIVER), _make_stream(), ctypes.c_void_p()
    assert driver.cuStreamBeginCapture_v2(stream, _RELAXED) == 0
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cuda, "is_capturing", lambda: True)
            patch.setattr(cuda, "current_stream", lambda tensor: stream.value)
            with graph:
                yield
    finally:
        assert driver.cuStreamEndCapture(stream, ctypes.byref(result)) == 0


@contextlib.contextmanager
def _beside(stream: ctypes.c_void_p):
    """Stands for torch.cuda.stream. What is computed meanwhile nobody looks at."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "current_stream", lambda tensor: stream.value)
        yield


def install(patch: pytest.MonkeyPatch) -> None:
    """Until `patch` is undone."""
    patch.setattr(torch.cuda, "CUDAGraph", Graph)
    patch.setattr(torch.cuda, "graph", capture)
    patch.setattr(torch.cuda, "Stream", _make_stream)
    patch.setattr(torch.cuda, "stream", _beside)
    patch.setattr(torch.cuda, "synchronize", lambda: None)
    patch.setattr(torch.cuda.graphs, "graph_pool_handle", lambda: None)


@pytest.fixture
def cuda_graphs(monkeypatch):
    install(monkeypatch)
