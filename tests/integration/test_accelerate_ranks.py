"""The Hugging Face Trainer over two ranks, started and resumed by accelerate's launcher from its configuration file."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest
import torch

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = """
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
use_cpu: true
num_machines: 1
num_processes: 2
machine_rank: 0
main_process_port: 0
mixed_precision: 'no'
"""


def launch(directory, daemons, what):
    """What each rank wrote, and the code of the launcher."""
    endpoints = [daemon.endpoint for daemon in daemons]
    done = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", "--config_file", directory / "config.yaml"]
        + ["-m", "tests.support.accelerate_trainer", what, directory / "out", *endpoints],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    return done.returncode, [torch.load(f"{directory / 'out'}{rank}") for rank in range(len(daemons))]


@pytest.fixture(scope="module")
def launched(daemons, tmp_path_factory):
    """What the ranks had before the whole job was killed, and after it was started again."""
    directory = tmp_path_factory.mktemp("job")
    (directory / "config.yaml").write_text(CONFIG)
    killed, before = launch(directory, daemons, "begin")
    assert killed == -signal.SIGKILL
    code, after = launch(directory, daemons, "resume")
    assert code == 0
    return before, after


def test_trainer_under_distributed_data_parallel(launched):
    (first, second), _ = launched
    for name, weight in first["torch"]["weights"].items():
        divided = first["divided"]["weights"][name]
        assert torch.equal(divided, first["hosted whole"]["weights"][name])
        assert torch.equal(divided, second["divided"]["weights"][name])
        assert torch.equal(divided, first["on a GPU"]["weights"][name])
        torch.testing.assert_close(divided, weight, atol=2e-6, rtol=1e-5)


def test_a_job_that_is_killed_resumes_from_what_all_ranks_have_saved(launched):
    (undisturbed, _), resumed = launched
    for rank in resumed:
        for name, weight in undisturbed["divided"]["weights"].items():
            assert torch.equal(rank["weights"][name], weight), name
    assert resumed[0]["losses"] == undisturbed["divided"]["losses"]
