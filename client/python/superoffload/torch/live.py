"""A model's parameters: they change in step() and nowhere else, and what others write to them is found.

Those in the CPU's memory: host.py; those on a GPU: gpu/live.py.
"""

import abc
from collections.abc import Callable
from typing import Protocol

import grpc
import torch

from superoffload._core.attachment import Attachment
from superoffload._core.error import Error
from superoffload.torch.ranks.shards import HostedParameter
from superoffload.v1 import optimizer_pb2


def alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.device == b.device


class ParametersChanged(Error):
    """By somebody else than the optimizer; nothing was committed, and ``push_params()`` makes them the masters."""


class Replicas(Protocol):
    """Parameters of which several ranks have the same elements; see ranks/replicas.py."""

    def has_any(self) -> bool: ...
    def gather(self) -> None: ...
    def keep(self) -> None: ...
    def changed(self) -> list[str]: ...
    def check_values(self) -> None: ...
    def gather_whole(self) -> None: ...


class LiveParameters(abc.ABC):
    """The model's side of the published parameters. What has no underscore is also for those that derive from it."""

    def __init__(self, hosted: list[HostedParameter], attachment: Attachment) -> None:
        self.hosted = hosted
        self.attachment = attachment
        self.name = attachment.optimizer.name

    def push(self) -> None:
        """Sets the published parameters and the masters to the model's parameters."""
        self.to_published()
        self.publish()

    def push_first(self) -> None:
        """Does the same for an optimizer that has just been attached to."""
        self.push()

    def publish(self) -> None:
        """Sets the masters to the published parameters."""
        self.attachment.masters_from_published()

    def pull(self) -> None:
        """Sets the published parameters and the model's to the masters."""
        self.attachment.call("PullParameters", optimizer_pb2.PullParametersRequest(name=self.name))
        self.from_published()

    def move_in(self) -> None:
        """The optimizer has just been attached to: bind(), for the first time."""
        self.bind()

    @abc.abstractmethod
    def bind(self) -> None:
        """Sets the model's parameters to the published ones."""

    @abc.abstractmethod
    def before_step(self) -> None:
        """A step is about to begin: the published parameters are still those of the last one."""

    @abc.abstractmethod
    def on_commit(self) -> None:
        """A step was committed, and its parameters are published."""

    @abc.abstractmethod
    def to_published(self) -> None:
        """Copies the model's parameters to the memory that the daemon shares."""

    @abc.abstractmethod
    def from_published(self) -> None:
        """Copies the model's parameters from that memory."""

    @abc.abstractmethod
    def keep(self) -> None:
        """The model's parameters are what they should be: the published ones."""

    @abc.abstractmethod
    def changed(self) -> list[str]:
        """Names of parameters that somebody else has written or replaced."""

    @abc.abstractmethod
    def close(self) -> None:
        """The attachment has ended. The model's parameters are where nothing of it is needed."""

    def begin_check(self) -> Callable[[], None]:
        """`check()`, as of now: what is returned is to be called, and a GPU compares until then."""
        return self.check

    def check(self) -> None:
        """Raises Error for parameters that somebody else has written or replaced."""
        self.check_unchanged(self.changed)

    def check_unchanged(self, find_changed: Callable[[], list[str]]) -> None:
        """Raises Error as `check` does, for those that ``find_changed`` names."""
        for parameter in self.hosted:
            tensor, theta = parameter.local, parameter.theta
            if not alike(tensor, theta):
                raise Error(
                    grpc.StatusCode.FAILED_PRECONDITION,
                    f"parameter {parameter.name} is {list(tensor.shape)} {tensor.dtype} on {tensor.device}, but was "
                    f"{list(theta.shape)} {theta.dtype} on {theta.device}; build a new optimizer after changing it",
                )
        changed = find_changed()
        if changed:
            others = f" and {len(changed) - 1} more were" if len(changed) > 1 else " was"
            raise ParametersChanged(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"parameter {changed[0]}{others} changed by somebody else than the optimizer, and nothing was "
                "committed; call push_params() to make the model's parameters the masters, or pull_params() to undo "
                "the change, and then step() again",
            )
