"""Where each rank has a part of the state, one rank that saves alone is told what to do."""

import os
import pathlib
import subprocess
import sys
import textwrap

ROOT = pathlib.Path(__file__).parents[2]
BEGIN = """
import os, sys, warnings, torch, superoffload.torch
from superoffload.torch.state import saving as state
from tests.support import process_group
rank = int(os.environ["RANK"])
folder = sys.argv[1]
def build(model):
    return superoffload.torch.AdamW(model.parameters(), lr=0.1, replicas=True)
def train(model, optimizer):
    model(torch.ones(2, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
"""
GROUP = """
store = torch.distributed.FileStore(f"{folder}/store", 2)
torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
optimizer = build(model)
train(model, optimizer)
"""


def run_ranks(script, folder):
    """What both ranks printed."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", BEGIN + textwrap.dedent(script), folder],
            cwd=ROOT,
            env={**os.environ, "MASTER_ADDR": "localhost", "MASTER_PORT": "29877", "WORLD_SIZE": "2"}
            | {"LOCAL_WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank), "TMPDIR": str(folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    ended = [rank.communicate(timeout=200) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(error for _, error in ended)
    return [out for out, _ in ended]


def test_a_rank_that_saves_alone_is_refused_and_ranks_that_all_save_load_what_they_saved(tmp_path):
    script = (
        GROUP
        + """
state._SAVE_SECONDS = 0.5
if rank == 0:
    try:
        torch.save(optimizer.state_dict(), f"{folder}/alone.pt")
    except superoffload.Error as error:
        print(error)
torch.distributed.barrier()
state._SAVE_SECONDS = 60
torch.save(optimizer.state_dict(), f"{folder}/{rank}.pt")
before = model.weight.detach().clone()
train(model, optimizer)
optimizer.load_state_dict(torch.load(f"{folder}/{rank}.pt"))
assert torch.equal(model.weight, before) and optimizer.committed_steps == 1
optimizer.close()
process_group.leave()
"""
    )
    told, _ = run_ranks(script, tmp_path)
    assert "rank 1 did not save" in told
    for remedy in ("torch_state_dict()", "save_checkpoint()", "a file of its own"):
        assert remedy in told


def test_a_rank_that_completes_the_state_alone_says_for_whom_it_waits(tmp_path):
    script = (
        GROUP
        + """
state._SLOW_SECONDS = 0.5
def show(message, *_, **__):
    print(message)
    store.set("warned", "yes")
warnings.showwarning = show
warnings.simplefilter("always")
if rank == 1:
    store.wait(["warned"])
whole = optimizer.torch_state_dict()
assert whole["state"][0]["exp_avg"].shape == (8, 8)
optimizer.close()
process_group.leave()
"""
    )
    told, _ = run_ranks(script, tmp_path)
    assert "waits for rank 1" in told and "all ranks call torch_state_dict()" in told


def test_accelerate_saves_and_loads_what_all_ranks_have(tmp_path):
    script = """
    import accelerate
    accelerator = accelerate.Accelerator(cpu=True)
    optimizer = build(model)
    wrapped, prepared = accelerator.prepare(model, optimizer)
    accelerator.register_save_state_pre_hook(
        lambda models, weights, directory: optimizer.save_beside(os.path.join(directory, "optimizer.bin"))
    )
    train(wrapped, prepared)
    accelerator.save_state(f"{folder}/saved")
    train(wrapped, prepared)
    expected = model.weight.detach().clone()
    accelerator.load_state(f"{folder}/saved")
    assert optimizer.committed_steps == 1
    train(wrapped, prepared)
    assert torch.equal(model.weight, expected)
    optimizer.close()
    del accelerator, wrapped, prepared
    process_group.leave()
    """
    run_ranks(script, tmp_path)
