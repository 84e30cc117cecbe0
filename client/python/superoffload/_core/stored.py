"""How an optimizer keeps its moments: in fp32, in bf16 with either rounding, or in 8 bits; and its masters."""

import math
from collections.abc import Sequence
from typing import Literal

import grpc

from superoffload._core.error import Error
from superoffload.v1 import optimizer_pb2

Rounding = Literal["stochastic", "nearest"]

_LEAST_8BIT_ELEMENTS = 4096

# What is appended to the daemon's name of an algorithm whose moments are in bf16.
BFLOAT16: dict[Rounding, str] = {"stochastic": "_bf16", "nearest": "_bf16_nearest"}
# And to that of one whose masters are.
BFLOAT16_MASTERS = "_bf16_masters"


def daemon_name(in_float32: str, dtype: str, rounding: Rounding, master_dtype: str) -> str:
    """The daemon's name of the algorithm ``in_float32`` with moments and masters of such dtypes, as NumPy calls them.

    Raises ValueError where there is none.
    """
    if rounding not in BFLOAT16:
        raise ValueError(f"rounding is {rounding!r} but must be one of {', '.join(map(repr, BFLOAT16))}")
    for option, given in (("state_dtype", dtype), ("master_dtype", master_dtype)):
        if given not in ("float32", "bfloat16"):
            raise ValueError(f"{option} is {given} but must be float32 or bfloat16")
    name = in_float32 + BFLOAT16[rounding] if dtype == "bfloat16" else in_float32
    if master_dtype == "float32":
        return name
    if rounding != "stochastic":
        raise ValueError(
            "masters in bf16 are rounded stochastically, since to nearest they would not see small updates; leave "
            f"rounding={rounding!r} or master_dtype out"
        )
    return name + BFLOAT16_MASTERS


def in_float32(
    name: str, shape: Sequence[int], dtype: str, state_bits: int, master_bits: int, optim_bits: int | None
) -> bool:
    """Whether a parameter's state is kept in fp32 by an optimizer that keeps it in fewer bits.

    ``shape``: of the whole tensor. ``optim_bits``: what its group asks for. Without it moments in 8 bits are kept in
    fp32 for small parameters, vectors and embeddings, as bitsandbytes advises; these are known by their names. Masters
    in bf16 are those of parameters in bf16.
    """
    if master_bits < 32 and dtype != "bfloat16":
        return True
    if optim_bits is not None or state_bits > 8:
        return optim_bits == 32 and min(state_bits, master_bits) < 32
    return len(shape) < 2 or math.prod(shape) < _LEAST_8BIT_ELEMENTS or any(map(_is_embedding, name.split(".")))


def _is_embedding(part: str) -> bool:
    return "embed" in part.lower() or part in ("wte", "wpe")


def check_optim_bits(optim_bits: object, state_bits: int) -> None:
    if optim_bits not in (None, state_bits, 32):
        raise ValueError(
            f"optim_bits is {optim_bits!r} but must be 32{'' if state_bits == 32 else f' or {state_bits}'}; moments in "
            "8 bits are those of the optimizers whose names end in 8bit, moments in 16 those of state_dtype="
        )


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
