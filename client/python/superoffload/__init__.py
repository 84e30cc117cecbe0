"""Trainers' side of superoffloadd.

``superoffload.torch`` has the optimizers for PyTorch. Importing this package imports neither torch nor jax.
"""

import importlib.metadata

from superoffload._core.error import Error

__all__ = ["Error"]


def __getattr__(name: str) -> str:
    if name == "__version__":
        return importlib.metadata.version("superoffload")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
