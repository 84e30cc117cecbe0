"""Checkpoints that the daemon writes and reads for a trainer, and states that it restores from files of tensors."""

import functools
import glob
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable
from typing import Any

import grpc
import torch

from superoffload._core import run_checkpoint
from superoffload._core.error import Error
from superoffload._core.optimizers import Directories, checkpoints
from superoffload.torch.hosting import Hosting
from superoffload.torch.state import tensor_file
from superoffload.torch.state.moment import Lineage
from superoffload.v1 import optimizer_pb2


def drop_others(prefix: str, directory: str) -> None:
    """Removes the checkpoints of ``prefix`` but one: the file that named the one before has just been overwritten."""
    for old in glob.glob(f"{glob.escape(prefix)}-*"):
        if old != directory:
            shutil.rmtree(old)


class Checkpoints:
    """Saves and restores checkpoints of one optimizer.

    ``state_directory``: where files are made that are read at once; None is the system's place for them.
    ``on_another_moment``: called when a state was restored.
    """

    def __init__(
        self,
        hosting: Hosting,
        lineage: Lineage,
        state_directory: str | None,
        on_another_moment: Callable[[], None],
    ) -> None:
        self._hosting = hosting
        self._lineage = lineage
        self._state_directory = state_directory
        self._on_another_moment = on_another_moment
        self._beside: tuple[str, dict[str, Any]] | None = None  # what all ranks have written, and of which moment

    def save(self, directory: str | os.PathLike[str]) -> int:
        """Has the daemon write a checkpoint; all ranks of a run call it. See `Optimizer.save_checkpoint`."""
        self._hosting.quiesce()
        directory, committed_steps = os.path.abspath(directory), self._hosting.committed_steps()
        group = self._hosting.group
        if group is None:
            return self.write(directory).committed_steps
        write = functools.partial(self.write, directory, committed_steps)
        run_checkpoint.save(group, directory, committed_steps, write)
        return committed_steps

    def write(self, directory: str, run_step: int | None = None) -> optimizer_pb2.CheckpointProgress:
        """Has the daemon write this rank's checkpoint. ``run_step``: it is this rank's part of the run's."""
        request = optimizer_pb2.CheckpointOptimizerRequest(
            name=self._hosting.name, directory=directory, run_step=run_step
        )
        return self._hosting.attachment.write_checkpoint(request)

    def save_beside(self, path: str | os.PathLike[str], save: Callable[[str], int]) -> None:
        """All ranks of a run ``save`` this moment beside ``path``. See `Optimizer.save_beside`."""
        group = self._hosting.group
        assert group is not None, "one rank alone writes its state when it is pickled"
        made = group.gather_objects(uuid.uuid4().hex[:12])[0]
        directory = f"{os.path.abspath(path)}.superoffload-{made}"
        os.makedirs(os.path.dirname(directory), exist_ok=True)
        save(directory)
        self._beside = directory, self._lineage.moment()

    def saved_beside(self, prefix: str) -> str:
        """What `save_beside` has written of this moment, in place of what was there. Raises Error where it has not."""
        directory, moment = self._beside or ("", {})
        if not directory.startswith(f"{prefix}-") or moment != self._lineage.moment():
            raise Error(
                grpc.StatusCode.UNIMPLEMENTED,
                "this rank has its part of the state only, and a trainer that saves on one rank would lose the rest. "
                "Pass callbacks=[superoffload.torch.trainer.SaveOnAllRanks()] to the Hugging Face Trainer, or save the "
                "model only, have all ranks call save_checkpoint(), and pass what they wrote as restore=",
            )
        drop_others(prefix, directory)
        return directory

    def restore_checkpoint(self, directories: Directories) -> None:
        """Goes back, or on, to a checkpoint; all ranks of a run call it. See `Optimizer.restore_checkpoint`."""
        self._restore(checkpoints(directories))

    def restore_tensors(self, tensors: dict[str, dict[str, torch.Tensor]], committed_steps: int) -> None:
        """Takes over arrays and ``step`` by parameter name. Hyper-parameters are sent with the next step."""
        with tempfile.TemporaryDirectory(dir=self._state_directory) as directory:
            file = tensor_file.write(os.path.join(directory, "state.safetensors"), tensors, committed_steps)
            self._restore(optimizer_pb2.RestoreOptimizerRequest(files=[file]))

    def _restore(self, source: optimizer_pb2.RestoreOptimizerRequest) -> None:
        self._hosting.check_attached()
        self._hosting.quiesce()
        self._lineage.replace()
        self._hosting.load(source)
        self._on_another_moment()
