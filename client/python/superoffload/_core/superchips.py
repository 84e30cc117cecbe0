"""Which of a machine's daemons a process trains with: that of the Superchip to which its GPU or its CPUs belong."""

import os
import re
from collections.abc import Mapping, Sequence

import grpc

from superoffload._core.error import Error
from superoffload.v1 import optimizer_pb2, optimizer_pb2_grpc

# Of this process among those of its job on this machine, and how many they are, as launchers tell.
_LOCAL_RANKS = (
    ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
)


def fill(endpoint: str) -> str:
    """``{local_rank}`` in an endpoint is that of this process; raises Error where no launcher has told it."""
    if "{local_rank}" not in endpoint:
        return endpoint
    rank, _ = _local_rank(os.environ)
    if rank is None:
        variables = ", ".join(f"${rank}" for rank, _ in _LOCAL_RANKS)
        raise Error(
            grpc.StatusCode.INVALID_ARGUMENT,
            f"the endpoint {endpoint} needs a local rank, but none of {variables} is set; start the job with a "
            "launcher, or name this rank's daemon",
        )
    return endpoint.replace("{local_rank}", str(rank))


def _local_rank(environment: Mapping[str, str]) -> tuple[int | None, int | None]:
    for rank, ranks in _LOCAL_RANKS:
        if environment.get(rank, "").isdecimal():
            count = re.match(r"\d+", environment.get(ranks, ""))  # Slurm: "2(x4)"
            return int(environment[rank]), int(count.group()) if count else None
    return None, None


def topology(endpoint: str) -> optimizer_pb2.Topology | None:
    """Of the machine, as a daemon sees it; None: it cannot tell."""
    with grpc.insecure_channel(endpoint) as channel:
        stub = optimizer_pb2_grpc.ServerServiceStub(channel)
        try:
            return stub.GetTopology(optimizer_pb2.GetTopologyRequest(), timeout=5)
        except grpc.RpcError:
            return None


def choose(
    daemons: Sequence[tuple[str, optimizer_pb2.Topology | None]],
    gpu: str | None,
    cpus: set[int],
    environment: Mapping[str, str],
) -> str:
    """The endpoint of one of them. ``gpu``: PCI address of the process's; ``cpus``: on which it may run.

    The same process of a job that is started again on the same machine gets the same one.
    """
    bound = [
        (machine.used_superchip, endpoint, machine.superchips[machine.used_superchip])
        for endpoint, machine in daemons
        if machine is not None and machine.HasField("used_superchip")
    ]
    bound.sort(key=lambda daemon: daemon[:2])
    if not bound:
        return daemons[0][0]
    for _, endpoint, superchip in bound:
        if gpu is not None and gpu.lower() in (address.lower() for address in superchip.gpus):
            return endpoint
    for _, endpoint, superchip in bound:
        if cpus <= {cpu for core in superchip.cores for cpu in core.cpus}:
            return endpoint
    rank, ranks = _local_rank(environment)
    if rank is None:
        return bound[0][1]
    if ranks is None or ranks <= rank:
        return bound[rank % len(bound)][1]
    return bound[rank * len(bound) // ranks][1]  # the first ranks to the first Superchip, as launchers bind them
