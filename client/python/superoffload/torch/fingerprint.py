"""Tells on its own device whether a tensor's bits have changed."""

from collections.abc import Sequence

import torch

from superoffload._core import memory
from superoffload.torch import cuda

_CHUNK = 1 << 22
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_weights: dict[torch.device, torch.Tensor] = {}


@torch.no_grad()
def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """Returns one int64: the sum, modulo 2^64, of all elements' bits times odd random numbers of their places."""
    weights = _weights.get(tensor.device)
    if weights is None:
        numbers = torch.empty(_CHUNK, dtype=torch.int64, device="cpu")
        numbers.random_(generator=torch.Generator().manual_seed(2**31 - 1))
        weights = _weights[tensor.device] = (2 * numbers + 1).to(tensor.device)
    bits = tensor.detach().contiguous().view(-1).view(_INTEGERS[tensor.element_size()])
    result = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for begin in range(0, bits.numel(), _CHUNK):
        part = bits[begin : begin + _CHUNK].to(torch.int64)
        result = result * 6364136223846793005 + (part * weights[: part.numel()]).sum()
    return result


def first_difference(a: list[torch.Tensor], b: list[torch.Tensor]) -> int | None:
    """Index of fingerprints that differ, if any; waits for the device."""
    if not a:
        return None
    different = (torch.stack(a) != torch.stack(b)).nonzero()
    return int(different[0]) if len(different) else None


def digests(tensors: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """Returns one int64 of each tensor, computed where it is, and 0 of None."""
    some = {index: tensor.contiguous() for index, tensor in enumerate(tensors) if tensor is not None}
    if not some:
        return torch.zeros(len(tensors), dtype=torch.int64, device="cpu")
    if all(map(cuda.is_on_gpu, some.values())):
        found = torch.stack([fingerprint(tensor) for tensor in some.values()])
    else:
        ranges = [(tensor.data_ptr(), None, tensor.nbytes) for tensor in some.values()]
        unsigned = memory.copy_and_digest(ranges, torch.get_num_threads())
        found = torch.tensor([digest - (digest >> 63 << 64) for digest in unsigned], dtype=torch.int64, device="cpu")
    result = torch.zeros(len(tensors), dtype=torch.int64, device=found.device)
    result[torch.tensor(list(some), dtype=torch.int64, device=found.device)] = found
    return result
