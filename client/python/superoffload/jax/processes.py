"""The processes of jax.distributed as the ranks of a run."""

import pickle
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


def gather_bytes(own: np.ndarray) -> list[np.ndarray]:
    """Bytes of all processes, in their order; each gives as many."""
    return list(np.asarray(multihost_utils.process_allgather(own)).reshape(jax.process_count(), -1))


class JaxGroup:
    """`superoffload._core.run.Group`: all processes. Bytes travel, so that no number loses bits without x64."""

    def __init__(self) -> None:
        self.rank = jax.process_index()
        self.ranks = jax.process_count()

    def gather_objects(self, message: Any) -> list[Any]:
        own = np.frombuffer(pickle.dumps(message), np.uint8)
        sizes = [int(size) for (size,) in self.gather_doubles([float(own.size)])]
        padded: np.ndarray = np.zeros(max(sizes), np.uint8)
        padded[: own.size] = own
        return [pickle.loads(theirs[:size].tobytes()) for theirs, size in zip(gather_bytes(padded), sizes, strict=True)]

    def gather_doubles(self, values: list[float]) -> list[list[float]]:
        own = np.asarray(values, np.float64)
        return [np.ascontiguousarray(theirs).view(np.float64).tolist() for theirs in gather_bytes(own.view(np.uint8))]


def group() -> JaxGroup | None:
    """None where this process trains alone."""
    return JaxGroup() if jax.process_count() > 1 else None
