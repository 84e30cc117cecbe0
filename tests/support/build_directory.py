"""The build directory, which some tests configure and install from while others run beside them."""

import contextlib
import fcntl
import os
import pathlib
from collections.abc import Iterator

BUILD = pathlib.Path(os.environ["SUPEROFFLOAD_BUILD"])


@contextlib.contextmanager
def exclusively() -> Iterator[None]:
    with (BUILD / "tests.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
