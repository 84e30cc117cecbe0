"""The loss scale of fp16: DeepSpeed's rules, step by step."""

import pytest

from superoffload.deepspeed.config import LossScaleFields
from superoffload.deepspeed.loss_scale import LossScale


def scales(fields, overflows):
    """After each step."""
    scale, seen = LossScale(fields), []
    for overflow in overflows:
        scale.update(bool(overflow), says=False)
        seen.append(scale.scale)
    return seen


def fields(static=0.0, initial=16.0, window=2, hysteresis=1, refills=False, least=1.0):
    return LossScaleFields(static, initial, window, hysteresis, refills, least)


def test_it_is_halved_where_gradients_overflow_and_doubled_after_a_window_without():
    assert scales(fields(), [0, 0, 0, 1, 0, 0, 0, 0, 0]) == [16, 16, 32, 16, 16, 16, 32, 32, 64]


def test_hysteresis_lets_some_overflows_pass():
    assert scales(fields(hysteresis=2, window=100), [1, 0, 1, 1]) == [16, 16, 8, 4]
    assert scales(fields(hysteresis=2, window=100, refills=True), [1, 0, 1, 1]) == [16, 16, 16, 8]
    assert scales(fields(hysteresis=2), [1, 0, 0, 0, 1, 1]) == [16, 16, 16, 32, 32, 16]  # refilled with the window


def test_a_static_one_stays():
    assert scales(fields(static=8.0), [1, 1, 0, 0, 0, 0]) == [8] * 6


def test_it_ends_at_its_least():
    assert scales(fields(initial=4.0, least=3.0), [1]) == [3]
    with pytest.raises(RuntimeError, match=r"min_loss_scale, 3, and gradients still overflow"):
        scales(fields(initial=4.0, least=3.0), [1, 1])


def test_it_goes_on_from_its_state():
    overflows = [0, 1, 0, 0, 0, 1, 0, 0, 0, 0]
    for cut in range(len(overflows)):
        first = LossScale(fields(hysteresis=2))
        for overflow in overflows[:cut]:
            first.update(bool(overflow), says=False)
        second = LossScale(fields(hysteresis=2))
        second.load_state_dict(first.state_dict())
        seen = []
        for overflow in overflows[cut:]:
            second.update(bool(overflow), says=False)
            seen.append(second.scale)
        assert seen == scales(fields(hysteresis=2), overflows)[cut:]
