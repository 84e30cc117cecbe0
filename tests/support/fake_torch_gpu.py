"""Has superoffload.torch take the CPU's tensors for a GPU's, whose driver is the fake one.

The host may not touch the fake driver's device memory, so torch computes on its alias, and on the default stream, which
is the calling thread; torch's own memory stands for GPU memory, too. Everything but superoffload._torch_gpu, whose four functions ask torch's CUDA support, is what runs on a GPU.
"""

import ctypes
import os
import pathlib

import pytest
import torch

from superoffload import _torch_gpu

DRIVER = pathlib.Path(os.environ["SUPEROFFLOAD_BUILD"]) / "tests" / "support" / "fake-cuda" / "libcuda.so.1"


def _view(pointer: int, like: torch.Tensor, owner: object) -> torch.Tensor:
    alias = ctypes.CDLL(DRIVER).fakeCudaAlias
    alias.restype, alias.argtypes = ctypes.c_uint64, [ctypes.c_uint64]
    region = type("Region", (ctypes.c_byte * (like.numel() * like.element_size()),), {}).from_address(alias(pointer))
    region.owner = owner
    return torch.frombuffer(region, dtype=like.dtype, count=like.numel()).view(like.shape)


def install(patch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Until `patch` is undone. Returns the tensors that the adapter has asked to be kept for the pack stream."""
    ctypes.CDLL(DRIVER, mode=ctypes.RTLD_GLOBAL)  # found by its name when the client library asks for the driver
    patch.setenv("LD_LIBRARY_PATH", str(DRIVER.parent))  # of daemons
    patch.setenv("FAKE_CUDA_DELAY", "300")
    patch.setenv("FAKE_CUDA_HOST_IS_GPU", "1")
    kept = []
    patch.setattr(_torch_gpu, "is_on_gpu", lambda tensor: True)
    patch.setattr(_torch_gpu, "ordinal", lambda tensor: 0)
    patch.setattr(_torch_gpu, "current_stream", lambda tensor: 0)
    patch.setattr(_torch_gpu, "view", _view)
    patch.setattr(_torch_gpu, "keep_for_stream", lambda tensor, stream: kept.append(tensor))
    return kept


@pytest.fixture
def fake_gpu(monkeypatch):
    """Returns a list of the tensors that the adapter has asked to be kept for the pack stream."""
    return install(monkeypatch)
