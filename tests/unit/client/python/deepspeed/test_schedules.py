"""DeepSpeed's schedules: at which step there is which rate."""

import math

import pytest
import torch

from superoffload.deepspeed import schedules


def optimizer(*rates):
    return torch.optim.AdamW([{"params": [torch.zeros(1, requires_grad=True)], "lr": rate} for rate in rates or [1.0]])


def rates(kind, steps, params, made=None):
    """Of the first group in the first steps."""
    made = made or optimizer()
    schedule, seen = schedules.make(kind, made, params), []
    for _ in range(steps):
        seen.append(made.param_groups[0]["lr"])
        made.step()
        schedule.step()
    return seen


def test_warmup_has_its_least_rate_twice():
    found = rates("WarmupLR", 6, {"warmup_num_steps": 4, "warmup_type": "linear", "warmup_max_lr": 0.8})
    assert found == pytest.approx([0, 0, 0.2, 0.4, 0.6, 0.8])
    found = rates("WarmupLR", 6, {"warmup_num_steps": 4})
    logs = [math.log(n) / math.log(4) for n in (1, 2, 3, 4)]
    assert found == pytest.approx([0, *logs, 1])


def test_warmup_and_decay():
    params = {"total_num_steps": 6, "warmup_num_steps": 2, "warmup_type": "linear", "warmup_max_lr": 1.0}
    assert rates("WarmupDecayLR", 9, params) == pytest.approx([0, 0, 0.5, 1, 0.75, 0.5, 0.25, 0, 0])


def test_warmup_and_cosine_are_shares_of_the_optimizers_rates():
    params = {"total_num_steps": 6, "warmup_num_steps": 2, "warmup_type": "linear", "cos_min_ratio": 0.2}
    made = optimizer(2.0, 4.0)
    found = rates("WarmupCosineLR", 9, {**params, "warmup_min_ratio": 0.1}, made)
    shares = [0.2 + 0.8 * (1 + math.cos(math.pi * n / 4)) / 2 for n in (1, 2, 3, 4)]
    assert found == pytest.approx([2 * share for share in (0, 0.1, 0.55, *shares, 0.2, 0.2)])
    assert made.param_groups[1]["lr"] == 2 * made.param_groups[0]["lr"]


def test_range_test():
    params = {"lr_range_test_min_lr": 0.1, "lr_range_test_step_size": 2, "lr_range_test_step_rate": 1.0}
    assert rates("LRRangeTest", 4, params) == pytest.approx([0.1, 0.15, 0.2, 0.25])
    assert rates("LRRangeTest", 4, {**params, "lr_range_test_staircase": True}) == pytest.approx([0.1, 0.1, 0.2, 0.2])


def test_one_cycle():
    made = optimizer()
    params = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.5, "cycle_first_step_size": 2, "cycle_second_step_size": 4}
    decay = {"decay_step_size": 1, "decay_lr_rate": 1.0, "decay_mom_rate": 0.5}
    schedule = schedules.make("OneCycle", made, {**params, **decay})
    seen = []
    for _ in range(9):
        seen.append((made.param_groups[0]["lr"], made.param_groups[0]["betas"]))
        made.step()
        schedule.step()
    assert [rate for rate, _ in seen] == pytest.approx([0.1, 0.3, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.1 / 3])
    momenta = [0.8, 0.85, 0.8, 0.825, 0.85, 0.875, 0.9, 0.9 * 1.5, 0.9 * 2]
    assert [betas[0] for _, betas in seen] == pytest.approx(momenta)
    assert {betas[1] for _, betas in seen} == {0.99}


def test_each_group_may_have_its_own():
    made = optimizer(1.0, 1.0)
    rates("WarmupLR", 5, {"warmup_num_steps": 2, "warmup_max_lr": [0.5, 2.0]}, made)
    assert [group["lr"] for group in made.param_groups] == [0.5, 2.0]
    with pytest.raises(ValueError, match="warmup_max_lr has 3 values, but 2 groups"):
        schedules.make("WarmupLR", made, {"warmup_max_lr": [1, 2, 3]})


def test_a_tensor_stays_the_tensor_that_it_is():
    made = optimizer(torch.tensor(1.0))
    rate = made.param_groups[0]["lr"]
    rates("WarmupLR", 3, {"warmup_num_steps": 2, "warmup_max_lr": 0.25}, made)
    assert made.param_groups[0]["lr"] is rate
    assert float(rate) == 0.25


def test_it_goes_on_from_its_state():
    params = {"total_num_steps": 9, "warmup_num_steps": 4, "warmup_max_lr": 1.0}
    whole = rates("WarmupDecayLR", 9, params)
    made = optimizer()
    first = schedules.make("WarmupDecayLR", made, params)
    for _ in range(4):
        first.step()
    other = optimizer(made.param_groups[0]["lr"])
    second = schedules.make("WarmupDecayLR", other, params)
    second.load_state_dict(first.state_dict())
    second.step()
    assert second.get_last_lr() == [whole[5]]


def test_those_of_torch_and_what_is_none():
    made = optimizer()
    assert isinstance(schedules.make("StepLR", made, {"step_size": 3}), torch.optim.lr_scheduler.StepLR)
    for kind, params, match in [
        ("Cosine", {}, "'Cosine' but must be one of LRRangeTest"),
        ("WarmupLR", {"steps": 3}, "scheduler.params: .*unexpected keyword argument 'steps'"),
        ("WarmupLR", {"warmup_num_steps": 0}, "warmup_num_steps is 0 but"),
        ("WarmupLR", {"warmup_type": "cubic"}, "warmup_type is 'cubic' but"),
        ("WarmupDecayLR", {}, "total_num_steps"),
        ("OneCycle", {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_first_step_size": 0}, "must be more than 0"),
    ]:
        with pytest.raises(ValueError, match=match):
            schedules.make(kind, made, params)
