"""What of the machine a private daemon takes: others use the machine as well, and nobody has configured it."""

import contextlib
import os
import pathlib
from collections.abc import Iterator

_MEMORY_PERCENT = 80


def memory_bytes(meminfo: str = "/proc/meminfo") -> int | None:
    """Of what is available now, not of what the machine has; None where the kernel does not say."""
    available = available_bytes(meminfo)
    return None if available is None else available * _MEMORY_PERCENT // 100


def available_bytes(meminfo: str = "/proc/meminfo") -> int | None:
    """Memory that the machine has for another process now; None where the kernel does not say."""
    fields = {}
    for line in pathlib.Path(meminfo).read_text().splitlines():
        name, _, value = line.partition(":")
        fields[name] = int(value.split()[0])
    if "MemAvailable" not in fields:
        return None
    pool_kib = fields.get("HugePages_Free", 0) * fields.get("Hugepagesize", 0)  # which MemAvailable leaves out
    return (fields["MemAvailable"] + pool_kib) * 1024


@contextlib.contextmanager
def cores_of(ranks: int) -> Iterator[int]:
    """How many cores a daemon for so many ranks may run on. What is started inside runs there.

    A launcher may bind each rank to some cores. The daemon of all ranks has the launcher's own.
    """
    mine = os.sched_getaffinity(0)
    its = mine
    if ranks > 1:
        with contextlib.suppress(OSError):
            its = os.sched_getaffinity(os.getppid()) | mine
    if its == mine:
        yield len(mine)
        return
    os.sched_setaffinity(0, its)  # this thread's, which the child inherits
    try:
        yield len(its)
    finally:
        os.sched_setaffinity(0, mine)
