"""Where an optimizer's arrays lie in the memory that the daemon shares."""

from superoffload.v1 import optimizer_pb2


def array_offsets(layout: optimizer_pb2.Layout) -> dict[str, int]:
    """Bytes from the beginning of the state to each array, by its name, in the algorithm's order; masters first."""
    return {array.name: array.offset for array in layout.arrays}
