"""How long a loop waits for its optimizer."""

import contextlib
import time
from collections.abc import Iterator


class Waiting:
    """Adds up the time that is spent inside of `counted`, whether or not that raises."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        begin = time.monotonic()
        try:
            yield
        finally:
            self.seconds += time.monotonic() - begin
