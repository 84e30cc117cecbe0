"""A loop whose daemon is killed once, under a keeper."""

import os
import pathlib
import signal
import time
from collections.abc import Callable, Iterable, Iterator

import grpc
import torch
from tests.conftest import Daemon

import superoffload.torch


def kill(kept: Daemon) -> None:
    """Kills the daemon that a keeper has started; another one follows."""
    children = f"/proc/{kept.process.pid}/task/{kept.process.pid}/children"
    os.kill(int(pathlib.Path(children).read_text().split()[0]), signal.SIGKILL)


def train_through_a_death(
    kept: Daemon,
    optimizer: superoffload.torch.AdamW,
    loss_of: Callable[[int], torch.Tensor],
    steps: Iterable[int],
    dies: tuple[int, int],
) -> Iterator[int]:
    """Yields each step when it is done, of which at most one had to be made again.

    A step is two micro-batches, 2 * step and the next one. ``dies``: the step and micro-batch after whose backward the
    daemon does. Noticed before the step was begun, its death costs nothing.
    """
    lost, killed = 0, False
    for step in steps:
        while True:
            try:
                for part in range(2):
                    loss_of(2 * step + part).backward()
                    if (step, part) == dies and not killed:
                        killed = True
                        kill(kept)
                        time.sleep(0.05)
                optimizer.step()
                break
            except superoffload.Error as error:
                assert error.code == grpc.StatusCode.ABORTED, error
                lost += 1
                optimizer.zero_grad()
        optimizer.zero_grad()
        yield step
    assert killed and lost <= 1
