"""What every adapter asks of the daemon before it attaches: an optimizer of the name, for these parameters."""

import os
from collections.abc import Callable, Sequence

import grpc

from superoffload._core import dtypes, policies, warn
from superoffload._core.control import Connection
from superoffload._core.error import Error
from superoffload.v1 import optimizer_pb2

Directories = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def create(connection: Connection, request: optimizer_pb2.CreateOptimizerRequest) -> bool:
    """Returns False when the optimizer exists already."""
    attempts = 0

    def once() -> None:
        nonlocal attempts
        attempts += 1
        connection.call("CreateOptimizer", request)

    try:
        connection.again(once)
    except Error as error:
        if error.code != grpc.StatusCode.ALREADY_EXISTS:
            raise
        return attempts > 1 and _was_never_filled(connection, request.name)
    return True


def _was_never_filled(connection: Connection, name: str) -> bool:
    """Whether an optimizer is one that a daemon made just before it died, without a word."""
    request = optimizer_pb2.GetOptimizerRequest(name=name)
    optimizer = connection.call_again("GetOptimizer", request)
    return optimizer.state == optimizer_pb2.OPTIMIZER_STATE_INCOMPLETE and optimizer.step == 0


def checkpoints(directories: Directories) -> optimizer_pb2.RestoreOptimizerRequest:
    """What to restore: checkpoints, without the optimizer's name."""
    if isinstance(directories, str | os.PathLike):
        directories = [directories]
    return optimizer_pb2.RestoreOptimizerRequest(directories=map(os.path.abspath, directories))


def restore(connection: Connection, name: str, source: optimizer_pb2.RestoreOptimizerRequest, lineage: int = 0) -> None:
    """Has the daemon load ``source`` into the optimizer. Nobody is attached. ``lineage``: of a run of several ranks."""
    request = optimizer_pb2.RestoreOptimizerRequest()
    request.CopyFrom(source)
    request.name, request.lineage = name, lineage
    restored = connection.call_again("RestoreOptimizer", request)
    if restored.blocks_rounded > 0:
        warn.warn(
            f"{name} has {restored.blocks_rounded} blocks of quantized state that were saved in another dtype, or by "
            "ranks that cut them elsewhere: their values are rounded once more than those of a run that goes on. "
            "Restore what its own kind has saved, with as many ranks as have saved it, to have every bit"
        )
    if restored.tensors_converted > 0:
        warn.warn(
            f"{name} is restored from state of another dtype: {restored.tensors_converted} tensors are converted to "
            "its own, so that the next steps are not those of the run that saved them. Build it with the dtypes "
            "that were saved to have every bit"
        )


def delete(connection: Connection, name: str) -> None:
    connection.call_again("DeleteOptimizer", optimizer_pb2.DeleteOptimizerRequest(name=name))


def update_policies(
    connection: Connection, name: str, present: optimizer_pb2.Policies, given: optimizer_pb2.Policies
) -> None:
    """Those that are not given stay as they are."""
    merged = policies.merged(present, given)
    if merged != present:
        update = optimizer_pb2.UpdatePoliciesRequest(name=name, policies=merged)
        connection.call_again("UpdatePolicies", update)


def check_algorithm(existing: optimizer_pb2.Optimizer, daemon_name: str, shown: Callable[[str], str] = str) -> None:
    """Raises Error when the optimizer to attach to computes something else. ``shown``: an algorithm's name here."""
    if existing.algorithm != daemon_name:
        theirs = shown(existing.algorithm)
        raise Error(
            grpc.StatusCode.FAILED_PRECONDITION,
            f'optimizer "{existing.name}" is {theirs}, but this is {shown(daemon_name)}; build {theirs}, choose '
            "another name or delete that optimizer",
        )


def check_same(ours: Sequence[optimizer_pb2.Parameter], optimizer: optimizer_pb2.Optimizer) -> None:
    """Raises Error unless the hosted optimizer was made for these very parameters."""
    for mine, other in zip(ours, optimizer.parameters, strict=False):
        same = optimizer_pb2.Parameter()
        same.CopyFrom(mine)
        same.unit = other.unit  # where buckets are cut changes nothing that a step computes
        if same != other:
            difference = f"the model's parameter {_words(mine)} is {_words(other)} there"
            break
    else:
        if len(ours) == len(optimizer.parameters):
            return
        difference = f"the model has {len(ours)} parameters, it has {len(optimizer.parameters)}"
    raise Error(
        grpc.StatusCode.FAILED_PRECONDITION,
        f'optimizer "{optimizer.name}" was made for another model: {difference}; '
        "choose another name or delete that optimizer",
    )


def _words(parameter: optimizer_pb2.Parameter) -> str:
    state = ", its state in float32," if parameter.state_in_float32 else ""
    dtype = dtypes.NAMES[parameter.dtype]
    return f'"{parameter.name}" {list(parameter.shape)} {dtype}{state} in group {parameter.group}'
