"""How an optimizer keeps its moments: in fp32, or in bf16 with either rounding."""

from typing import Literal

import grpc

from superoffload._core.error import Error
from superoffload.v1 import optimizer_pb2

Rounding = Literal["stochastic", "nearest"]

# What is appended to the daemon's name of an algorithm whose moments are in bf16.
BFLOAT16: dict[Rounding, str] = {"stochastic": "_bf16", "nearest": "_bf16_nearest"}


def daemon_name(in_float32: str, dtype: str, rounding: Rounding) -> str:
    """The daemon's name of the algorithm ``in_float32`` with moments of ``dtype``, by its name in torch and NumPy."""
    if rounding not in BFLOAT16:
        raise ValueError(f"rounding is {rounding!r} but must be one of {', '.join(map(repr, BFLOAT16))}")
    if dtype == "float32":
        return in_float32
    if dtype == "bfloat16":
        return in_float32 + BFLOAT16[rounding]
    raise ValueError(f"state_dtype is {dtype} but must be float32 or bfloat16")


def check_seed(seed: int | None) -> None:
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1 << 64):
        raise ValueError(f"seed is {seed!r} but must be a whole number from 0 to 2**64 - 1")


def check_same_seed(existing: optimizer_pb2.Optimizer, seed: int | None) -> None:
    """Raises Error when the optimizer to attach to rounds under another seed than the one that is given."""
    if seed is not None and existing.HasField("seed") and existing.seed != seed:
        raise Error(
            grpc.StatusCode.FAILED_PRECONDITION,
            f'optimizer "{existing.name}" rounds under seed {existing.seed}, but this is built with seed={seed}; leave '
            "seed out to go on with that one, choose another name or delete that optimizer",
        )
