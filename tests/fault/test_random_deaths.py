"""Keeper, daemon and trainer die at random, under few descriptors and little memory; every weight is as if none had.

FAULT_KILLS=N kills more. Keeper and daemon at the same instant are the machine's death: nobody is left with the memory.
"""

import contextlib
import os
import pathlib
import random
import resource
import signal
import subprocess
import sys
import time

import torch
from tests.conftest import Daemon
from tests.fault.test_keeper import OFF, wait_until
from tests.support.open_files import open_files

KILLS = int(os.environ.get("FAULT_KILLS", "8"))
STEPS = 40
MEMORY_BYTES = 8 << 30  # of address space, which threads reserve and do not use

TRAINER = """
import contextlib, sys, time, torch, superoffload.torch
from superoffload._core.error import Error

endpoint, path, steps, pause = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
torch.manual_seed(3)
model = torch.nn.Sequential(torch.nn.Linear(32, 200), torch.nn.GELU(), torch.nn.Linear(200, 32)).to(torch.bfloat16)

def build(sync):
    return superoffload.torch.AdamW(
        model.named_parameters(), 1e-2, max_grad_norm=0.05, endpoint=endpoint, name="run", sync=sync, bucket_bytes=4096
    )

while True:
    try:
        optimizer = build("pull_params")
        break
    except Error as error:
        if "incomplete" in str(error):  # the one before died in its constructor
            with contextlib.suppress(Error):
                optimizer = build("push_params")
                break
        elif error.code.name not in ("UNAVAILABLE", "UNAUTHENTICATED", "FAILED_PRECONDITION", "NOT_FOUND"):
            raise
        time.sleep(0.02)
while (step := optimizer.committed_steps) < steps:
    batch = torch.randn(8, 32, generator=torch.Generator().manual_seed(step)).to(torch.bfloat16)
    model(batch).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()  # what accumulates would die with the trainer
    time.sleep(pause)
torch.save(optimizer.state_tensors(), path)
"""


def start_trainer(daemon, path, pause):
    return subprocess.Popen([sys.executable, "-c", TRAINER, daemon.endpoint, str(path), str(STEPS), str(pause)])


def processes_of(daemon):
    """The pids of the daemon and of its keeper, as far as they live."""
    found = {}
    for process in pathlib.Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            words = (process / "cmdline").read_bytes().decode().split("\0")[:-1]
            if f"--runtime_directory={daemon.directory.name}" in words:
                found["daemon" if words[-1] == "--nokeeper" else "keeper"] = int(process.name)
    return found


def holds_memory(pid):
    with contextlib.suppress(OSError):
        return sum("memfd:superoffload-" in file for file in open_files(pid).values()) >= 5
    return False


def both_hold_memory(pids):
    return len(pids) == 2 and all(map(holds_memory, pids.values()))


def test_weights_are_those_of_an_undisturbed_run(daemon, tmp_path):
    seed = int.from_bytes(os.urandom(4), "little")
    print("seed", seed)  # pytest shows it when the test fails
    throw = random.Random(seed)
    assert start_trainer(daemon, tmp_path / "expected", 0).wait(120) == 0
    limits = {resource.RLIMIT_NOFILE: 1024, resource.RLIMIT_AS: MEMORY_BYTES}
    before = {limit: resource.getrlimit(limit) for limit in limits}
    for limit, soft in limits.items():
        resource.setrlimit(limit, (soft, before[limit][1]))
    try:
        kept = Daemon("--keeper", OFF)
    finally:
        for limit, both in before.items():
            resource.setrlimit(limit, both)
    trainer = start_trainer(kept, tmp_path / "actual", 0.1)
    kills = {"keeper": 0, "daemon": 0, "trainer": 0}
    while sum(kills.values()) < KILLS and trainer.poll() is None:
        time.sleep(throw.uniform(0, 2.0))
        pids = processes_of(kept)
        victim = throw.choice(["keeper", "keeper", "daemon", "daemon", "trainer"])
        if victim == "trainer":
            trainer.kill()
            trainer.wait()
            trainer = start_trainer(kept, tmp_path / "actual", 0.1)
        elif both_hold_memory(pids):
            os.kill(pids[victim], signal.SIGKILL)
            kept.process.poll()  # buries the first keeper
        else:
            continue
        kills[victim] += 1
    print(kills)
    assert trainer.wait(300) == 0
    actual, expected = torch.load(tmp_path / "actual"), torch.load(tmp_path / "expected")
    for name, tensors in expected.items():
        for key, tensor in tensors.items():
            assert torch.equal(actual[name][key], tensor), (name, key)
    assert sum(kills.values()) > 0
    wait_until(lambda: both_hold_memory(processes_of(kept)))  # the last kill may have come after the trainer's end
    os.kill(processes_of(kept)["daemon"], signal.SIGTERM)  # on purpose: its keeper ends as well
    wait_until(lambda: kept.process.poll() is not None and not processes_of(kept))
    kept.channel.close()
