"""^C at every line of what a step runs: the optimizer stays usable and says what became of the step."""

import os
import sys

import pytest
import torch

import superoffload.torch

PACKAGE = os.path.dirname(superoffload.torch.__file__)
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


def build():
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
    return model, superoffload.torch.AdamW(model.parameters(), lr=1e-2, max_grad_norm=0.1, overlap=True)


def backward(model, step):
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(step % STEPS))
    ((model(x) - x) ** 2).mean().backward()


@pytest.fixture(scope="module")
def expected():
    """Weights after each number of steps."""
    model, optimizer = build()
    weights = []
    for step in range(200 * STEPS):
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    return weights


def matches(model, weights):
    return all(torch.equal(p, q) for p, q in zip(model.parameters(), weights, strict=True))


def test_in_step(expected):
    model, optimizer = build()
    seen = set()
    line, step = 0, 0
    while True:
        line += 1
        backward(model, step)
        interrupt = Interrupt(line)
        try:
            with interrupt:
                optimizer.step()
        except KeyboardInterrupt as error:
            committed = optimizer.last_result is not None and optimizer.last_result.committed_steps == step + 1
            for note in getattr(error, "__notes__", []):  # none before its first line and after its last one
                seen.add(note)
                assert ("was committed" in note) is committed
            if not committed:
                assert matches(model, expected[step])
                optimizer.step()
        optimizer.zero_grad()
        step += 1
        assert matches(model, expected[step]), line
        assert optimizer.last_result.committed_steps == step
        if interrupt.left > 0:
            break
    assert line > 100
    assert {note.partition("the step ")[2].partition(";")[0] for note in seen} == {"was committed", "was not committed"}


@pytest.mark.parametrize("again", ["zero_grad", "step"])
def test_in_backward(expected, again):
    model, optimizer = build()
    line, step = 0, 0
    while True:
        line += 1
        interrupt = Interrupt(line)
        try:
            with interrupt:
                backward(model, step)
        except KeyboardInterrupt:
            assert matches(model, expected[step])
            if again == "zero_grad":
                optimizer.zero_grad()
            else:
                for parameter in model.parameters():
                    parameter.grad = None
            backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        assert matches(model, expected[step]), line
        if interrupt.left > 0:
            break
    assert line > 30


def test_in_zero_grad_and_clipping(expected):
    model, optimizer = build()
    step = 0
    for call in (optimizer.zero_grad, lambda: optimizer.clip_grad_norm_(1.0)):
        line = 0
        while True:
            line += 1
            backward(model, step)
            interrupt = Interrupt(line)
            try:
                with interrupt:
                    call()
            except KeyboardInterrupt:
                assert matches(model, expected[step])
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            assert matches(model, expected[step]), line
            if interrupt.left > 0:
                break
        assert line > 10


def test_any_other_exception_in_a_step_leaves_it_usable(expected, monkeypatch):
    model, optimizer = build()
    backward(model, 0)
    with monkeypatch.context() as context:
        context.setattr(optimizer._attachment, "wait_step", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            optimizer.step()
    assert optimizer.state_dict()["superoffload"].identity["committed_steps"] == 1
    assert matches(model, expected[1])
