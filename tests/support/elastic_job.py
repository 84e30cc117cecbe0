"""A job of two ranks as torchrun runs it: python -m tests.support.elastic_job DIRECTORY NAME ENDPOINT ENDPOINT.

torchrun's agent starts both ranks anew whenever one of them dies; they are forked, so that they need not import torch
again. "torchrun -m tests.support.elastic_job" with the same arguments is the same job, with processes of its own. Each
rank trains with its daemon to the step that DIRECTORY/target names when it starts, and writes its process id to
DIRECTORY/pid-RANK and, at the end, its weights to DIRECTORY/NAME-RANK.
"""

import datetime
import os
import pathlib
import signal
import sys
import uuid

import torch
import torch.distributed
from tests.support import process_group, sharded_trainer
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

_RESTARTS = 1000
_GROUP_SECONDS = 30
_STEP_SECONDS = 0.01


def work(directory: str, name: str, endpoints: list[str]) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not the agent's, which waits for Python
    here, rank = pathlib.Path(directory), int(os.environ["RANK"])
    (here / f"pid-{rank}.new").write_text(str(os.getpid()))
    os.rename(here / f"pid-{rank}.new", here / f"pid-{rank}")
    torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=_GROUP_SECONDS))
    result = sharded_trainer.train(
        rank,
        steps=int((here / "target").read_text()),
        name=name,
        sync="pull_params",
        endpoint=endpoints[rank],
        pause_seconds=_STEP_SECONDS,
    )
    torch.save(result["weights"], here / f"{name}-{rank}")
    process_group.leave()


def main() -> None:
    directory, name, *endpoints = sys.argv[1:]
    if "RANK" in os.environ:
        work(directory, name, endpoints)
        return
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=_RESTARTS,
        monitor_interval=0.05,
        start_method="fork",
    )
    elastic_launch(config, work)(directory, name, endpoints)


if __name__ == "__main__":
    main()
