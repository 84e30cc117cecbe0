"""What ``state_dict()`` holds instead of tensors: a `Moment`, which names the state.

Who copies or pickles a moment takes the state along:

- The Hugging Face Trainer and accelerate save into a directory of their own, which they rotate as one. The daemon
  writes a checkpoint into it, beside the file that torch.save is writing, and the pickle holds its path.
- With ``state_directory=`` the daemon writes all others there.
- Else masters and moments go into the pickle, or the copy, as tensors. So a single file (Lightning, a loop with
  torch.save) can be renamed, copied and deleted without a thought for the optimizer.

How it is known who saves: torch.serialization.save is on the stack while it pickles, with the file, and its caller.
"""

import collections
import os
import sys
import threading
import types
import uuid
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

import grpc

from superoffload._core.error import Error

FORMAT = 1  # of a pickled moment
_DIRECTORY_SAVERS = ("transformers.trainer", "accelerate.checkpointing")  # their checkpoints are directories
_PASSED_THROUGH = ("torch.serialization", "accelerate.utils.other")  # between a saver and the pickler

# (endpoint, name) -> lineage and committed steps of an optimizer that this process has closed.
_closed: dict[tuple[str, str], tuple[str, int]] = {}


class Named(Protocol):
    """An optimizer in a daemon; see hosting.py."""

    name: str
    anonymous: bool

    @property
    def endpoint(self) -> str: ...
    def committed_steps(self) -> int: ...


class Lineage:
    """Which state an optimizer has: moments of the same identity have the same masters, moments and steps."""

    def __init__(self, hosting: Named) -> None:
        self._hosting = hosting
        self._made = uuid.uuid4().hex

    def begin(self, continues: bool) -> None:
        """The optimizer is attached to. ``continues``: it has the state that it had in the daemon."""
        self.replace()
        key = self._hosting.endpoint, self._hosting.name
        made, committed_steps = _closed.pop(key, (None, None))
        if continues and made is not None and committed_steps == self._hosting.committed_steps():
            self._made = made

    def end(self) -> None:
        """The optimizer is detached; this process may attach to it again."""
        if not self._hosting.anonymous:
            _closed[self._hosting.endpoint, self._hosting.name] = self._made, self._hosting.committed_steps()

    def replace(self) -> None:
        """The state is another than so many steps have made it."""
        self._made = uuid.uuid4().hex

    def moment(self) -> dict[str, Any]:
        """The identity of the present moment."""
        return {
            "name": self._hosting.name,
            "lineage": self._made,
            "committed_steps": self._hosting.committed_steps(),
        }


class Saver(Protocol):
    """The state that a `Moment` is of."""

    def is_present(self, identity: dict[str, Any]) -> bool:
        """Whether the optimizer is attached, and at the moment of this identity."""

    def save(self, beside: str | None) -> dict[str, Any]:
        """See `State.save`."""


class Moment:
    """The state of an optimizer between two steps. Free to make; pickled or deeply copied it becomes a plain dict.

    Pickle only with the state at hand: raises Error once training has gone on, or in another thread.
    """

    def __init__(self, saver: Saver, identity: dict[str, Any]) -> None:
        self._saver = weakref.ref(saver)
        self._thread = threading.get_ident()
        self.identity = identity

    def __repr__(self) -> str:
        return f"Moment(name={self.identity['name']!r}, committed_steps={self.identity['committed_steps']})"

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # torch.load(weights_only=True) knows OrderedDict, and nothing of ours.
        return collections.OrderedDict, (), None, None, iter(self._portable().items())

    def _portable(self) -> dict[str, Any]:
        saver = self._saver()
        if saver is None or not saver.is_present(self.identity):
            raise Error(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"this state_dict is of optimizer {self.identity['name']} after {self.identity['committed_steps']} "
                "committed steps, and the optimizer has gone on or is closed; save or deepcopy a state_dict before the "
                "next step",
            )
        if threading.get_ident() != self._thread:
            raise Error(
                grpc.StatusCode.FAILED_PRECONDITION,
                "this state_dict is saved by another thread than the one that made it, while training may go on; save "
                "in the training thread, or save copy.deepcopy(state_dict)",
            )
        return {"format": FORMAT, **self.identity, **saver.save(_directory_of_saver())}


def module_of(frame: types.FrameType) -> str:
    return frame.f_globals.get("__name__", "")


def callers() -> Iterator[types.FrameType]:
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _directory_of_saver() -> str | None:
    """The path, without a number, of a checkpoint beside the file being written, if the saver's unit is a directory."""
    path = None
    for frame in callers():
        if module_of(frame) == "torch.serialization" and frame.f_code.co_name == "save":
            path = frame.f_locals.get("f")
        elif path is not None and module_of(frame) not in _PASSED_THROUGH:
            directory_saver = module_of(frame) in _DIRECTORY_SAVERS and isinstance(path, str | os.PathLike)
            return f"{os.path.abspath(path)}.superoffload" if directory_saver else None
    return None


def find_directory(directory: str, state_directory: str | None) -> str:
    """Where a checkpoint is now: in its place, in state_directory=, or where the caller has found its state_dict."""
    if os.path.isdir(directory):
        return directory
    name = os.path.basename(directory)  # nobody else's: it has a random number
    places = [] if state_directory is None else [state_directory]
    for frame in callers():
        for value in frame.f_locals.values():
            if isinstance(value, str | os.PathLike) and len(os.fspath(value)) < 4096:
                path = os.fsdecode(value)
                places += [path, os.path.dirname(path)]
    for place in places:
        if "\0" not in place and os.path.isdir(os.path.join(place, name)):
            return os.path.join(place, name)
    raise Error(
        grpc.StatusCode.NOT_FOUND,
        f"the state of this state_dict was saved as {directory}, which is not there; bring it back, or build the "
        f"optimizer with state_directory= the directory that has {name} now",
    )
