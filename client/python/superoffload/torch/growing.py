"""Parameters that join an optimizer after it was built (gradual unfreezing)."""

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import grpc
import torch

from superoffload._core import names
from superoffload._core.control import Connection
from superoffload._core.error import Error
from superoffload._core.optimizers import checkpoints
from superoffload.torch import groups, parameters
from superoffload.torch.algorithm import MASTER, STEP
from superoffload.torch.attach import Attached, Subject, attach
from superoffload.torch.guards import clip
from superoffload.torch.hosting import Hosting
from superoffload.torch.ranks.shards import HostedParameter
from superoffload.torch.state import tensor_file
from superoffload.v1 import optimizer_pb2


class Growable(Hosting, Protocol):
    """An optimizer in the daemon that can be replaced by a larger one."""

    connection: Connection
    policies: optimizer_pb2.Policies
    bucket_bytes: int

    def is_plain(self) -> bool:
        """Whether it has no name, and whole parameters on the CPU."""

    def subject(self) -> Subject:
        """What is optimized."""

    def replace_by(self, subject: Subject, attached: Attached) -> None:
        """Ends the optimizer and goes on with another one, that has the same state."""


class Growing:
    """Takes parameters in. ``fill_state`` fills ``optimizer.state`` when they are there."""

    def __init__(self, hosting: Growable, fill_state: Callable[[], None], state_directory: str | None) -> None:
        self._hosting = hosting
        self._fill_state = fill_state
        self._state_directory = state_directory

    def check(self) -> None:
        """Raises Error where no parameter can join."""
        if not self._hosting.is_plain():
            raise Error(
                grpc.StatusCode.UNIMPLEMENTED,
                "groups are added later to optimizers without a name, of whole parameters on the CPU; pass all when "
                "building (parameters without gradients are left alone)",
            )

    def take_last_group(self, save: Callable[[str], int]) -> None:
        """Hosts the parameters of the group that was added last, or removes it. ``save`` writes a checkpoint."""
        param_groups = self._hosting.loop.param_groups
        try:
            groups.check_groups(param_groups, self._hosting.algorithm)
            groups.check_whole(param_groups)
            self._grow(parameters.collect(param_groups), save)
        except BaseException:
            param_groups.pop()
            raise

    def _grow(self, hosted: list[HostedParameter], save: Callable[[str], int]) -> None:
        """Hosts more parameters, in another optimizer of the daemon that replaces this one."""
        hosting = self._hosting
        known = {id(parameter.tensor) for parameter in hosting.hosted}
        added = [parameter for parameter in hosted if id(parameter.tensor) not in known]
        if not added:
            return
        clip.check_free([parameter.tensor for parameter in added])
        hosting.quiesce()
        hosting.check_parameters()
        param_groups = hosting.loop.param_groups
        present = [dict(group) for group in param_groups]
        with self._saved_with(added, save) as source:
            connection = Connection(hosting.connection.endpoint)
            subject = dataclasses.replace(
                hosting.subject(), connection=connection, name=names.make_name(), hosted=hosted
            )
            try:
                attached = attach(subject, "check", hosting.policies, source, hosting.bucket_bytes, hosting.synchronize)
            except BaseException:
                connection.close()
                raise
            finally:
                for group, values in zip(param_groups, present, strict=True):
                    group.update(values)  # a scheduler's, which the daemon has not seen
        hosting.replace_by(subject, attached)
        self._fill_state()

    @contextlib.contextmanager
    def _saved_with(
        self, added: Sequence[HostedParameter], save: Callable[[str], int]
    ) -> Iterator[optimizer_pb2.RestoreOptimizerRequest]:
        """A checkpoint of this moment, and beside it tensors of parameters that have made no step yet."""
        with tempfile.TemporaryDirectory(dir=self._state_directory) as directory:
            source = checkpoints(os.path.join(directory, "present"))
            committed_steps = save(source.directories[0])
            tensors = {}
            for parameter in added:
                master = parameter.tensor.detach().float()
                algorithm = self._hosting.algorithm
                zeros = torch.zeros_like(master, dtype=algorithm.moment_dtype)
                moments = {moment: zeros.clone() for moment in algorithm.moments}
                never = torch.tensor(0.0, dtype=torch.float32, device="cpu")
                tensors[parameter.name] = {STEP: never, MASTER: master, **moments}
            path = os.path.join(directory, "added.safetensors")
            source.files.append(tensor_file.write(path, tensors, committed_steps))
            yield source
