"""The daemon dies while a PyTorch trainer trains; the training loop does not notice."""

import math
import os
import pathlib
import random
import signal
import threading
import time

import pytest
import torch
from tests.conftest import Daemon

import superoffload.torch

STEPS = 150
MAX_KILLS = 30  # on a busy machine the daemon needs longer to come back than the next kill waits


def train(endpoint: str, name: str, clips: bool) -> tuple[list[torch.Tensor], list]:
    """``clips``: the loop does, and looks at some of what it has clipped."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)).to(torch.bfloat16)
    optimizer = superoffload.torch.AdamW(
        model.parameters(),
        lr=1e-2,
        max_grad_norm=None if clips else 0.05,
        endpoint=endpoint,
        name=name,
        bucket_bytes=16384,
    )
    results = []
    for step in range(STEPS):
        batch = torch.randn(8, 64, generator=torch.Generator().manual_seed(step)).to(torch.bfloat16)
        model(batch).float().square().mean().backward()
        if clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            if step % 2:
                model[0].weight.grad.norm()
        optimizer.step()
        optimizer.zero_grad()
        if step % 25 == 24:
            optimizer.param_groups[0]["lr"] *= 0.7  # what a daemon that starts anew could forget
        results.append(optimizer.last_result)
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.close()
    return weights, results


@pytest.mark.parametrize("clips", [False, True])
def test_a_training_loop_outlives_its_daemon(daemon, clips):
    expected, undisturbed = train(daemon.endpoint, f"undisturbed-{clips}", clips)
    seed = int.from_bytes(os.urandom(4), "little")
    print("seed", seed)
    dice = random.Random(seed)
    kept = Daemon("--keeper", "--metrics_address=off")
    children = pathlib.Path(f"/proc/{kept.process.pid}/task/{kept.process.pid}/children")
    stop = threading.Event()
    kills = []

    def kill_now_and_then():
        while not stop.is_set() and len(kills) < MAX_KILLS:
            time.sleep(dice.uniform(0.02, 0.15))
            for child in children.read_text().split():
                os.kill(int(child), signal.SIGKILL)
                kills.append(child)

    killer = threading.Thread(target=kill_now_and_then)
    killer.start()
    try:
        actual, results = train(kept.endpoint, "killed", clips)
    finally:
        stop.set()
        killer.join()
    assert kills
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert [r.committed_steps for r in results] == list(range(1, STEPS + 1))
    known = [(a, b) for a, b in zip(results, undisturbed, strict=True) if not math.isnan(a.global_norm)]
    assert all(a.global_norm == b.global_norm for a, b in known)
    kept.stop()
