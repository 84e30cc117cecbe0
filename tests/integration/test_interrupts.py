"""^C at every line of what a step runs: the optimizer stays usable and says what became of the step."""

import os
import sys

import grpc
import pytest
import torch
from tests.support import fake_torch_gpu
from tests.support.loops import loop_daemon  # noqa: F401

import superoffload.torch

PACKAGE = os.path.dirname(superoffload.__file__)
STEPS = 4


class Interrupt:
    """Raises KeyboardInterrupt at the ``line``-th line that the package runs inside a with block."""

    def __init__(self, line):
        self.left = line

    def _local(self, frame, event, argument):
        if event == "line":
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._local

    def _trace(self, frame, event, argument):
        return self._local if frame.f_code.co_filename.startswith(PACKAGE) else None

    def __enter__(self):
        sys.settrace(self._trace)

    def __exit__(self, *_):
        sys.settrace(None)


class Loop:
    """A training loop that can say whether its weights are those of an undisturbed one."""

    def __init__(self, endpoint, expected):
        torch.manual_seed(1)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
        self.optimizer = superoffload.torch.AdamW(
            self.model.parameters(), lr=1e-2, max_grad_norm=0.1, overlap=True, endpoint=endpoint
        )
        self.expected = expected
        self.step = 0

    def backward(self):
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(self.step % STEPS))
        ((self.model(x) - x) ** 2).mean().backward()

    def step_after_interrupt(self):
        """On a GPU gradients may have left for the step that was cut off: then they have to be computed again."""
        try:
            self.optimizer.step()
        except superoffload.Error as error:
            assert error.code == grpc.StatusCode.FAILED_PRECONDITION and "zero_grad()" in str(error)
            assert self.optimizer.gpu_report is not None
            self.optimizer.zero_grad()
            self.backward()
            self.optimizer.step()

    def weights(self):
        self.optimizer.synchronize()
        return [parameter.detach().clone() for parameter in self.model.parameters()]

    def as_expected(self, step):
        return all(torch.equal(p, q) for p, q in zip(self.weights(), self.expected[step], strict=True))

    def end(self):
        """The step has been made."""
        self.optimizer.zero_grad()
        self.step += 1
        assert self.as_expected(self.step)
        assert self.optimizer.last_result.committed_steps == self.step


def interrupted_everywhere(once, least):
    """Calls ``once`` with an interrupt at the first line, at the second, and so on until there is no such line."""
    line = 0
    while True:
        line += 1
        interrupt = Interrupt(line)
        once(interrupt)
        if interrupt.left > 0:
            break
    assert line > least


@pytest.fixture(scope="module")
def expected(loop_daemon):  # noqa: F811
    """Weights after each number of steps, on the host."""
    loop = Loop(loop_daemon.endpoint, None)
    weights = []
    for loop.step in range(750 * STEPS):
        weights.append(loop.weights())
        loop.backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    loop.optimizer.close()
    return weights


@pytest.fixture(params=["host", "gpu"])
def loop(request, loop_daemon, expected):  # noqa: F811
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "gpu":
            fake_torch_gpu.install(patch)
        loop = Loop(loop_daemon.endpoint, expected)
        yield loop
        loop.optimizer.close()


def test_in_step(loop):
    optimizer = loop.optimizer
    seen = set()

    def once(interrupt):
        loop.backward()
        try:
            with interrupt:
                optimizer.step()
        except KeyboardInterrupt as error:
            committed = optimizer.last_result is not None and optimizer.last_result.committed_steps == loop.step + 1
            for note in getattr(error, "__notes__", []):  # none before its first line and after its last one
                seen.add(note)
                assert ("was committed" in note) is committed
            if not committed:
                assert loop.as_expected(loop.step)
                loop.step_after_interrupt()
        loop.end()

    interrupted_everywhere(once, least=100)
    assert {note.partition("the step ")[2].partition(";")[0] for note in seen} == {"was committed", "was not committed"}


@pytest.mark.parametrize("again", ["zero_grad", "step"])
def test_in_backward(loop, again):
    def once(interrupt):
        try:
            with interrupt:
                loop.backward()
        except KeyboardInterrupt:
            assert loop.as_expected(loop.step)
            if again == "zero_grad":
                loop.optimizer.zero_grad()
            else:
                for parameter in loop.model.parameters():
                    parameter.grad = None
            loop.backward()
        loop.step_after_interrupt()
        loop.end()

    interrupted_everywhere(once, least=30)


@pytest.mark.parametrize("call", ["zero_grad", "clip_grad_norm_"])
def test_in_zero_grad_and_clipping(loop, call):
    def once(interrupt):
        loop.backward()
        try:
            with interrupt:
                getattr(loop.optimizer, call)(*([1.0] if call == "clip_grad_norm_" else []))
        except KeyboardInterrupt:
            assert loop.as_expected(loop.step)
        loop.optimizer.zero_grad()
        loop.backward()
        loop.optimizer.step()
        loop.end()

    interrupted_everywhere(once, least=10)


def test_any_other_exception_in_a_step_leaves_it_usable(loop, monkeypatch):
    loop.backward()
    with monkeypatch.context() as context:
        context.setattr(loop.optimizer._hosting.attachment, "_wait_result", lambda function: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loop.optimizer.step()
    assert loop.optimizer.state_dict()["superoffload"].identity["committed_steps"] == 1
    loop.end()
