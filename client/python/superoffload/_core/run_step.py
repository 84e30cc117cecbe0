"""What the ranks of a run gather in a step: numbers of all of them, or the sentence of one that refuses.

All gatherings of a step have one size and say what they are for. So a rank that refuses the step says so in whichever
gathering the others come to next, and no rank waits for one that has raised.
"""

import contextlib
import enum
import math
import operator
from collections.abc import Iterator, Sequence

import grpc

from superoffload._core import run
from superoffload._core.attachment import Attachment
from superoffload._core.error import Error
from superoffload._core.run import Group
from superoffload.v1 import optimizer_pb2

_WIDTH = 4  # the most numbers of a rank


class For(enum.IntEnum):
    """What a rank gathers numbers for."""

    REFUSAL = 0
    GRADIENTS = 1
    NORM = 2
    TOTAL = 3
    EMPTY = 4
    MATRICES = 5


_CALLS = {
    For.GRADIENTS: "step()",
    For.NORM: "clip_grad_norm_()",
    For.TOTAL: "step()",
    For.EMPTY: "step() without a gradient",
    For.MATRICES: "step() or clip_grad_norm_()",
}
_REFUSALS = (
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNIMPLEMENTED,
)


class _Apart(Error):
    """Raised on all ranks, because they do not gather for the same."""

    def __init__(self, message: str, everybody: "_Everybody") -> None:
        super().__init__(grpc.StatusCode.FAILED_PRECONDITION, message)
        self.everybody = everybody


_Everybody = list[tuple[For, list[float]]]  # in rank order


def gather(group: Group, purpose: For, values: Sequence[float] = ()) -> list[list[float]]:
    """The numbers of all ranks, in rank order. Raises Error on all ranks unless all of them gather for this purpose."""
    everybody = _gather(group, purpose, values)
    if any(theirs == For.REFUSAL for theirs, _ in everybody):
        sentences = group.gather_objects(None)
        rank, sentence = next((rank, sentence) for rank, sentence in enumerate(sentences) if sentence is not None)
        raise _Apart(f"rank {rank} refuses the step, and so do all ranks: {sentence}", everybody)
    for rank, (theirs, _) in enumerate(everybody):
        if theirs != purpose:
            raise _Apart(
                f"rank {rank} has called {_CALLS[theirs]} and rank {group.rank} {_CALLS[purpose]}; all ranks make the "
                "same calls, with gradients of the same parameters",
                everybody,
            )
    return [numbers[: len(values)] for _, numbers in everybody]


def _gather(group: Group, purpose: For, values: Sequence[float]) -> _Everybody:
    own = [float(purpose), *values, *[0.0] * (_WIDTH - len(values))]
    return [(For(int(theirs)), numbers) for theirs, *numbers in group.gather_doubles(own)]


@contextlib.contextmanager
def told(group: Group | None, attachment: Attachment) -> Iterator[None]:
    """What this rank refuses inside of the with block is raised on all ranks, in whatever they `gather` next.

    None: this process trains alone.
    """
    try:
        yield
    except (_Apart, run.GroupFailed):
        raise  # the others know, or they do not listen
    except (Error, OSError) as error:
        if group is not None:
            with contextlib.suppress(Exception):  # of a gathering that fails; the error says more
                _refuse(group, attachment, error)
        raise


def _refuse(group: Group, attachment: Attachment, error: Error | OSError) -> None:
    # Of a rank whose daemon is gone, or whose own step is prepared, the others cannot know what it has.
    able = isinstance(error, Error) and error.code in _REFUSALS and not attachment.undecided
    everybody = _gather(group, For.REFUSAL, [float(able)])
    group.gather_objects(error.message if isinstance(error, Error) else str(error))
    _withdraw(group, attachment, everybody)


def _withdraw(group: Group, attachment: Attachment, everybody: _Everybody) -> None:
    """Ends a step that some ranks have prepared, and of which no rank has a total: they agree that nobody commits it.

    What fails here leaves the step to optimizers that are built anew.
    """
    ready = [theirs == For.TOTAL for theirs, _ in everybody]
    able = [theirs == For.REFUSAL and number != 0 for theirs, (number, *_) in everybody]
    if not any(ready) or not all(map(operator.or_, ready, able)):
        return
    name = attachment.optimizer.name
    with contextlib.suppress(Error):
        request = optimizer_pb2.GetOptimizerRequest(name=name)
        run.all_or_none(group, "reach its daemon", lambda: attachment.call("GetOptimizer", request))
        with attachment.detached() as connection:
            run.agree(connection, name, group, start_over=False)


def gather_total(
    group: Group, attachment: Attachment, own: float, gradient_scale: float, max_grad_norm: float
) -> float:
    """The sum of squares over all ranks, added in rank order; ``own``: this rank's. The step is prepared.

    Raises Error on all ranks unless all are at the same step with the same scale and threshold. Nobody commits it then.
    """
    terms = [float(attachment.committed_steps + 1), gradient_scale, max_grad_norm]
    try:
        everybody = gather(group, For.TOTAL, [own, *terms])
        for rank, (_, *others) in enumerate(everybody):
            if others != terms:
                raise _Apart(
                    f"rank {rank} ends step {int(others[0])} with gradient scale {others[1]} and max_grad_norm "
                    f"{others[2]}, rank {group.rank} step {int(terms[0])} with {gradient_scale} and {max_grad_norm}; "
                    "they must be the same on all ranks",
                    [(For.TOTAL, theirs) for theirs in everybody],
                )
    except _Apart as error:
        _withdraw(group, attachment, error.everybody)
        raise
    return sum(theirs for theirs, *_ in everybody)


def end_step(attachment: Attachment, group: Group, gradient_scale: float, max_grad_norm: float) -> None:
    """Ends a step whose gradients have all been submitted, with the verdict over all ranks."""
    with told(group, attachment):
        own = attachment.wait_prepared(gradient_scale, max_grad_norm)
    total = gather_total(group, attachment, own, gradient_scale, max_grad_norm)
    attachment.end_prepared_step(gradient_scale, max_grad_norm, total)


def gather_norm(group: Group, sum_of_squares: float) -> float:
    """The norm over all ranks; nothing is decided."""
    return math.sqrt(sum(theirs for (theirs,) in gather(group, For.NORM, [sum_of_squares])))
