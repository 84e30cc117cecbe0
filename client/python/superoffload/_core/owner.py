"""Only the process that built something owns it: a forked child, such as a DataLoader's worker, leaves it alone."""

import os
import weakref
from typing import Protocol

import grpc

from superoffload._core.error import Error


class Owned(Protocol):
    """What must not be used, ended or deleted by a forked child."""

    def disown(self) -> None:
        """Called in the child. Must neither wait nor touch what it shares with the parent."""


_talks: int | None = None  # the process that has opened the first channel of gRPC
_owned: "weakref.WeakSet[Owned]" = weakref.WeakSet()
_kept: list[Owned] = []  # in a child: destructors would talk to the parent's daemon


def own(thing: Owned) -> None:
    _owned.add(thing)


def check_process(builder: int) -> None:
    """Raises Error in a forked child of process ``builder``."""
    if os.getpid() != builder:
        raise Error(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"the optimizer belongs to process {builder}, which has built it and was forked; build another one in a "
            "process that is spawned instead (multiprocessing's start method)",
        )


def check_may_talk() -> None:
    """Raises Error in a forked child of a process that talks to daemons: its calls would wait for ever.

    gRPC's threads stay behind in the parent.
    """
    global _talks
    if _talks is None:
        _talks = os.getpid()
    if _talks != os.getpid():
        raise Error(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"this process was forked from process {_talks} after that had an optimizer, and gRPC does not work in "
            "such a child; spawn it instead (multiprocessing's start method), or fork it before the first optimizer is "
            "built",
        )


def _disown_all() -> None:
    things = list(_owned)
    _owned.clear()
    _kept.extend(things)
    for thing in things:
        thing.disown()


os.register_at_fork(after_in_child=_disown_all)
