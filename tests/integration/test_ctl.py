"""superoffloadctl as an operator and a script use it."""

import json
import os
import pathlib
import subprocess
import threading

import pytest
import torch
from tests.conftest import Daemon

import superoffload.torch

CTL = pathlib.Path(os.environ["SUPEROFFLOAD_BUILD"]) / "client" / "superoffloadctl"


def test_bench_writes_what_the_daemon_reads(tmp_path):
    tuned = tmp_path / "tuned.textproto"
    run = subprocess.run(
        [CTL, "bench", "--elements=262144", "--repetitions=1", f"--output={tuned}"], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    values = dict(line.split(": ") for line in tuned.read_text().splitlines())
    assert values.keys() == {"worker_threads", "prefetch_elements"}
    daemon = Daemon(f"--config={tuned}", "--metrics_address=off")
    assert daemon.info.worker_threads == int(values["worker_threads"])
    assert daemon.stop() == 0


def ctl(daemon, *words: str, status: int = 0) -> str:
    run = subprocess.run([CTL, f"--endpoint={daemon.endpoint}", *words], capture_output=True, text=True, timeout=60)
    assert run.returncode == status, run.stderr
    return run.stdout if status == 0 else run.stderr


@pytest.fixture
def trainer(daemon):
    """An attached optimizer "run" and a function that makes one step of it."""
    weights = [torch.nn.Parameter(torch.ones(3, 5, dtype=torch.bfloat16)), torch.nn.Parameter(torch.ones(7))]
    optimizer = superoffload.torch.AdamW(weights, lr=0.25, endpoint=daemon.endpoint, name="run")

    def step():
        sum(w.float().sum() for w in weights).backward()
        optimizer.step()
        optimizer.zero_grad()

    step.close = optimizer.close
    yield step
    optimizer.close()


def test_info_says_what_the_daemon_is(daemon, trainer):
    text = ctl(daemon, "info")
    assert daemon.info.version in text and "1, 1 attached" in text
    info = json.loads(ctl(daemon, "info", "--json"))
    assert info["optimizers"] == 1 and info["kernel_target"] == daemon.info.kernel_target


def test_list_and_describe_show_the_optimizer(daemon, trainer):
    trainer()
    assert json.loads(ctl(daemon, "list", "--json"))["optimizers"][0]["committed_steps"] == "1"
    row = ctl(daemon, "list").splitlines()[1].split()
    assert row[0] == "run" and row[-1] == str(os.getpid())
    text = ctl(daemon, "describe", "run")
    assert "[3, 5]" in text and "bfloat16" in text and "0.25" in text and "adamw" in text
    described = json.loads(ctl(daemon, "describe", "run", "--json"))
    assert described["element_count"] == "22" and described["statistics"]["commits"] == "1"


@pytest.mark.parametrize("name", [["run"], []])
def test_watch_prints_a_line_per_step(daemon, trainer, name):
    stop = threading.Event()

    def keep_stepping():
        while not stop.is_set():
            trainer()

    stepping = threading.Thread(target=keep_stepping)
    stepping.start()
    lines = ctl(daemon, "watch", *name, "--count=3").splitlines()
    reports = [json.loads(line) for line in ctl(daemon, "watch", *name, "--count=3", "--json").splitlines()]
    stop.set()
    stepping.join()
    assert lines[0].startswith("OPTIMIZER") and len(lines) == 4
    steps = [int(line.split()[1]) for line in lines[1:]]
    assert steps == sorted(set(steps)), "each step once, in order; who reads slowly loses some"
    assert [report["verdict"] for report in reports] == ["VERDICT_COMMIT"] * 3


def test_settle_and_delete(daemon, trainer):
    trainer()
    assert "step 1" in ctl(daemon, "settle", "run")
    assert "FAILED_PRECONDITION" in ctl(daemon, "delete", "run", status=1)
    trainer.close()
    ctl(daemon, "delete", "run")
    assert json.loads(ctl(daemon, "list", "--json"))["optimizers"] == []


@pytest.mark.parametrize("command", ["describe", "settle", "delete", "watch"])
def test_an_unknown_optimizer_is_named(daemon, command):
    assert 'NOT_FOUND: you have no optimizer "nope"' in ctl(daemon, command, "nope", status=1)


@pytest.mark.parametrize("words", [[], ["fly"], ["describe"], ["info", "x"], ["watch", "a", "b"]])
def test_a_wrong_command_line_is_status_2(daemon, words):
    assert "superoffloadctl --help" in ctl(daemon, *words, status=2)


def test_without_a_daemon_the_places_are_named(tmp_path):
    run = subprocess.run(
        [CTL, "info"], capture_output=True, text=True, env={"XDG_RUNTIME_DIR": str(tmp_path)}, timeout=60
    )
    if run.returncode == 0:
        pytest.skip("a daemon of the system is running here")
    assert run.returncode == 1 and str(tmp_path) in run.stderr and "/run/superoffloadd" in run.stderr


def program(tmp_path, text):
    """Another superoffloadd, as far as check-upgrade can tell."""
    path = tmp_path / "superoffloadd"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_check_upgrade_tells_whether_the_next_daemon_recovers_the_optimizers(daemon, trainer, tmp_path):
    assert "will recover them" in ctl(daemon, "check-upgrade")
    (version,) = json.loads(ctl(daemon, "info", "--json"))["record_versions"]
    assert "will recover" in ctl(daemon, "check-upgrade", program(tmp_path, f"echo {version} {version + 1}"))
    refused = ctl(daemon, "check-upgrade", program(tmp_path, f"echo {version + 1} {version + 2}"), status=1)
    assert "checkpoints" in refused and f"of version {version}" in refused
    assert "--record_versions" in ctl(daemon, "check-upgrade", program(tmp_path, "exit 2"), status=1)


def test_a_daemon_without_optimizers_may_be_replaced_by_any(daemon, tmp_path):
    assert "hosts no optimizer" in ctl(daemon, "check-upgrade", program(tmp_path, "echo 98 99"))
