"""Parameters that join an optimizer after it was built (gradual unfreezing)."""

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import grpc
import torch

from superoffload._core import names
from superoffload._core.control import Connection
from superoffload._core.error import Error
from superoffload._core.hosting import checkpoints
from superoffload.torch import options, parameters, tensor_file
from superoffload.torch.algorithm import MASTER, STEP
from superoffload.torch.attach import attach
from superoffload.torch.guards import clip
from superoffload.torch.parameters import HostedParameter
from superoffload.torch.state import StateOwner
from superoffload.v1 import optimizer_pb2


class Growing(StateOwner):
    """The part of the optimizers that takes parameters in."""

    _hosted: list[HostedParameter]
    _connection: Connection

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch.optim: the added parameters begin at their own step 0, the others go on.

        The daemon plans anew, with a checkpoint in the state directory (or a temporary one) as the way between.
        """
        if not getattr(self, "_attached", False):  # while it is being built
            super().add_param_group(param_group)
            return
        self._check_attached()
        if not self._anonymous or self._gpu is not None or self._sharding is not None:
            raise Error(
                grpc.StatusCode.UNIMPLEMENTED,
                "groups are added later to optimizers without a name, of whole parameters on the CPU; pass all when "
                "building (parameters without gradients are left alone)",
            )
        super().add_param_group(param_group)
        try:
            options.check_groups(self.param_groups, self.algorithm)
            options.check_whole(self.param_groups)
            hosted = parameters.collect(self.param_groups)
            self._grow(hosted)
        except BaseException:
            self.param_groups.pop()
            raise

    def _grow(self, hosted: list[HostedParameter]) -> None:
        """Hosts more parameters, in another optimizer of the daemon that replaces this one."""
        known = {id(parameter.tensor) for parameter in self._hosted}
        added = [parameter for parameter in hosted if id(parameter.tensor) not in known]
        if not added:
            return
        clip.check_free([parameter.tensor for parameter in added])
        self._quiesce()
        self._stepping.check_parameters()
        present = [dict(group) for group in self.param_groups]
        with self._saved_with(added) as source:
            connection = Connection(self._connection.endpoint)
            subject = dataclasses.replace(self._subject(), connection=connection, name=names.make_name(), hosted=hosted)
            try:
                attached = attach(subject, "check", self._policies, source, self._bucket_bytes, self.synchronize)
            except BaseException:
                connection.close()
                raise
            finally:
                for group, values in zip(self.param_groups, present, strict=True):
                    group.update(values)  # a scheduler's, which the daemon has not seen
        stepping, self._connection = self._stepping, connection
        self._release_model()
        self._finalizer()  # deletes the one before
        self._live.close()
        self.name, self._hosted = subject.name, hosted
        self._host(attached)
        self._stepping.continue_from(stepping)
        self._fill_state()

    @contextlib.contextmanager
    def _saved_with(self, added: Sequence[HostedParameter]) -> Iterator[optimizer_pb2.RestoreOptimizerRequest]:
        """A checkpoint of this moment, and beside it tensors of parameters that have made no step yet."""
        with tempfile.TemporaryDirectory(dir=self._state_directory) as directory:
            source = checkpoints(os.path.join(directory, "present"))
            committed_steps = self.save_checkpoint(source.directories[0])
            tensors = {}
            for parameter in added:
                master = parameter.tensor.detach().float()
                moments = {moment: torch.zeros_like(master) for moment in self.algorithm.moments}
                never = torch.tensor(0.0, dtype=torch.float32, device="cpu")
                tensors[parameter.name] = {STEP: never, MASTER: master, **moments}
            path = os.path.join(directory, "added.safetensors")
            source.files.append(tensor_file.write(path, tensors, committed_steps))
            yield source
