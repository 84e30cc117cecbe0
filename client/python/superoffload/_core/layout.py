"""Where an optimizer's arrays lie in the memory that the daemon shares."""

import dataclasses
from collections.abc import Sequence

from superoffload._core import dtypes
from superoffload.v1 import optimizer_pb2


@dataclasses.dataclass(frozen=True)
class ArrayPart:
    """What a parameter has of a state array: ``entries`` of ``dtype``, as torch and NumPy call it.

    An entry stands for ``block`` elements of the parameter. One of an array with ``codes`` stands for the number
    ``codes[entry]``, times the element's entry in the array ``scales``.
    """

    offset: int  # bytes from the beginning of the state
    bytes: int
    dtype: str
    entries: int
    block: int
    codes: Sequence[float]
    scales: str

    @property
    def is_scale(self) -> bool:
        return self.block > 1

    def shape(self, parameter: tuple[int, ...]) -> tuple[int, ...]:
        """Its shape, where the parameter's is this."""
        return (self.entries,) if self.is_scale else parameter


def parts_of(layout: optimizer_pb2.Layout, parameter: int, elements: int) -> dict[str, ArrayPart]:
    """Returns what a parameter of so many elements has, by the array's name, masters first; scales too."""
    placement = layout.placements[parameter]
    first = placement.state_offset
    parts = {}
    for array in _arrays(layout, placement.format):
        width = dtypes.BYTES[array.dtype]
        entries = _entries(array, elements)
        parts[array.name] = ArrayPart(
            offset=array.offset + _entries(array, first) * width,
            bytes=entries * width,
            dtype=dtypes.NAMES[array.dtype],
            entries=entries,
            block=array.elements_per_entry or 1,
            codes=array.codes,
            scales=array.scales,
        )
    return parts


def master_dtype(layout: optimizer_pb2.Layout, bucket: optimizer_pb2.Bucket) -> str:
    """Of a bucket's masters, as torch and NumPy call it."""
    return dtypes.NAMES[_arrays(layout, bucket.format)[0].dtype]


def array_offsets(layout: optimizer_pb2.Layout) -> list[int]:
    """Returns the bytes from the beginning of the state to each array, of each format in its algorithm's order."""
    return [array.offset for array in layout.arrays]


def bucket_bytes(layout: optimizer_pb2.Layout, bucket: optimizer_pb2.Bucket) -> int:
    """Returns what a bucket's state and one gradient of it take."""
    arrays = _arrays(layout, bucket.format)
    state = sum(_entries(array, bucket.elements) * dtypes.BYTES[array.dtype] for array in arrays)
    return state + bucket.elements * dtypes.BYTES[bucket.gradient_dtype]


def element_bytes(layout: optimizer_pb2.Layout) -> tuple[float, float, float]:
    """Returns bytes per element, on average: of state, of one gradient, and of a published parameter."""
    elements = sum(bucket.elements for bucket in layout.buckets)
    gradients = sum(bucket.elements * dtypes.BYTES[bucket.gradient_dtype] for bucket in layout.buckets)
    both = sum(bucket_bytes(layout, bucket) for bucket in layout.buckets)
    parameters = sum(bucket.elements * dtypes.BYTES[bucket.dtype] for bucket in layout.buckets)
    return (both - gradients) / elements, gradients / elements, parameters / elements


def _arrays(layout: optimizer_pb2.Layout, format: int) -> list[optimizer_pb2.StateArray]:
    return [array for array in layout.arrays if array.format == format]


def _entries(array: optimizer_pb2.StateArray, elements: int) -> int:
    return -(-elements // (array.elements_per_entry or 1))  # 0 in a daemon that has scales of blocks nowhere
