"""The C++ example trainer."""

import os
import pathlib
import pydoc_data.topics
import subprocess

TRAINER = pathlib.Path(os.environ["SUPEROFFLOAD_BUILD"]) / "client" / "train_bigram"


def train(daemon, *flags: str) -> subprocess.CompletedProcess:
    text = f"--text={pydoc_data.topics.__file__}"
    return subprocess.run(
        [TRAINER, text, f"--endpoint={daemon.endpoint}", *flags], capture_output=True, text=True, timeout=120
    )


def test_it_learns_the_same_in_every_run(daemon):
    runs = [train(daemon, "--steps=200") for _ in range(2)]
    assert runs[0].returncode == 0, runs[0].stderr
    assert runs[0].stdout == runs[1].stdout
    losses = [float(line.split()[3]) for line in runs[0].stdout.splitlines()]
    assert losses[0] > 5.5 and losses[-1] < 2.2


def test_it_reports_what_went_wrong(daemon):
    assert "--text" in train(daemon, "--text=/nonexistent").stderr
    run = train(daemon, "--endpoint=unix:/nonexistent")
    assert run.returncode == 1 and "UNAVAILABLE" in run.stderr
