"""What ranks gather in a step, with a thread as each rank."""

import concurrent.futures
import threading
import types

import grpc
import pytest

from superoffload._core import run_step
from superoffload._core.error import Error
from superoffload._core.run_step import For


class ThreadGroup:
    """`superoffload._core.run.Group` of threads."""

    def __init__(self, rank: int, slots: list, barrier: threading.Barrier) -> None:
        self.rank, self.ranks = rank, len(slots)
        self._slots, self._barrier = slots, barrier

    def gather_objects(self, message):
        self._slots[self.rank] = message
        self._barrier.wait()
        everybody = list(self._slots)
        self._barrier.wait()
        return everybody

    gather_doubles = gather_objects


def ranks(*calls):
    """What each call returned for its rank, or the error it raised."""
    slots, barrier = [None] * len(calls), threading.Barrier(len(calls), timeout=60)

    def of(rank):
        try:
            return calls[rank](ThreadGroup(rank, slots, barrier))
        except Error as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(of, range(len(calls))))


def refuses(group):
    attachment = types.SimpleNamespace(undecided=False)
    with run_step.told(group, attachment):
        raise Error(grpc.StatusCode.INVALID_ARGUMENT, "the gradient is sparse")


def test_numbers_of_all_ranks_come_in_their_order():
    gathered = ranks(*[lambda group: run_step.gather(group, For.GRADIENTS, [group.rank, 0.5])] * 3)
    assert gathered == [[[0.0, 0.5], [1.0, 0.5], [2.0, 0.5]]] * 3
    assert ranks(*[lambda group: run_step.gather_norm(group, [9.0, 16.0][group.rank])] * 2) == [5.0, 5.0]


@pytest.mark.parametrize("purpose", [For.GRADIENTS, For.NORM, For.EMPTY])
def test_a_refusal_is_heard_in_any_gathering(purpose):
    waits = lambda group: run_step.gather(group, purpose)  # noqa: E731
    first, second, third = ranks(waits, refuses, waits)
    assert "rank 1 refuses the step, and so do all ranks: the gradient is sparse" in str(first)
    assert str(third) == str(first)
    assert second.code == grpc.StatusCode.INVALID_ARGUMENT


def test_ranks_that_all_refuse_raise_their_own_errors():
    for error in ranks(refuses, refuses):
        assert error.message == "the gradient is sparse"


def test_ranks_that_make_different_calls_are_told_of_each_other():
    clips, steps = ranks(lambda g: run_step.gather_norm(g, 1.0), lambda g: run_step.gather(g, For.EMPTY))
    assert "rank 1 has called step() without a gradient and rank 0 clip_grad_norm_()" in str(clips)
    assert "rank 0 has called clip_grad_norm_() and rank 1 step() without a gradient" in str(steps)
