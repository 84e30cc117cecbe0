"""The GPU checks on machines without a GPU: they say so, and with a fake driver run up to its calls."""

import os
import pathlib
import subprocess

import pytest
import torch
from tests.device import machine, torch_check
from tests.support.fake_torch_gpu import fake_gpu  # noqa: F401

BUILD = pathlib.Path(os.environ["SUPEROFFLOAD_BUILD"])
CHECK = BUILD / "tests" / "device" / "kernel_check"
FAKE = BUILD / "tests" / "support" / "fake-cuda"


def run(*flags, **environment):
    return subprocess.run([CHECK, *flags], capture_output=True, text=True, env={**os.environ, **environment})


@pytest.fixture(scope="module")
def checked():
    """A run with the fake driver."""
    done = run("--elements", "65536", LD_LIBRARY_PATH=str(FAKE))
    if "without GPU kernels" in done.stderr:
        pytest.skip("built without nvcc")
    return done


def test_without_a_driver_there_is_a_sentence():
    if pathlib.Path("/proc/driver/nvidia/version").exists():
        pytest.skip("there is a driver")
    done = run()
    assert done.returncode == 2
    assert "no NVIDIA driver" in done.stderr and "host memory" in done.stderr


def test_everything_runs_up_to_the_drivers_calls(checked):
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert checked.stdout.splitlines()[-1] == "checks=54 failures=0"


@pytest.mark.parametrize(
    ("result", "remedy"),
    [(2, "free GPU memory"), (201, "PID namespace"), (214, "out of service"), (999, "CUDA error 999")],
)
def test_a_failing_call_is_named_with_its_remedy(checked, result, remedy):
    done = run(LD_LIBRARY_PATH=str(FAKE), FAKE_CUDA_FAIL=f"cuMemAlloc_v2={result}")
    assert done.returncode == 2
    assert "allocating GPU memory" in done.stderr and remedy in done.stderr


@pytest.fixture
def gpu_daemon(checked, fake_gpu, daemon, monkeypatch):  # noqa: F811
    """One that sees the fake GPU; this process may have started a private one before there was any."""
    monkeypatch.setenv("SUPEROFFLOAD_ENDPOINT", daemon.endpoint)
    return daemon


@pytest.fixture(scope="module")
def on_the_host():
    return torch_check.train("cpu", torch.float16, steps=3)


def test_the_check_of_pytorch_notices_other_bits(on_the_host, gpu_daemon, capsys, monkeypatch):
    monkeypatch.setattr(machine, "DEVICE", "cpu")
    on_the_host[-1] = on_the_host[-1] + 1
    assert torch_check.compare(on_the_host, torch.float16, "trainer", steps=3) == (3, 3)
    assert "OTHER BITS in 1 of" in capsys.readouterr().out
