"""Options of torch.optim: taken where they change nothing, refused where they would have to change results."""

import os
import re
import sys
import uuid
from collections.abc import Iterable, Mapping
from typing import Any

import grpc

from superoffload import _torch_warn
from superoffload._daemon import is_private
from superoffload._error import Error
from superoffload.v1 import optimizer_pb2

_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")

# Values that change nothing, of options that change results.
_HARMLESS = {"amsgrad": False, "maximize": False, "differentiable": False, "max_grad_norm": None}

_REMEDIES = {
    "amsgrad": "the daemon has no such moment; build with amsgrad=False",
    "maximize": "negate the loss instead",
    "differentiable": "the step runs in another process, and autograd does not see it",
    "max_grad_norm": "it is the optimizer's, for all groups: pass it when building",
}


_ALGORITHMS = {optimizer_pb2.ALGORITHM_ADAMW: "AdamW", optimizer_pb2.ALGORITHM_ADAM: "Adam"}


def make_name() -> str:
    """For an optimizer that nobody will ask for by name."""
    program = re.sub(r"[^A-Za-z0-9._-]", "_", os.path.basename(sys.argv[0])).lstrip("-") or "python"  # "-c": no option
    return f"{program}-{os.getpid()}-{uuid.uuid4().hex[:8]}"[-128:]


def check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise Error(
            grpc.StatusCode.INVALID_ARGUMENT,
            f"the optimizer's name is {name!r} but must be 1 to 128 letters, digits, '.', '_' or '-'",
        )


def check_algorithm(existing: optimizer_pb2.Optimizer, algorithm: int) -> None:
    """Raises Error when the optimizer to attach to computes something else."""
    if existing.algorithm != algorithm:
        theirs, ours = _ALGORITHMS.get(existing.algorithm, "of another kind"), _ALGORITHMS[algorithm]
        raise Error(
            grpc.StatusCode.FAILED_PRECONDITION,
            f'optimizer "{existing.name}" is {theirs}, but this is {ours}; build {theirs}, choose another name or '
            "delete that optimizer",
        )


def warn_of_private_name(name: str, endpoint: str) -> None:
    if is_private(endpoint):
        _torch_warn.warn(
            f'optimizer "{name}" begins at step 0 and ends with this process, because its superoffloadd does: start '
            "superoffloadd to keep it, or save its state_dict() (restore=, checkpoint= or state_directory= say that "
            "this is meant)"
        )


def check_whole(groups: Iterable[dict[str, Any]]) -> None:
    """Raises Error for parameters of which this process has a shard only."""
    for group in groups:
        for tensor in group["params"]:
            kind = None
            if hasattr(tensor, "placements") and hasattr(tensor, "device_mesh"):
                kind = "a DTensor, as FSDP2 (fully_shard) and tensor parallelism make them"
            elif type(tensor).__name__ == "FlatParameter" or getattr(tensor, "_fsdp_flattened", False):
                kind = "sharded by FSDP"
            if kind is not None:
                raise Error(
                    grpc.StatusCode.UNIMPLEMENTED,
                    f"a parameter is {kind}: sharded parameters are not supported yet; use DistributedDataParallel",
                )


def check_flags(options: Mapping[str, Any], where: str = "") -> None:
    for option, harmless in _HARMLESS.items():
        if options.get(option, harmless) not in (harmless, None):
            raise Error(
                grpc.StatusCode.UNIMPLEMENTED,
                f"{where}{option}={options[option]!r} is not supported: {_REMEDIES[option]}",
            )


def check_groups(groups: Iterable[dict[str, Any]], algorithm: int) -> None:
    """Raises Error for an option of a parameter group, built, loaded or changed, that would have to change results."""
    decoupled = algorithm == optimizer_pb2.ALGORITHM_ADAMW
    for index, group in enumerate(groups):
        check_flags(group, f"parameter group {index}: ")
        if group.get("decoupled_weight_decay", decoupled) is not decoupled and group["weight_decay"] != 0:
            ours, theirs = ("AdamW", "Adam") if decoupled else ("Adam", "AdamW")
            raise Error(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"parameter group {index} has the weight decay of {theirs}, but this is {ours}; build {theirs}",
            )
