"""The machine that the checks run on: its GPU as torch sees it, the daemon, and where the programs are.

In a dry run torch's CPU tensors and the fake driver stand for a GPU (tests/support/fake_torch_gpu.py), and sizes are
such that a CPU gets through in a second. Everything else is the same code.
"""

import contextlib
import os
import pathlib
import subprocess
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from tests.device.session import Unavailable

DRY_RUN = os.environ.get("SUPEROFFLOAD_DEVICE_DRY_RUN") == "1"
DEVICE = "cpu" if DRY_RUN else "cuda"
GIB = 1 << 30
MOVERS = ("trainer", "daemon", "direct")  # the order in which they are tried
KERNEL_CHECK = pathlib.Path(os.environ.get("SUPEROFFLOAD_KERNEL_CHECK", "kernel_check"))
PACK_ALONE = pathlib.Path(os.environ.get("SUPEROFFLOAD_PACK_ALONE", "libpack_alone.so"))
GPU_TEST = pathlib.Path(os.environ.get("SUPEROFFLOAD_GPU_TEST", "gpu_test"))
DAEMON = os.environ.get("SUPEROFFLOAD_DAEMON", "superoffloadd")
# Of the daemon per parameter, where gradients leave the GPU in bf16: master, moments, theta and two gradient slots, and
# what lies around them.
DAEMON_BYTES_PER_PARAMETER = 20
DAEMON_SPARE_BYTES = 256 << 20
HOST_BYTES_PER_PARAMETER = DAEMON_BYTES_PER_PARAMETER + 4  # weights that a trainer has there, in bf16, and their copy
TRAINER_SPARE_BYTES = 6 << 30  # PyTorch, CUDA's contexts and pinned memory
CONTROL_GROUPS = pathlib.Path("/sys/fs/cgroup")


def use_gpu() -> None:
    """From now on torch computes on the GPU, or on what stands for it."""
    import torch

    if DRY_RUN:
        import pytest
        from tests.support import fake_torch_gpu

        fake_torch_gpu.install(pytest.MonkeyPatch())
        torch.set_num_threads(1)
    elif not torch.cuda.is_available():
        raise RuntimeError(f"PyTorch {torch.__version__} finds no GPU; is it built for CUDA, and does nvidia-smi work?")


def synchronize() -> None:
    import torch

    if not DRY_RUN:
        torch.cuda.synchronize()


def side_stream() -> contextlib.AbstractContextManager:
    """Within it torch computes on a stream of its own; it can be entered again."""
    import torch

    return contextlib.nullcontext() if DRY_RUN else torch.cuda.stream(torch.cuda.Stream())


def release_cached() -> None:
    """Has torch's allocator give back what nothing is in."""
    import torch

    if not DRY_RUN:
        torch.cuda.empty_cache()


def used_gpu_bytes() -> int:
    """Of all processes: the daemon's context and what the trainer exports to it, too."""
    import torch

    if DRY_RUN:
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def available_host_bytes() -> int:
    """MemAvailable, or what the control group leaves where that is less: a container sees the whole machine's."""
    for line in pathlib.Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return min(int(line.split()[1]) << 10, *_left_by_the_control_group())
    raise RuntimeError("/proc/meminfo names no MemAvailable")


def _left_by_the_control_group() -> list[int]:
    """One number or more; pages of files count as free."""
    left = [1 << 62]
    for folder, most, used, files in (
        (CONTROL_GROUPS, "memory.max", "memory.current", "inactive_file"),
        (CONTROL_GROUPS / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        with contextlib.suppress(OSError, ValueError):  # no such group, or "max"
            limit, usage = (int((folder / name).read_text()) for name in (most, used))
            statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            left.append(max(0, limit - usage + int(statistics.get(files, 0))))
    return left


def parameters_that_fit(wanted: int) -> int:
    """As many as the host's memory has room for while they train."""
    room = available_host_bytes() - DAEMON_SPARE_BYTES - TRAINER_SPARE_BYTES
    return max(1, min(wanted, room // HOST_BYTES_PER_PARAMETER))


# Or fewer. Found out once, and by the process that forks the steps: all rows of a table train the same model.
BILLION = 20_000 if DRY_RUN else parameters_that_fit(1_000_000_000)


def lacks_what_it_needs(error: Any) -> bool:
    """Whether a superoffload.Error says that a mover does not work on this machine."""
    return error.code.name in ("FAILED_PRECONDITION", "UNIMPLEMENTED")


def daemon_budget(parameters: int) -> int:
    return parameters * DAEMON_BYTES_PER_PARAMETER + DAEMON_SPARE_BYTES


@contextlib.contextmanager
def daemon(budget_bytes: int, *flags: str) -> Iterator[subprocess.Popen]:
    """Ends with the `with`, and with this process however that ends. $SUPEROFFLOAD_ENDPOINT is its endpoint."""
    if budget_bytes > available_host_bytes():
        raise Unavailable(
            f"the daemon needs {budget_bytes / GIB:.1f} GiB and the machine has {available_host_bytes() / GIB:.1f} left"
        )
    with tempfile.TemporaryDirectory(prefix="so-device-") as directory:
        process = subprocess.Popen(
            [
                DAEMON,
                f"--runtime_directory={directory}",
                "--metrics_address=off",
                "--exit_on_stdin_eof",
                f"--memory_budget_bytes={budget_bytes}",
                *flags,
            ],
            stdin=subprocess.PIPE,
        )
        socket = pathlib.Path(directory) / "control.sock"
        try:
            while not socket.exists():
                if process.poll() is not None:
                    raise RuntimeError(f"the daemon ended with {process.returncode} before it listened")
                time.sleep(0.01)
            os.environ["SUPEROFFLOAD_ENDPOINT"] = f"unix:{socket}"
            yield process
        finally:
            os.environ.pop("SUPEROFFLOAD_ENDPOINT", None)
            process.stdin.close()
            process.wait()
