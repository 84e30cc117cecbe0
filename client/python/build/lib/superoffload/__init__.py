"""Trainers' side of superoffloadd.

``superoffload.torch`` has the optimizers for PyTorch. Importing this package imports neither torch nor jax.
"""

from superoffload._error import Error

__version__ = "0.1.0"
__all__ = ["Error"]
