"""Whatever happens around a training run, its weights are those of an undisturbed one, bit for bit."""

import contextlib
import os
import pathlib
import random
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time

import grpc
import pytest
import torch
from tests.conftest import Daemon

import superoffload.torch
from superoffload._core.control import Connection
from superoffload._core.error import Error
from superoffload._core.session import Session
from superoffload.v1 import optimizer_pb2 as pb

SUPPORT = pathlib.Path(os.environ["SUPEROFFLOAD_BUILD"]) / "tests" / "support"
STEPS = 120


def train(endpoint, name, steps=STEPS, **arguments):
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)).to(torch.bfloat16)
    optimizer = superoffload.torch.AdamW(
        model.parameters(), lr=1e-2, max_grad_norm=0.05, endpoint=endpoint, name=name, bucket_bytes=8192, **arguments
    )
    for step in range(steps):
        batch = torch.randn(8, 64, generator=torch.Generator().manual_seed(step)).to(torch.bfloat16)
        model(batch).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    state = optimizer.state_tensors()
    optimizer.close()
    return state


def states_equal(a, b):
    return all(torch.equal(a[name][key], b[name][key]) for name in a for key in a[name])


def dice():
    seed = int.from_bytes(os.urandom(4), "little")
    print("seed", seed)  # pytest shows it when the test fails
    return random.Random(seed)


class Background:
    """Runs `disturb` again and again while the with block runs."""

    def __init__(self, disturb):
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(disturb,))
        self.times, self.failure = 0, None

    def _run(self, disturb):
        try:
            while not self._stop.is_set():
                disturb()
                self.times += 1
        except BaseException as failure:  # told where somebody looks
            self.failure = failure

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()
        assert self.failure is None, self.failure
        assert self.times > 0


# What a call about somebody else's attached optimizer may be answered.
HARMLESS = {
    grpc.StatusCode.OK,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.RESOURCE_EXHAUSTED,  # calls that were given up may still write files, and few do at a time
}


def test_control_messages_late_twice_lost_and_out_of_order(daemon, tmp_path):
    """Lost: the caller gives up before the answer. Twice, and in any order: by four callers at once."""
    expected = train(daemon.endpoint, "undisturbed")
    throw = dice()
    policies = [pb.SPECULATION_ALWAYS, pb.SPECULATION_NEVER, pb.SPECULATION_ADAPTIVE]

    def requests(count):
        return [
            (
                "CreateOptimizer",
                pb.CreateOptimizerRequest(name="disturbed", algorithm="adamw", groups=[pb.ParameterGroup()]),
            ),
            ("GetOptimizer", pb.GetOptimizerRequest(name="disturbed")),
            ("ListOptimizers", pb.ListOptimizersRequest()),
            ("DeleteOptimizer", pb.DeleteOptimizerRequest(name="disturbed")),
            ("DetachOptimizer", pb.DetachOptimizerRequest(name="disturbed")),
            ("PushParameters", pb.PushParametersRequest(name="disturbed")),
            ("PullParameters", pb.PullParametersRequest(name="disturbed")),
            ("SettleOptimizer", pb.SettleOptimizerRequest(name="disturbed")),
            (
                "UpdatePolicies",
                pb.UpdatePoliciesRequest(
                    name="disturbed", policies=pb.Policies(speculation=policies[count % len(policies)])
                ),
            ),
            ("RestoreOptimizer", pb.RestoreOptimizerRequest(name="disturbed", directories=["/nonexistent"])),
            ("AttachOptimizer", pb.AttachOptimizerRequest(name="disturbed", sync=pb.SYNC_PULL)),
            ("WatchSteps", pb.WatchStepsRequest(name="disturbed")),
            (
                "CheckpointOptimizer",
                pb.CheckpointOptimizerRequest(name="disturbed", directory=str(tmp_path / f"ckpt{count}")),
            ),
        ]

    def caller():
        other = Session(daemon.endpoint, 30)  # the trainer's own could do all of it
        count = 0

        def disturb():
            nonlocal count
            count += 1
            method, request = throw.choice(requests(throw.randrange(50)))
            timeout = throw.choice([0.0005, 0.01, 0.3])
            for _ in range(throw.choice([1, 1, 2])):
                call = getattr(other.stub, method)
                try:
                    paged = method in ("CreateOptimizer", "AttachOptimizer")
                    answer = call(iter([request]) if paged else request, metadata=other.metadata, timeout=timeout)
                    if method in ("AttachOptimizer", "WatchSteps", "CheckpointOptimizer"):
                        for _ in answer:
                            pass
                except grpc.RpcError as error:
                    allowed = HARMLESS | ({grpc.StatusCode.INVALID_ARGUMENT} if method == "CreateOptimizer" else set())
                    assert error.code() in allowed, (method, error.code(), error.details())
            time.sleep(throw.uniform(0, 0.01))

        return disturb

    # The trainer attaches first: deleting or attaching would otherwise be anybody's right.
    attached = threading.Event()
    result = {}

    def run():
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
        model = model.to(torch.bfloat16)
        optimizer = superoffload.torch.AdamW(
            model.parameters(),
            lr=1e-2,
            max_grad_norm=0.05,
            endpoint=daemon.endpoint,
            name="disturbed",
            bucket_bytes=8192,
        )
        attached.set()
        for step in range(STEPS):
            batch = torch.randn(8, 64, generator=torch.Generator().manual_seed(step)).to(torch.bfloat16)
            model(batch).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        done.wait()
        result["state"] = optimizer.state_tensors()
        optimizer.close()

    done = threading.Event()
    trainer = threading.Thread(target=run)
    trainer.start()
    attached.wait()
    with Background(caller()), Background(caller()), Background(caller()), Background(caller()):
        time.sleep(3)
    done.set()
    trainer.join()
    assert states_equal(result["state"], expected)


