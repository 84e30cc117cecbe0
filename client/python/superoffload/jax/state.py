"""Optimizer state that leaves the daemon and comes back: checkpoints, push, pull."""

import abc
import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from superoffload._core import optimizers, run, run_checkpoint
from superoffload._core.attachment import Attachment
from superoffload._core.layout import ArrayPart, parts_of
from superoffload._core.optimizers import Directories
from superoffload.jax.attach import Subject, push, refresh
from superoffload.jax.hosted_tree import HostedTree
from superoffload.jax.live import LiveParameters
from superoffload.jax.stepping import Stepping
from superoffload.v1 import optimizer_pb2

_MASTER = "model"  # in the daemon and in checkpoints


class State:
    """The part of an optimizer that saves and loads its state. What it uses is documented there."""

    name: str
    _attachment: Attachment
    _group: run.Group | None
    _member: run.Member | None
    _live: LiveParameters
    _stepping: Stepping
    _check_attached: Callable[[], None]
    _subject: Callable[[HostedTree], Subject]

    @property
    @abc.abstractmethod
    def hosted_tree(self) -> HostedTree: ...

    def save(self, directory: str | os.PathLike[str]) -> dict[str, Any]:
        """Has the daemon write a checkpoint of this moment, and waits.

        ``directory`` must not exist; its safetensors files hold ``model.NAME`` and ``MOMENT.NAME`` in the state's
        dtypes. Returns a handle of a few bytes, which Orbax or pickle save with the rest of a trainer's state and
        restore() takes, in any process. Several processes call it together, with the same ``directory`` of a file
        system that all share. It is there once all have written their parts, and any number of processes restores it.
        """
        self._check_attached()
        self._stepping.quiesce()
        path = os.path.abspath(directory)
        if self._group is None:
            return {"directory": path, "committed_steps": self._save(path).committed_steps}
        steps = self._attachment.committed_steps
        run_checkpoint.save(self._group, path, steps, functools.partial(self._save, path, steps))
        return {"directory": path, "committed_steps": steps}

    def _save(self, path: str, run_step: int | None = None) -> optimizer_pb2.CheckpointProgress:
        """``run_step``: this process's part of the run's."""
        request = optimizer_pb2.CheckpointOptimizerRequest(name=self.name, directory=path, run_step=run_step)
        return self._attachment.write_checkpoint(request)

    def restore(self, source: Mapping[str, Any] | Directories) -> Any:
        """Goes back, or on, to a checkpoint, or to the handle of one; returns its parameters. All processes call it.

        Hyper-parameters stay those that this optimizer was built with; schedules go on from the restored step.
        """
        self._check_attached()
        self._stepping.quiesce()
        given = optimizers.checkpoints(str(source["directory"]) if isinstance(source, Mapping) else source)
        run_checkpoint.restore(self._group, self._member, functools.partial(self._restore, given))
        self._stepping.restored()
        return self._read()

    def _restore(self, source: optimizer_pb2.RestoreOptimizerRequest) -> None:
        with self._attachment.detached():
            self._subject(self.hosted_tree).restore(source)

    def push_params(self, params: Any) -> None:
        """The trainer wins: masters become these parameters; moments stay."""
        self._check_attached()
        self._stepping.quiesce()
        leaves = self.hosted_tree.match(params, "params")
        push(self._attachment, self.hosted_tree.hosted, leaves)
        self._live.forget()
        self._live.keep(leaves)
        self._stepping.prepare()
        self._stepping.keep_residents()

    def pull_params(self) -> Any:
        """The daemon wins: returns its parameters, those of the last committed step."""
        self._check_attached()
        self._stepping.quiesce()
        request = optimizer_pb2.PullParametersRequest(name=self.name)
        self._attachment.call("PullParameters", request)
        refresh(self._attachment)
        self._stepping.prepare()
        return self._read()

    def _read(self, frozen: Mapping[int, Any] | None = None) -> Any:
        """The parameters of the last step."""
        if self.hosted_tree.gpu is not None:
            params = self.hosted_tree.assemble(self._stepping.published_on_gpu(), frozen)
        else:
            params = self.hosted_tree.assemble_parts(self._live.published(), frozen)
        self._live.keep(self.hosted_tree.match(params, "params"))
        return params

    def state_tensors(self) -> dict[str, dict[str, np.ndarray]]:
        """Copies of ``master`` and of the moments by parameter name, in the shape of what is hosted here.

        Each has the dtype of its array; of codes these are the fp32 numbers that the codes stand for.
        """
        self._check_attached()
        self._stepping.quiesce()
        self._attachment.call("SettleOptimizer", optimizer_pb2.SettleOptimizerRequest(name=self.name))
        layout = self._attachment.optimizer.layout
        tensors: dict[str, dict[str, np.ndarray]] = {}
        for index, leaf in enumerate(self.hosted_tree.hosted):
            parts = parts_of(layout, index, leaf.elements)
            tensors[leaf.name] = {
                "master" if name == _MASTER else name: self._numbers(parts, name).reshape(leaf.part.shape)
                for name, part in parts.items()
                if not part.is_scale
            }
        return tensors

    def _numbers(self, parts: Mapping[str, ArrayPart], name: str) -> np.ndarray:
        part = parts[name]
        stored = self._stored(part)
        if not part.codes:
            return stored.copy()
        scales = parts[part.scales]
        return np.asarray(part.codes, np.float32)[stored] * np.repeat(self._stored(scales), scales.block)[: stored.size]

    def _stored(self, part: ArrayPart) -> np.ndarray:
        return np.frombuffer(self._attachment.state(part.offset, part.bytes), np.dtype(part.dtype))

    @property
    def committed_steps(self) -> int:
        """Steps that changed the parameters; schedules count these."""
        self._check_attached()
        return self._attachment.committed_steps
