"""Calls that ^C, or any other exception, may cut off at whatever instruction."""

from types import TracebackType


class CutOff:
    """Whether the last with block was left by an exception. That it ``happened`` is said first and taken back last."""

    def __init__(self) -> None:
        self.happened = False

    def __enter__(self) -> None:
        self.happened = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.happened = False


def add_note(error: BaseException, note: str) -> None:
    """Shown below the error; by Python 3.10, which has no notes, in its text if that is all it was made of."""
    note = f"superoffload: {note}"
    if hasattr(error, "add_note"):
        error.add_note(note)
    elif all(isinstance(argument, str) for argument in error.args) and len(error.args) <= 1:
        error.args = ("\n".join([*error.args, note]),)
