"""Which elements of a leaf this process has, and which of them it hosts."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import grpc
import jax

from superoffload._core.error import Error
from superoffload.jax import boxes, cuda
from superoffload.jax.boxes import Box


@dataclasses.dataclass(frozen=True)
class Placement:
    """Each element is hosted by one process."""

    local: Box  # what this process has
    part: Box | None  # what it hosts; None: nothing
    parts: Mapping[int, Box]  # what each process hosts
    divided: bool  # whether some process has elements that another one hosts


def place(name: str, position: int, leaf: Any) -> Placement:
    """``position``: of the leaf among all. Raises Error where it cannot be hosted, on all processes alike."""
    if jax.process_count() == 1:
        _check_platform(name, leaf)
        whole = boxes.whole(leaf.shape)
        return Placement(whole, whole, {0: whole}, False)
    check_global(f"parameter {name}", leaf)
    _check_platform(name, leaf)
    local: dict[int, Box] = {}
    for process, box in boxes.of_processes(leaf.sharding, leaf.shape).items():
        if box is None:
            raise _refused(
                f"the shards of parameter {name} that process {process} has make up no box of its elements: order the "
                "devices of the mesh by process along the dimensions that shard it"
            )
        local[process] = box
    if len(local) < jax.process_count():
        missing = min(set(range(jax.process_count())) - local.keys())
        raise _refused(f"parameter {name} has no shard in process {missing}: shard it over devices of all processes")
    parts = boxes.divide(local, position)
    own = jax.process_index()
    divided = any(parts.get(process) != box for process, box in local.items())
    return Placement(local[own], parts.get(own), parts, divided)


def check_global(what: str, leaf: Any) -> None:
    """With several processes: raises Error for an array that is this process's own."""
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
        raise Error(
            grpc.StatusCode.INVALID_ARGUMENT,
            f"{what} is this process's own, but there are {jax.process_count()} processes: make it an array of all of "
            "them, sharded or replicated, as with jax.make_array_from_process_local_data(sharding, array)",
        )


def _check_platform(name: str, leaf: Any) -> None:
    if not isinstance(leaf, jax.Array):
        return
    if cuda.is_on_gpu(leaf.sharding):
        if jax.process_count() == 1 and len(leaf.sharding.device_set) == 1:
            return
        raise _refused(f"parameter {name} is spread over GPUs, but " + _one_gpu())
    if others := {device.platform for device in leaf.sharding.device_set} - {"cpu"}:
        raise _refused(
            f"parameter {name} is on {min(others)}, but JAX parameters are hosted from the CPU or from an NVIDIA GPU: "
            "move them with jax.device_put(params, jax.devices('cpu')[0])"
        )


def _one_gpu() -> str:
    if jax.process_count() == 1:
        return (
            "an optimizer hosts the JAX parameters of one GPU: move them there with jax.device_put(params, "
            "jax.devices()[0]), keep them on the CPU, or train with superoffload.torch, one process per GPU"
        )
    return (
        f"there are {jax.process_count()} processes, which can host JAX parameters from their CPUs only: make them "
        "arrays of the CPU's devices (JAX_PLATFORMS=cpu), or train with superoffload.torch"
    )


def _refused(sentence: str) -> Error:
    return Error(grpc.StatusCode.UNIMPLEMENTED, sentence)
