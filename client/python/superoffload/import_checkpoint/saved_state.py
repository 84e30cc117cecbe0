"""What a checkpoint of DeepSpeed has of each parameter, whichever kind it is, and checks of what its files have."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import grpc

from superoffload._core.error import Error
from superoffload.import_checkpoint.inert_pickle import Inert
from superoffload.import_checkpoint.torch_file import StoredTensor

MASTER = "model"  # as the daemon calls the fp32 weights
FIRST, SECOND = "exp_avg", "exp_avg_sq"  # moments, in DeepSpeed and in the daemon
STEP = "step"
WIDENED = ("float32", "bfloat16", "float16")  # dtypes of which fp32 has all numbers

_MOST = 1 << 32  # steps, and more than any other whole number here

_T = TypeVar("_T")
_KINDS = {dict: "a dict", list: "a list", StoredTensor: "a tensor", str: "text", tuple: "a shape"}


class Piece(NamedTuple):
    """Elements [first, first + elements) of a tensor, which lie in a parameter one after the other."""

    tensor: StoredTensor
    first: int
    elements: int


@dataclasses.dataclass(frozen=True)
class Parameter:
    shape: tuple[int, ...]
    group: int
    steps: int
    arrays: dict[str, list[Piece]]  # by array: MASTER and the moments; each has all elements, in their order


@dataclasses.dataclass(frozen=True)
class SavedState:
    parameters: dict[str, Parameter]  # by name, in DeepSpeed's order
    groups: list[dict[str, Any]]  # param_groups of DeepSpeed's optimizer; empty dicts where the files lack them
    configuration: Mapping[str, Any]  # DeepSpeed's, where the files have it
    left_out: "LeftOut"


@dataclasses.dataclass(frozen=True)
class LeftOut:
    """Numbers of tensors of the model that are not the optimizer's."""

    frozen: int
    buffers: int
    tied: int  # names beside the one under which a tensor was saved


def inconsistent(where: str, why: str) -> Error:
    return Error(
        grpc.StatusCode.DATA_LOSS,
        f"{where} {why}; copy the checkpoint once more, or take one that DeepSpeed has finished writing",
    )


def member(of: Any, key: Any, kind: type[_T], where: str) -> _T:
    """``of[key]``. ``where``: the file, and what in it ``of`` is. Raises Error: it is missing, or of another kind."""
    there = key in of if isinstance(of, dict) else isinstance(of, list) and key < len(of)
    value = of[key] if there else None
    if isinstance(value, kind):
        return value
    found = "nothing" if not there else value.named if isinstance(value, Inert) else f"a {type(value).__name__}"
    raise inconsistent(where, f"has {found} as {key!r}, where {_KINDS[kind]} must be")


def optional(of: Mapping[Any, Any], key: Any, kind: type[_T], absent: _T) -> _T:
    """``of[key]``, or ``absent`` where it is missing or of another kind."""
    value = of.get(key)
    return value if isinstance(value, kind) else absent


def number(value: Any, what: str) -> float | int:
    """A Python number, of a tensor with one element, or of an enum."""
    if isinstance(value, StoredTensor):
        value = value.number()
    if isinstance(value, Inert) and len(value.arguments) == 1:
        value = value.arguments[0]
    kept = isinstance(value, float) or (type(value) is int and abs(value) < _MOST)  # a larger one fits no float
    if not kept:
        raise inconsistent(what, "is no number")
    read: float | int = value
    return read


def whole_number(value: Any, what: str) -> int:
    read = number(value, what)
    if not math.isfinite(read) or read != int(read) or not 0 <= read < _MOST:
        raise inconsistent(what, f"is {read} and must be a whole number below {_MOST}")
    return int(read)


def floats(tensor: StoredTensor, where: str) -> StoredTensor:
    """The same. Raises Error where its elements cannot be read one after the other as fp32."""
    if tensor.dtype not in WIDENED or not tensor.contiguous:
        kind = tensor.dtype if tensor.contiguous else "transposed or has gaps"
        raise Error(
            grpc.StatusCode.UNIMPLEMENTED,
            f"{where} is {kind}, but must be contiguous and one of {', '.join(WIDENED)}; save it so with DeepSpeed",
        )
    return tensor


def shapes(model: Any, where: str) -> list[dict[str, tuple[int, ...]]]:
    """param_shapes of a file of model states: names and shapes by group, or by sub-group of stage 3."""
    saved = member(model, "param_shapes", list, where)
    where = f"{where}: param_shapes"
    divided = [member(saved, group, dict, where) for group in range(len(saved))]
    for of_group in divided:
        for name in of_group:
            shape = member(of_group, name, tuple, where)
            if not isinstance(name, str) or not all(type(extent) is int and extent >= 0 for extent in shape):
                raise inconsistent(where, f"has a shape of {name!r} that is none")
    return divided


def moments(state: Mapping[Any, Any], where: str) -> tuple[str, ...]:
    """The moments of a parameter's state. Raises Error where it is not that of an Adam or a Lion."""
    tensors = {key for key, value in state.items() if key in (FIRST, SECOND) or isinstance(value, StoredTensor)}
    tensors.discard(STEP)
    for known in ((FIRST, SECOND), (FIRST,)):
        if tensors == set(known):
            return known
    if not tensors:
        raise Error(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"{where} has no moments, as before the first step; save a checkpoint after it, or begin from the weights",
        )
    raise Error(
        grpc.StatusCode.UNIMPLEMENTED,
        f"{where} has {', '.join(sorted(map(str, tensors)))}, which is not what Adam or Lion has ({FIRST}, {SECOND}); "
        "such an optimizer cannot be continued, so begin from the weights",
    )


def pieces(tensors: Sequence[StoredTensor], first: int, count: int) -> list[Piece]:
    """Elements [first, first + count) of ``tensors`` one after the other, which have so many."""
    found, begin = [], 0
    for tensor in tensors:
        low, high = max(first, begin), min(first + count, begin + tensor.elements)
        if low < high:
            found.append(Piece(tensor, low - begin, high - low))
        begin += tensor.elements
    return found


def left_out(model: Mapping[Any, Any], names: Sequence[str]) -> LeftOut:
    """``model``: a file of model states. ``names``: of the optimizer's parameters."""
    buffers = {name for name in optional(model, "buffer_names", list, []) if isinstance(name, str)}
    tied = set(optional(model, "shared_params", dict, {}))
    others = set(optional(model, "module", dict, {})) - set(names) - tied
    return LeftOut(frozen=len(others - buffers), buffers=len(others & buffers), tied=len(tied))
