"""What parameters of resident buckets are that have a log: the masters on the GPU say it.

What the daemon has published of them stays behind.
"""

import dataclasses
from collections.abc import Iterable, Iterator

import torch

from superoffload._core import dtypes, layout
from superoffload._core.gpu_attachment import GpuAttachment
from superoffload.torch import cuda
from superoffload.torch.guards.master_canaries import KnownMasters, MasterCanaries


@dataclasses.dataclass(frozen=True)
class _Bucket:
    bytes: range  # of the parameters' memory
    dtype: torch.dtype
    master_dtype: torch.dtype
    masters: int  # device pointer


class ResidentMasters:
    """Of an attachment, until its `resident_changes` is another."""

    def __init__(self, attachment: GpuAttachment, device: torch.device) -> None:
        self._attachment, self._device = attachment, device
        buckets = attachment.optimizer.layout.buckets
        self._buckets = [
            _Bucket(
                range(
                    bucket.parameters_offset, bucket.parameters_offset + bucket.elements * dtypes.BYTES[bucket.dtype]
                ),
                getattr(torch, dtypes.NAMES[bucket.dtype]),
                getattr(torch, layout.master_dtype(attachment.optimizer.layout, bucket)),
                attachment.resident_masters(index),
            )
            for index, bucket in enumerate(buckets)
            if index >= len(buckets) - attachment.resident_buckets and bucket.log_slots > 0
        ]
        self._buckets.sort(key=lambda bucket: bucket.bytes.start)

    def of(self, begin: int, parameter: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """Which elements of a parameter at ``begin`` of the parameters' memory they know, and what those are."""
        width = parameter.element_size()
        for bucket in self._buckets:
            first, end = max(begin, bucket.bytes.start), min(begin + parameter.nbytes, bucket.bytes.stop)
            if first < end:
                masters = self._view(bucket.masters, (end - bucket.bytes.start) // width, bucket.master_dtype)
                known = masters[(first - bucket.bytes.start) // width :]
                yield slice((first - begin) // width, (end - begin) // width), known.to(parameter.dtype)

    def find(self, canaries: torch.Tensor) -> MasterCanaries:
        """What they know of ``canaries``: two bytes at each of these places in the parameters' memory, in bytes."""
        if not self._buckets:
            return MasterCanaries([])
        starts = _on_cpu(bucket.bytes.start for bucket in self._buckets)
        stops = _on_cpu(bucket.bytes.stop for bucket in self._buckets)
        owners = (torch.searchsorted(starts, canaries, right=True) - 1).clamp(min=0)
        inside = (canaries >= starts[owners]) & (canaries < stops[owners])
        lowest = min(bucket.masters for bucket in self._buckets)
        firsts = _on_cpu((bucket.masters - lowest) // bucket.master_dtype.itemsize for bucket in self._buckets)
        known = []
        for dtype, master_dtype in {(bucket.dtype, bucket.master_dtype) for bucket in self._buckets}:
            alike = _on_cpu((each.dtype, each.master_dtype) == (dtype, master_dtype) for each in self._buckets)
            positions = (inside & (alike[owners] == 1)).nonzero().flatten()
            if len(positions) == 0:
                continue
            offsets = (canaries - starts[owners])[positions]
            indices = firsts[owners][positions] + offsets // dtype.itemsize
            parts = offsets % dtype.itemsize // torch.int16.itemsize
            # What lies between buckets is not read.
            masters = self._view(lowest, int(indices.max()) + 1, master_dtype)
            known.append(KnownMasters(dtype, masters, *(of.to(self._device) for of in (positions, indices, parts))))
        return MasterCanaries(known)

    def _view(self, pointer: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        form = torch.empty(1, dtype=dtype, device="meta").expand(count)
        return cuda.view(pointer, form, self._attachment, self._device)


def _on_cpu(numbers: Iterable[int]) -> torch.Tensor:
    return torch.tensor(list(numbers), dtype=torch.int64, device="cpu")
