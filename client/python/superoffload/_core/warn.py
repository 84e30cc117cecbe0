"""Warnings that name the line of the training loop."""

import sys
import warnings

_NOT_THE_LOOP = ("superoffload", "torch", "jax")


def warn(message: str) -> None:
    """A RuntimeWarning at the innermost line that is neither of a framework nor of this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_THE_LOOP:
        frame = frame.f_back
    module = frame.f_globals.get("__name__", "__main__")
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(message, RuntimeWarning, frame.f_code.co_filename, frame.f_lineno, module, registry)
