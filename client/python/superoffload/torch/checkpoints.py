"""Checkpoints that the daemon writes and reads for a trainer."""

import functools
import glob
import os
import shutil
import uuid
from typing import Any

import grpc
import torch

from superoffload._core import run_checkpoint
from superoffload._core.error import Error
from superoffload._core.hosting import Directories, checkpoints
from superoffload.v1 import optimizer_pb2


def drop_others(prefix: str, directory: str) -> None:
    """The file that named the checkpoint before this one has just been overwritten."""
    for old in glob.glob(f"{glob.escape(prefix)}-*"):
        if old != directory:
            shutil.rmtree(old)


class CheckpointOwner(torch.optim.Optimizer):
    """The part of the optimizers that saves and restores checkpoints."""

    _beside: tuple[str, dict[str, Any]] | None = None  # what all ranks have written, and of which moment

    def save_checkpoint(self, directory: str | os.PathLike[str]) -> int:
        """Has the daemon write a checkpoint of this moment, and waits; returns its number of committed steps.

        ``directory`` must not exist. Its safetensors files hold ``model.NAME``, and ``MOMENT.NAME`` for each moment,
        in fp32. All ranks of a run call it together, with the same ``directory`` of a file system that all share, and
        it is there once all have written their shards; any number of ranks can restore it.
        """
        self._check_attached()
        self._send_written_state()
        self._quiesce()
        directory, committed_steps = os.path.abspath(directory), self._committed_steps()
        if self._sharding is None:
            return self._write_checkpoint(directory).committed_steps
        write = functools.partial(self._write_checkpoint, directory, committed_steps)
        run_checkpoint.save(self._sharding.group, directory, committed_steps, write)
        return committed_steps

    def _write_checkpoint(self, directory: str, run_step: int | None = None) -> optimizer_pb2.CheckpointProgress:
        """``run_step``: this rank's part of the run's."""
        request = optimizer_pb2.CheckpointOptimizerRequest(name=self.name, directory=directory, run_step=run_step)
        return self._attachment.write_checkpoint(request)

    def save_beside(self, path: str | os.PathLike[str]) -> None:
        """All ranks of a run write this moment beside ``path``, where one of them is about to pickle ``state_dict()``.

        What it pickles there, before the next step, names their checkpoint. See trainer.py.
        """
        assert self._sharding is not None, "one rank alone writes its state when it is pickled"
        made = self._sharding.group.gather_objects(uuid.uuid4().hex[:12])[0]
        directory = f"{os.path.abspath(path)}.superoffload-{made}"
        os.makedirs(os.path.dirname(directory), exist_ok=True)
        self.save_checkpoint(directory)
        self._beside = directory, self.moment_identity()

    def saved_beside(self, prefix: str) -> str:
        """What `save_beside` has written of this moment, in place of what was there. Raises Error where it has not."""
        directory, moment = self._beside or ("", {})
        if not directory.startswith(f"{prefix}-") or moment != self.moment_identity():
            raise Error(
                grpc.StatusCode.UNIMPLEMENTED,
                "this rank has its part of the state only, and a trainer that saves on one rank would lose the rest. "
                "Pass callbacks=[superoffload.torch.trainer.SaveOnAllRanks()] to the Hugging Face Trainer, or save the "
                "model only, have all ranks call save_checkpoint(), and pass what they wrote as restore=",
            )
        drop_others(prefix, directory)
        return directory

    def restore_checkpoint(self, directories: Directories) -> None:
        """Goes back, or on, to a checkpoint: parameters, moments, step and hyper-parameters become those saved.

        All ranks of a run call it together; they may be another number than those that saved.
        """
        self._restore(checkpoints(directories))

    def _restore(self, source: optimizer_pb2.RestoreOptimizerRequest) -> None:
        self._check_attached()
        self._quiesce()
        self._state_replaced()
        group = None if self._sharding is None else self._sharding.group
        run_checkpoint.restore(group, self._member, lambda: self._restore_detached(source))
        self._stepping.restored()
        self._live.bind()
        self._copies.on_another_moment()

    def _restore_detached(self, source: optimizer_pb2.RestoreOptimizerRequest) -> None:
        with self._attachment.detached():
            self._subject().restore(source)
