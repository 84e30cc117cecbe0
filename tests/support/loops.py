"""Training loops as people write them, each run with superoffload.torch and with torch.optim on the same data."""

import contextlib
import os
import signal
import time
import warnings

import pytest
import torch
from tests.conftest import Daemon
from tests.support import fake_torch_gpu

import superoffload.torch

# Where gradients go during backward ("early", "late": whatever a delay can make of it) and on what.
FORMS = {
    "auto": {},
    "early": {"overlap": True, "speculation": "always"},
    "late": {"overlap": True, "speculation": "always"},
    "off": {"overlap": False},
    "gpu auto": {},
    "gpu early": {"overlap": True, "speculation": "always"},
}
HOST_FORMS = [form for form in FORMS if not form.startswith("gpu")]


class Maker:
    """Builds optimizers of one form; their daemon is ahead of the loop (early), or stopped until step() (late)."""

    def __init__(self, form: str, daemon: Daemon) -> None:
        self.form, self.daemon = form, daemon
        self.built = []

    def __call__(self, params, kind="AdamW", **options):
        options = {"lr": 1e-2, "bucket_bytes": 4096, "endpoint": self.daemon.endpoint} | FORMS[self.form] | options
        optimizer = getattr(superoffload.torch, kind)(params, **options)
        if self.form == "late":
            self._stop_daemon_before_step(optimizer)
        elif "early" in self.form:
            optimizer.register_step_pre_hook(lambda *_: time.sleep(0.003))
        if self.form.startswith("gpu"):  # loops here read parameters outside of modules
            optimizer.register_step_post_hook(lambda *_: optimizer.synchronize())
        self.built.append(optimizer)
        return optimizer

    def _stop_daemon_before_step(self, optimizer) -> None:
        process = self.daemon.process.pid
        handles = [p.register_hook(lambda _: os.kill(process, signal.SIGSTOP)) for p in optimizer.hosted_parameters()]
        optimizer.register_step_pre_hook(lambda *_: os.kill(process, signal.SIGCONT))
        calls = ("zero_grad", "push_params", "pull_params", "close", "clip_grad_norm_")
        for name in calls:  # that wait for the daemon
            call = getattr(optimizer, name)

            def awake(*arguments, call=call, **options):
                os.kill(process, signal.SIGCONT)
                return call(*arguments, **options)

            setattr(optimizer, name, awake)
        self.handles = handles

    def close(self) -> None:
        os.kill(self.daemon.process.pid, signal.SIGCONT)
        for optimizer in self.built:
            optimizer.close()


@pytest.fixture
def lone_rank(tmp_path):
    """A process group of this process alone."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def loop_daemon():
    with pytest.MonkeyPatch.context() as patch:
        fake_torch_gpu.install(patch)
        daemon = Daemon("--metrics_address=off")
    yield daemon
    assert daemon.stop() == 0, daemon.log


@pytest.fixture(params=HOST_FORMS)
def ours_on_host(request, loop_daemon):
    maker = Maker(request.param, loop_daemon)
    yield maker
    maker.close()


def _on_its_device(form, daemon):
    with pytest.MonkeyPatch.context() as patch:
        if form.startswith("gpu"):
            fake_torch_gpu.install(patch)
        maker = Maker(form, daemon)
        yield maker
        maker.close()


@pytest.fixture(params=FORMS)
def ours(request, loop_daemon):
    """Each form in turn."""
    yield from _on_its_device(request.param, loop_daemon)


@pytest.fixture(params=[form for form in FORMS if form.startswith("gpu")])
def ours_on_gpu(request, loop_daemon):
    yield from _on_its_device(request.param, loop_daemon)


def theirs(params, kind="AdamW", **options):
    options.pop("bucket_bytes", None)
    return getattr(torch.optim, kind)(params, **({"lr": 1e-2} | options))


def net(seed=1, outputs=8):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(8, 48), torch.nn.Tanh(), torch.nn.Linear(48, outputs))


def batch(seed, columns=8):
    return torch.randn(16, columns, generator=torch.Generator().manual_seed(seed))


def difference(a, b) -> float:
    return max((p - q).abs().max().item() for p, q in zip(a, b, strict=True))


def assert_agree(loop, ours, tolerance=2e-6) -> list[warnings.WarningMessage]:
    """``loop(make)`` returns tensors; they are the same with both optimizers. Returns the warnings of ours."""
    expected = [tensor.detach().clone() for tensor in loop(theirs)]
    with recorded() as caught:
        actual = [tensor.detach().clone() for tensor in loop(ours)]
    assert difference(actual, expected) < tolerance
    return caught


@contextlib.contextmanager
def recorded():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


def told(caught, text) -> int:
    return sum(text in str(warning.message) for warning in caught)
