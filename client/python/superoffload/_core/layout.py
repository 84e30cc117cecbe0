"""Where an optimizer's arrays lie in the memory that the daemon shares."""

import dataclasses

from superoffload._core import dtypes
from superoffload.v1 import optimizer_pb2


@dataclasses.dataclass(frozen=True)
class ArrayPart:
    """What a parameter has of a state array: ``entries`` of ``dtype``, as torch and NumPy call it.

    An entry stands for one element of the parameter, or for a block of them: then it ``is_scale``.
    """

    offset: int  # bytes from the beginning of the state
    bytes: int
    dtype: str
    entries: int
    is_scale: bool

    def shape(self, parameter: tuple[int, ...]) -> tuple[int, ...]:
        """Its shape, where the parameter's is this."""
        return (self.entries,) if self.is_scale else parameter


def parts_of(layout: optimizer_pb2.Layout, parameter: int, elements: int) -> dict[str, ArrayPart]:
    """Returns what a parameter of so many elements has, by the array's name, masters first."""
    first = layout.placements[parameter].state_offset
    parts = {}
    for array in layout.arrays:
        width = dtypes.BYTES[array.dtype]
        entries = _entries(array, elements)
        parts[array.name] = ArrayPart(
            offset=array.offset + _entries(array, first) * width,
            bytes=entries * width,
            dtype=dtypes.NAMES[array.dtype],
            entries=entries,
            is_scale=array.elements_per_entry > 1,
        )
    return parts


def array_offsets(layout: optimizer_pb2.Layout) -> list[int]:
    """Returns the bytes from the beginning of the state to each array, in the algorithm's order."""
    return [array.offset for array in layout.arrays]


def bucket_bytes(layout: optimizer_pb2.Layout, bucket: optimizer_pb2.Bucket) -> int:
    """Returns what a bucket's state and one gradient of it take."""
    state = sum(_entries(array, bucket.elements) * dtypes.BYTES[array.dtype] for array in layout.arrays)
    return state + bucket.elements * dtypes.BYTES[bucket.gradient_dtype]


def _entries(array: optimizer_pb2.StateArray, elements: int) -> int:
    return -(-elements // (array.elements_per_entry or 1))  # 0 in a daemon that has scales of blocks nowhere