def test_either_side_is_stopped_for_a_while(daemon):
    expected = train(daemon.endpoint, "undisturbed")
    throw = dice()
    script = """
import pickle, sys, torch
sys.path.insert(0, ".")
from tests.fault.test_disturbed_training import train
torch.save(train(sys.argv[1], "stopped"), sys.argv[2])
"""
    path = pathlib.Path(daemon.directory.name) / "state"
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    trainer = subprocess.Popen([sys.executable, "-c", script, daemon.endpoint, path], env=environment)

    def stop_one():
        pid = throw.choice([trainer.pid, daemon.process.pid])
        with contextlib.suppress(ProcessLookupError):  # the trainer may be through
            os.kill(pid, signal.SIGSTOP)
            time.sleep(throw.uniform(0.001, 0.1))
            os.kill(pid, signal.SIGCONT)
        time.sleep(throw.uniform(0, 0.05))

    with Background(stop_one):
        while trainer.poll() is None:
            time.sleep(0.02)
    assert trainer.returncode == 0
    assert states_equal(torch.load(path), expected)


def test_the_clock_jumps(monkeypatch, tmp_path):
    control = tmp_path / "clock"
    control.write_text("0")
    monkeypatch.setenv("FAKE_CLOCK", str(control))
    monkeypatch.setenv("LD_PRELOAD", str(SUPPORT / "libsuperoffload_fake_clock.so"))
    jumping = Daemon("--metrics_address=off")
    monkeypatch.delenv("LD_PRELOAD")
    try:
        throw = dice()
        expected = train(jumping.endpoint, "undisturbed")

        def jump():
            control.write_text(str(throw.choice([-1, 1]) * throw.randrange(100_000)))
            time.sleep(throw.uniform(0, 0.05))

        with Background(jump):
            leased = train(jumping.endpoint, "leased", lease_seconds=3600)  # a day ahead is no hour without a trainer
        assert states_equal(leased, expected)
        connection = Connection(jumping.endpoint)
        assert connection.call("GetOptimizer", pb.GetOptimizerRequest(name="leased")).committed_steps == STEPS
        connection.close()
    finally:
        assert jumping.stop() == 0, jumping.log


def test_memory_that_the_kernel_refuses_is_an_error_and_no_crash(tmp_path):
    """A limit on file sizes makes the kernel refuse memory and disk as a full machine would."""
    limit = 8 << 20
    config = tmp_path / "superoffloadd.textproto"
    config.write_text(textwrap.dedent('metrics_address: "off"'))
    limited = Daemon(f"--config={config}")
    resource.prlimit(limited.process.pid, resource.RLIMIT_FSIZE, (limit, limit))
    with pytest.raises(Error) as raised:
        superoffload.torch.AdamW([torch.nn.Parameter(torch.ones(limit))], endpoint=limited.endpoint, name="too-large")
    assert raised.value.code == grpc.StatusCode.RESOURCE_EXHAUSTED
    state = train(limited.endpoint, "small")
    assert state
    assert limited.stop() == 0, limited.log
