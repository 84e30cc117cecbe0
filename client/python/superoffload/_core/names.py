"""Names of optimizers in the daemon."""

import os
import re
import sys
import uuid

import grpc

from superoffload._core import warn
from superoffload._core.daemon import is_private
from superoffload._core.error import Error

_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
_ANONYMOUS_LEASE_SECONDS = 300.0


def make_name() -> str:
    """For an optimizer that nobody will ask for by name."""
    program = re.sub(r"[^A-Za-z0-9._-]", "_", os.path.basename(sys.argv[0])).lstrip("-") or "python"  # "-c": no option
    return f"{program}-{os.getpid()}-{uuid.uuid4().hex[:8]}"[-128:]


def check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise Error(
            grpc.StatusCode.INVALID_ARGUMENT,
            f"the optimizer's name is {name!r} but must be 1 to 128 letters, digits, '.', '_' or '-'",
        )


def lease_of(name: str | None, lease_seconds: float | None) -> float | None:
    """How long the optimizer waits for a trainer. Nobody could attach to one without a name after this process."""
    if name is None:
        return _ANONYMOUS_LEASE_SECONDS
    check_name(name)
    return lease_seconds


def warn_of_private_name(name: str, endpoint: str) -> None:
    if is_private(endpoint):
        warn.warn(
            f'optimizer "{name}" begins at step 0 and ends with this process, because its superoffloadd does: start '
            "superoffloadd to keep it, or save its state_dict() (restore=, checkpoint= or state_directory= say that "
            "this is meant)"
        )
