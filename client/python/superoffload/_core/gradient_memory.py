"""What memory the daemon has for the gradients of an optimizer that is created for a trainer on a GPU."""

from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple, TypeVar

import grpc

from superoffload._core.error import Error

# For each bucket's gradient: two slots, one, or one that its parameters are published into. "auto": the first of these
# that the daemon has memory for.
Slots = int | Literal["auto", "in_place"]

_MOST_LOGGED_STEPS = 31  # a log has a slot more, for the step to come


class GradientMemory(NamedTuple):
    """Whether gradients come as fp32, whatever their dtype, and fields of CreateOptimizerRequest."""

    casts: bool = False
    gradient_slots: int = 2
    logged_buckets: int = 0
    log_slots: int = 0
    in_place: bool = False


_Choice = TypeVar("_Choice")


def create_with_first(choices: Iterable[_Choice], create: Callable[[_Choice], bool]) -> bool:
    """``create`` with the first of the choices that the daemon has memory for."""
    *more, least = choices
    for choice in more:
        try:
            return create(choice)
        except Error as error:
            if error.code != grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
    return create(least)


def why_not_streamed(gradient_slots: Slots, resident_buckets: int | Literal["auto"]) -> str | None:
    """Why weights cannot stream with these; None: they can."""
    if gradient_slots == "in_place":
        what, why = "gradient_slots='in_place'", "its parameters lie where gradients land"
    elif resident_buckets not in ("auto", 0):
        what, why = "resident_buckets", "the GPU has no parameters of them that it could update"
    else:
        return None
    return f"weights do not stream with {what}: {why}; leave one of the two out"


def check(gradient_slots: Slots, resident_steps: int) -> None:
    """Raises ValueError for options that say nothing of it. ``resident_steps``: that a log is for."""
    if gradient_slots not in ("auto", 1, 2, "in_place"):
        raise ValueError(f"gradient_slots is {gradient_slots!r} but must be 'auto', 1, 2 or 'in_place'")
    if not 1 <= resident_steps <= _MOST_LOGGED_STEPS:
        raise ValueError(f"resident_steps is {resident_steps} but must be 1 to {_MOST_LOGGED_STEPS}")
