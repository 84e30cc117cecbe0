"""Operations on parameters that are the adapter's own: no watch looks at them."""

import contextlib
import threading
from collections.abc import Iterator


class _Thread(threading.local):
    is_ours = False


_thread = _Thread()


@contextlib.contextmanager
def ours() -> Iterator[None]:
    """Inside, this thread's operations are."""
    _thread.is_ours = True
    try:
        yield
    finally:
        _thread.is_ours = False


def are_ours() -> bool:
    return _thread.is_ours
