"""All optimizers of a process share one conversation with the daemon, whatever their number, threads and ends."""

import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch
from tests.conftest import Daemon
from tests.support.open_files import open_files

import superoffload.torch

CONNECTION = 4  # sockets in the daemon: one for descriptors, and gRPC's with both sides of its relay


def sockets(process_id):
    return sum(file.startswith("socket:") for file in open_files(process_id).values())


def parameters(count, size=8):
    torch.manual_seed(count)
    return [torch.nn.Parameter(torch.randn(size, dtype=torch.float32)) for _ in range(count)]


def step(optimizer, parameter):
    parameter.square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture
def endpoint(daemon, monkeypatch):
    monkeypatch.setenv("SUPEROFFLOAD_ENDPOINT", daemon.endpoint)
    return daemon.endpoint


def test_an_optimizer_per_parameter_steps_inside_of_backward(daemon, endpoint):
    """The way of torch's tutorial: a hook steps a parameter's optimizer as soon as its gradient is there."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(150)))
    theirs = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(150)))
    theirs.load_state_dict(model.state_dict())

    def train(network, kind):
        optimizers = {parameter: kind([parameter], lr=1e-2) for parameter in network.parameters()}

        def hook(parameter):
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in network.parameters():
            parameter.register_post_accumulate_grad_hook(hook)
        for seed in range(3):
            torch.manual_seed(seed)
            network(torch.randn(4, 8)).square().mean().backward()
        return optimizers

    train(theirs, torch.optim.AdamW)
    before = sockets(daemon.process.pid)
    optimizers = train(model, superoffload.torch.AdamW)
    assert sockets(daemon.process.pid) - before <= CONNECTION
    for ours, expected in zip(model.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-7)
    for optimizer in optimizers.values():
        optimizer.close()


def test_a_session_ends_with_its_last_optimizer_and_the_next_one_has_another(daemon, endpoint):
    first, second, third = parameters(3)
    before = sockets(daemon.process.pid)
    one, two = (superoffload.torch.AdamW([parameter]) for parameter in (first, second))
    assert sockets(daemon.process.pid) == before + CONNECTION
    one.close()
    step(two, second)
    assert two.committed_steps == 1
    two.close()
    deadline = time.monotonic() + 60
    while sockets(daemon.process.pid) > before:  # the daemon closes its ends when it sees ours closed
        assert time.monotonic() < deadline
        time.sleep(0.01)
    other = superoffload.torch.AdamW([third])
    step(other, third)
    assert other.committed_steps == 1
    other.close()


def test_threads_build_use_and_close_their_own(endpoint):
    """With tensors of different sizes: none is given another's memory."""
    errors = []

    def train(number):
        try:
            for _ in range(5):
                parameter = torch.nn.Parameter(torch.full((64 + 16 * number,), float(number + 1)))
                expected = torch.nn.Parameter(parameter.detach().clone())
                ours = superoffload.torch.AdamW([parameter], lr=0.5, weight_decay=0)
                reference = torch.optim.AdamW([expected], lr=0.5, weight_decay=0)
                for _ in range(2):
                    step(ours, parameter)
                    step(reference, expected)
                ours.close()
                torch.testing.assert_close(parameter, expected, rtol=1e-6, atol=1e-7)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=train, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


@pytest.mark.parametrize("late", [False, True], ids=["between-steps", "inside-of-a-step"])
def test_all_come_back_to_a_daemons_successor_in_one_session(monkeypatch, late):
    kept = Daemon("--keeper", "--metrics_address=off")
    monkeypatch.setenv("SUPEROFFLOAD_ENDPOINT", kept.endpoint)
    ours, theirs = parameters(6), parameters(6)
    optimizers = [superoffload.torch.AdamW([parameter], lr=0.1) for parameter in ours]
    references = [torch.optim.AdamW([parameter], lr=0.1) for parameter in theirs]

    def children():
        text = pathlib.Path(f"/proc/{kept.process.pid}/task/{kept.process.pid}/children").read_text()
        return [int(child) for child in text.split()]

    def kill():
        (victim,) = children()
        os.kill(victim, signal.SIGKILL)
        deadline = time.monotonic() + 60
        while children() in ([], [victim]):
            assert time.monotonic() < deadline
            time.sleep(0.01)

    for number in range(4):
        for parameter in [*ours, *theirs]:
            parameter.square().sum().backward()
        if number == 2 and late:
            kill()
        for optimizer in [*optimizers, *references]:
            optimizer.step()
            optimizer.zero_grad()
        if number == 2 and not late:
            kill()
    for parameter, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-6, atol=1e-7)
    assert [optimizer.committed_steps for optimizer in optimizers] == [4] * 6
    assert len({id(optimizer._hosting.connection._session) for optimizer in optimizers}) == 1
    for optimizer in optimizers:
        optimizer.close()
    assert kept.stop() == 0, kept.log


def test_a_child_that_is_forked_after_the_first_optimizer_is_told_and_one_before_has_its_own(endpoint):
    script = """
        import os, sys, torch, superoffload, superoffload.torch

        def train():
            parameter = torch.nn.Parameter(torch.ones(8))
            optimizer = superoffload.torch.AdamW([parameter])
            parameter.square().sum().backward()
            optimizer.step()
            print(optimizer.committed_steps, flush=True)
            return optimizer

        def forked():
            child = os.fork()
            if child == 0:
                try:
                    train()
                except superoffload.Error as error:
                    print(error.code.name, "spawn it instead" in str(error), flush=True)
                sys.exit(0)
            assert os.waitpid(child, 0)[1] == 0

        forked()
        parents = train()
        forked()
    """
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["1", "1", "FAILED_PRECONDITION True"]
