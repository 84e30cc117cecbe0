"""What the Hugging Face Trainer logs of an optimizer that the daemon hosts."""

import itertools
import types

import pytest
import torch
import transformers
from tests.support import small_llama

import superoffload.torch
from superoffload.torch import waiting
from superoffload.torch.trainer import LogSteps

STEPS = 6


class Reporter(transformers.TrainerCallback):
    """As wandb's and TensorBoard's, it is there before the callbacks that a user passes."""

    def __init__(self):
        self.reported = []

    def on_log(self, args, state, control, logs, **_):
        self.reported.append(dict(logs))


class LoseStep(transformers.TrainerCallback):
    """A gradient of step 3 is infinite."""

    def on_pre_optimizer_step(self, args, state, control, model, **_):
        if state.global_step == 2:
            model.lm_head.weight.grad[0, 0] = float("inf")


def train(make, tmp_path, *callbacks, **options):
    reporter = Reporter()
    options_of_trainer = {"per_device_train_batch_size": 2, "max_grad_norm": 0.0, "logging_steps": 2}
    trainer = transformers.Trainer(
        small_llama.build(layers=1),
        small_llama.arguments(tmp_path, max_steps=STEPS, save_strategy="no", **options_of_trainer),
        train_dataset=small_llama.Tokens(),
        optimizer_cls_and_kwargs=(make, {"lr": 1e-2, **options}),
        callbacks=[reporter, LogSteps(), *callbacks],
    )
    trainer.train()
    losses = [logs for logs in reporter.reported if "loss" in logs]
    for logs, entry in zip(losses, trainer.state.log_history, strict=False):
        assert logs.items() <= entry.items()
    return trainer.optimizer.optimizer, reporter.reported


def test_reporters_that_came_before_see_what_the_daemon_reports(daemon, tmp_path):
    options = {"endpoint": daemon.endpoint, "overlap": False, "max_grad_norm": 0.5}
    optimizer, reported = train(superoffload.torch.AdamW, tmp_path, LoseStep(), **options)
    first, second, third, end = reported
    assert [logs["superoffload/committed_steps"] for logs in (first, second, third)] == [2, 3, 5]
    assert "superoffload/skipped_steps/skip_non_finite" not in first
    assert second["superoffload/skipped_steps/skip_non_finite"] == 1
    assert third["superoffload/gradient_norm"] == optimizer.last_result.global_norm > 0.5
    assert third["superoffload/clip_coefficient"] == optimizer.last_result.clip_coefficient < 1
    for logs in (first, second, third):
        assert 0 < logs["superoffload/waited_seconds"] <= logs["superoffload/longest_wait_seconds"]
    waited = 2 * sum(logs["superoffload/waited_seconds"] for logs in (first, second, third))
    assert waited == pytest.approx(optimizer.waited_seconds)
    assert not any(name.startswith("superoffload") for name in end)  # of no step


def test_of_torchs_optimizer_nothing_is_added(tmp_path):
    _, reported = train(torch.optim.AdamW, tmp_path)
    assert not any(name.startswith("superoffload") for logs in reported for name in logs)


def test_a_loop_waits_in_calls_of_the_optimizer_and_not_in_its_own(daemon, monkeypatch):
    clock = itertools.count()  # each time somebody looks, a second is over
    monkeypatch.setattr(waiting, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))
    model = torch.nn.Linear(8, 8)
    optimizer = superoffload.torch.AdamW(model.parameters(), endpoint=daemon.endpoint)

    def closure():
        next(clock)
        model(torch.ones(2, 8)).sum().backward()

    optimizer.step(closure)
    assert optimizer.waited_seconds == 1
    closure()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    assert optimizer.waited_seconds == 3
