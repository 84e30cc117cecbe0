"""What the verdict across ranks adds to a step, beside a bare all-reduce.

Each rank ends steps of one small bucket in turn: alone, and as a rank of the run, which prepares the step, gathers the
sums of squares and ends it with their total. In the same turn it all-reduces one number of fp64 over the same process
group. Prints the medians of rank 0 in microseconds, and what the run adds to the end of a step as a multiple of the
all-reduce.

    python client/bench/verdict_bench.py [--ranks 2] [--steps 500]
"""

import argparse
import ctypes
import os
import statistics
import tempfile
import time

import torch
import torch.distributed
import torch.multiprocessing

from superoffload._core import optimizers, run_step
from superoffload._core.attachment import Attachment
from superoffload._core.control import Connection
from superoffload._core.daemon import resolve_endpoint
from superoffload.torch.ranks.sharding import TorchGroup
from superoffload.v1 import optimizer_pb2

_WARM_UP = 50
_ELEMENTS = 64
_GRADIENT = (ctypes.c_float * _ELEMENTS)()


def attach(connection: Connection, name: str, group: TorchGroup | None) -> Attachment:
    parameter = optimizer_pb2.Parameter(name="w", shape=[_ELEMENTS], dtype=optimizer_pb2.DATA_TYPE_FLOAT32)
    request = optimizer_pb2.CreateOptimizerRequest(
        name=name, algorithm="adamw", parameters=[parameter], groups=[optimizer_pb2.ParameterGroup()]
    )
    if group is not None:
        request.lineage = 1
        request.member.run, request.member.rank, request.member.ranks = "bench", group.rank, group.ranks
    optimizers.create(connection, request)
    attachment = Attachment(connection, optimizer_pb2.AttachOptimizerRequest(name=name, sync=optimizer_pb2.SYNC_PUSH))
    connection.call("PushParameters", optimizer_pb2.PushParametersRequest(name=name))
    return attachment


def end_step(attachment: Attachment, group: TorchGroup | None) -> float:
    """Seconds from the last gradient to the parameters."""
    attachment.hand_over([(ctypes.addressof(_GRADIENT), 0, _ELEMENTS, 0, optimizer_pb2.DATA_TYPE_FLOAT32)])
    attachment.wait_sum()  # all passes before the verdict are over
    torch.distributed.barrier()
    begin = time.perf_counter()
    if group is None:
        attachment.end_step(1.0, 1.0)
    else:
        own = attachment.wait_prepared(1.0, 1.0)
        total = run_step.gather_total(group, attachment, own, 1.0, 1.0)
        attachment.end_prepared_step(1.0, 1.0, total)
    attachment.wait_step()
    return time.perf_counter() - begin


def all_reduce(number: torch.Tensor) -> float:
    torch.distributed.barrier()
    begin = time.perf_counter()
    torch.distributed.all_reduce(number)
    return time.perf_counter() - begin


def work(rank: int, ranks: int, steps: int, store: str, endpoint: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    connection = Connection(endpoint)
    group = TorchGroup(rank, ranks, torch.distributed.group.WORLD)
    alone, member = (attach(connection, f"bench-{os.getpid()}-{i}", kind) for i, kind in enumerate((None, group)))
    number = torch.zeros(1, dtype=torch.float64)
    seconds: list[list[float]] = [[], [], []]
    for step in range(_WARM_UP + steps):
        samples = end_step(alone, None), end_step(member, group), all_reduce(number)
        if step >= _WARM_UP:
            for series, sample in zip(seconds, samples, strict=True):
                series.append(sample)
    if rank == 0:
        by_itself, together, reduce = (1e6 * statistics.median(series) for series in seconds)
        print(f"the end of a step, alone      {by_itself:8.0f} us")
        print(f"the end of a step, {ranks} ranks    {together:8.0f} us")
        print(f"an all-reduce of one number   {reduce:8.0f} us")
        print(f"what the run adds, against the all-reduce {(together - by_itself) / reduce:6.2f}")
    torch.distributed.barrier()
    alone.end()
    member.end()
    connection.close()
    torch.distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=500)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        given = arguments.ranks, arguments.steps, f"{directory}/store", resolve_endpoint(None)
        torch.multiprocessing.spawn(work, given, nprocs=arguments.ranks)


if __name__ == "__main__":
    main()
