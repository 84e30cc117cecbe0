"""The script of the jobs in run.py: trains a tiny model of FSDP2 on gloo, by name, as a user's script does.

Usage: trainer.py NAME STEPS. ``{job}`` in NAME is the job's number. Each rank appends a line to NAME.RANK, beside this
file, when it begins ("begun STEP HOST") and after each step (its number and the loss), and writes its process id to
NAME.RANK.pid.
"""

import datetime
import os
import pathlib
import socket
import sys
import time

import torch
import torch.distributed
from torch.distributed.fsdp import fully_shard

import superoffload.torch

_STEP_SECONDS = 0.05  # so that what is done to a job is done between two of its steps


def main() -> None:
    name, steps = sys.argv[1].format(job=os.environ["SLURM_JOB_ID"]), int(sys.argv[2])
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    rank = torch.distributed.get_rank()
    told = pathlib.Path(__file__).parent / f"{name}.{rank}"
    told.with_name(f"{told.name}.pid").write_text(str(os.getpid()))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    fully_shard(model)
    optimizer = superoffload.torch.AdamW(
        model.named_parameters(), lr=1e-2, max_grad_norm=0.5, name=name, sync="pull_params"
    )
    done = optimizer.committed_steps
    with told.open("a") as lines:
        print("begun", done, socket.gethostname(), file=lines, flush=True)
        for step in range(done, steps):
            inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step + rank))
            loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(step + 1, loss.item(), file=lines, flush=True)
            time.sleep(_STEP_SECONDS)
    optimizer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
