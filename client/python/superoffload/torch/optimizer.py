"""torch.optim's interface to an optimizer that the daemon hosts, whatever its algorithm."""

import contextlib
import functools
import mmap
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch

from superoffload._core import names, owner, policies, run, stored
from superoffload._core.control import Connection
from superoffload._core.error import Error
from superoffload._core.gpu_attachment import GpuReport
from superoffload._core.optimizers import Directories
from superoffload._core.step_result import StepResult, VerdictKind
from superoffload.torch import groups
from superoffload.torch.algorithm import Algorithm
from superoffload.torch.attach import Backend
from superoffload.torch.gpu.backend import GpuBackend
from superoffload.torch.gpu.options import GpuOptions, Weights, check_weights
from superoffload.torch.growing import Growing
from superoffload.torch.guards.grad_scale import GradScale
from superoffload.torch.hooks import eager, weakly
from superoffload.torch.host import HostBackend
from superoffload.torch.lifecycle import Lifecycle, Wanted
from superoffload.torch.overlap import Overlap
from superoffload.torch.state.checkpoints import Checkpoints
from superoffload.torch.state.copies import StateCopies
from superoffload.torch.state.moment import Lineage
from superoffload.torch.state.saving import State
from superoffload.torch.state.written import WrittenState
from superoffload.torch.submitter import Submitter
from superoffload.torch.waiting import Waiting

# Named, not super(): between an optimizer and this there may be the class that it stands in for (../stand_ins).
_Base = torch.optim.Optimizer
_MEASURED = GpuOptions()


def _backend_of(options: GpuOptions, weights: Weights, gpu: torch.device | None) -> Backend:
    """Where parameters are while they are trained; None: the CPU, which computes with them where they are."""
    return HostBackend() if gpu is None else GpuBackend(options, gpu, weights)


class Optimizer(torch.optim.Optimizer):
    """What all optimizers have in common; their own documentation names the arguments.

    Its interface is torch.optim's, and its parts do the work. Each part is given what it needs when it is made. No part
    holds the optimizer, so that it ends when nobody else holds it.

    Args:
        defaults: of the keys of a parameter group.
        flags: options that only the algorithm's counterpart in torch has, as given.
    """

    algorithm: Algorithm  # of the class: in fp32

    def __init__(
        self,
        params: Iterable[Any],
        defaults: Mapping[str, Any],
        flags: Mapping[str, Any],
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        state_dtype: torch.dtype = torch.float32,
        master_dtype: torch.dtype = torch.float32,
        rounding: stored.Rounding = "stochastic",
        seed: int | None = None,
        max_grad_norm: float | None = None,
        endpoint: str | None = None,
        name: str | None = None,
        sync: policies.Sync = "check",
        speculation: policies.Speculation = "adaptive",
        restore: Directories | None = None,
        checkpoint: policies.CheckpointSchedule | None = None,
        state_directory: str | os.PathLike[str] | None = None,
        lease_seconds: float | None = None,
        bucket_bytes: int = 0,
        overlap: Overlap = "auto",
        gpu: GpuOptions = _MEASURED,
        weights: Weights = "resident",
        replicas: Any = None,
    ) -> None:
        policies.check_sync(sync, restore)
        check_weights(weights)
        stored.check_seed(seed)
        self.algorithm = type(self).algorithm.stored_as(state_dtype, rounding, master_dtype)
        lease_seconds = names.lease_of(name, lease_seconds)
        self.max_grad_norm = max_grad_norm
        wanted = Wanted(
            name=name,
            endpoint=endpoint,
            sync=sync,
            restore=restore,
            policies=policies.policies(speculation, checkpoint, lease_seconds),
            bucket_bytes=bucket_bytes,
            seed=seed,
            overlap=overlap,
            replicas=replicas,
            device=gpu.device,
        )
        self._hosting = Lifecycle(self, self.algorithm, wanted, functools.partial(_backend_of, gpu, weights))
        _Base.__init__(self, params, {**defaults, "maximize": maximize})
        groups.check_flags({**flags, "differentiable": differentiable}, self.algorithm)
        groups.check_groups(self.param_groups, self.algorithm)
        self._optim_bits = groups.optim_bits(self.param_groups)
        directory = None if state_directory is None else os.path.abspath(state_directory)
        self._grad_scale = GradScale()
        self._waiting = Waiting()
        self._copies = StateCopies()
        self._lineage = Lineage(self._hosting)
        self._checkpoints = Checkpoints(self._hosting, self._lineage, directory, self._copies.on_another_moment)
        self._written = WrittenState(self._hosting, self._copies, self._checkpoints.restore_tensors)
        self._state = State(self._hosting, self._lineage, self._written, self._checkpoints, directory)
        self._growing = Growing(self._hosting, self._written.fill, directory)
        continues = self._hosting.begin(weakly(self._written.send), weakly(self._written.fill))
        if not continues and name is not None and restore is None and checkpoint is None and state_directory is None:
            names.warn_of_private_name(name, self._hosting.endpoint)
        self._lineage.begin(continues and sync != "push_params")
        self._written.fill()
        owner.own(self)

    @property
    def name(self) -> str:
        """The optimizer's name in the daemon."""
        return self._hosting.name

    def is_attached(self) -> bool:
        """Whether the optimizer is not closed."""
        return self._hosting.attached

    def submitter(self) -> Submitter:
        """What submits gradients to the present attachment."""
        return self._hosting.submitter

    def replica_group(self) -> Any:
        """The process group in which ranks agree; None where this one trains alone."""
        return None if self._hosting.group is None else self._hosting.group.group

    def is_divided(self) -> bool:
        """Whether other ranks have parts of the state."""
        return self._hosting.ranks() > 1

    # Stepping.

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether torch.amp.GradScaler asks, which then leaves unscaling and the decision to skip to step().

        Others, Lightning for one, ask in order to refuse to unscale and clip before step(), which works as well.
        """
        return sys._getframe(1).f_globals.get("__name__", "").startswith("torch.")

    @eager
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One optimizer step; returns the closure's loss. ``last_result`` has the daemon's report.

        Non-finite gradients skip the step, as under torch.amp; see ``skipped_steps``. Without any gradient nothing is
        done. FAILED_PRECONDITION when somebody else has written parameters: nothing was committed, gradients are still
        there, and after ``push_params()`` or ``pull_params()`` it can be called again.
        """
        loss = None
        self._hosting.check_attached()
        committed_steps = self._hosting.committed_steps()
        try:
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self._hosting.check_attached()
            with self._waiting.counted():
                self._step()
        except BaseException as error:
            self._grad_scale.on_error(self, self._hosting.trained())
            if self._hosting.attached:
                self._hosting.stepping.settle_for(error, committed_steps)
            raise
        return loss

    def _step(self) -> None:
        hosting = self._hosting
        groups.check_optim_bits(self.param_groups, self._optim_bits)
        with hosting.submitter.told():
            self._written.send()
        with hosting.submitter.cut_off:
            with hosting.submitter.told():
                hosting.check_unfrozen()
            stall_seconds = 0.0 if hosting.gpu is None else hosting.gpu.stall_seconds()
            self._waiting.seconds += stall_seconds
            grad_scale = self._grad_scale.take(self, hosting.trained())
            ended = hosting.stepping.step(self.param_groups, grad_scale, self.max_grad_norm)
        self._grad_scale.forget()
        self._copies.on_another_moment()
        if ended and hosting.gpu is not None:
            hosting.gpu.after_step(stall_seconds, hosting.quiesce)

    @eager
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch.optim; gradients of a step that was begun and not ended are dropped."""
        if self._hosting.attached:
            self._hosting.stepping.zero_grad()
        self._grad_scale.forget()
        _Base.zero_grad(self, set_to_none)
        if self._hosting.attached and self._hosting.gpu is not None:
            self._hosting.gpu.after_zero_grad(self._hosting.quiesce)

    @eager
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Returns the global 2-norm of the gradients and clips the step at hand to `max_norm`.

        torch.nn.utils.clip_grad_norm_ on all parameters of this optimizer comes here.
        """
        self._hosting.check_attached()
        with self._waiting.counted():
            self._written.send()
            norm = self._hosting.stepping.clip_grad_norm(max_norm)
        return torch.tensor(norm, dtype=torch.float32, device="cpu")

    def clips_as_torch(self) -> bool:
        """Whether torch.nn.utils.clip_grad_norm_ scales ``.grad``; nothing has been submitted then."""
        return not self._hosting.submitter.overlaps and self._hosting.sharding is None

    @property
    def max_grad_norm(self) -> float | None:
        """Steps are clipped to this global 2-norm of the gradients; None does not clip."""
        return self._max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float | None) -> None:
        policies.check_max_grad_norm("max_grad_norm", value)
        self._max_grad_norm = value

    @property
    def last_result(self) -> StepResult | None:
        """The daemon's report on the last step; None before the first one."""
        return self._hosting.stepping.last_result

    @property
    def waited_seconds(self) -> float:
        """How long the loop has waited for this optimizer so far: in ``step()`` and ``clip_grad_norm_()``.

        On a GPU also in forward passes, for parameters that the daemon did not have yet.
        """
        return self._waiting.seconds

    @property
    def committed_steps(self) -> int:
        """Steps that changed the parameters, those before a restart or a restore too: from where a loop goes on."""
        self._hosting.stepping.settle()  # a step that was cut off counts once it is known to be committed
        return self._hosting.committed_steps()

    @property
    def skipped_steps(self) -> dict[VerdictKind, int]:
        """How many steps were skipped, by reason."""
        return self._hosting.stepping.skipped_steps

    # Parameters.

    def synchronize(self) -> None:
        """After this, whoever reads parameters on the current stream reads those of the last step."""
        self._hosting.synchronize()

    def hosted_parameters(self) -> list[torch.nn.Parameter]:
        """The parameters that the daemon updates, or the daemons of all ranks that train them."""
        return self._hosting.trained()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch.optim: the added parameters begin at their own step 0, the others go on.

        The daemon plans anew, with a checkpoint in the state directory (or a temporary one) as the way between.
        """
        if not self._hosting.attached:  # while it is being built
            _Base.add_param_group(self, param_group)
            return
        self._hosting.check_attached()
        self._growing.check()
        _Base.add_param_group(self, param_group)
        self._growing.take_last_group(self.save_checkpoint)
        self._optim_bits = groups.optim_bits(self.param_groups)

    def push_params(self) -> None:
        """The trainer wins: sets the masters to the model's parameters as they are; moments stay."""
        self._state.push_params()

    def pull_params(self) -> None:
        """The daemon wins: sets the model's parameters to the masters."""
        self._state.pull_params()

    # State.

    def state_of(self, indices: Sequence[int], keys: Sequence[str]) -> dict[int, dict[str, torch.Tensor]]:
        """Views of the daemon's memory by hosted parameter, right until the next step, in its local shape."""
        return self._state.state_of(indices, keys)

    def state_tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        """Copies of ``master`` and of the moments by parameter name, in the parameter's local shape."""
        return self._state.state_tensors()

    def state_dict(self) -> dict[str, Any]:
        """Hyper-parameters and the present moment: free. Pickled or deeply copied it holds the state; see `Moment`.

        With ``state_tensors()`` and ``optimizer.state[parameter]`` the state can be looked at.
        """
        self._hosting.check_attached()
        self._written.send()
        return self._state.dict_of(_Base.state_dict(self))

    def torch_state_dict(self) -> dict[str, Any]:
        """A state_dict that the optimizer's counterpart in torch.optim can load, on the same parameters: copies."""
        self._hosting.check_attached()
        return self._state.torch_dict_of(_Base.state_dict(self))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes to the moment of a ``state_dict()``, or takes over the state of its counterpart in torch.optim.

        Parameters become those of the moment, too; torch's state has none, and the model's stay. Loading the present
        moment is free.
        """
        self._state.load(state_dict)
        _Base.load_state_dict(self, {"state": {}, "param_groups": state_dict["param_groups"]})
        groups.set_optim_bits(self.param_groups, self._optim_bits)
        self._written.fill()
        self._state.load_others(state_dict)

    def load_torch_state_dict(self, state_dict: dict[str, Any]) -> None:
        """``load_state_dict()`` of its counterpart in torch.optim on the same parameters."""
        self.load_state_dict(state_dict)

    def save_checkpoint(self, directory: str | os.PathLike[str]) -> int:
        """Has the daemon write a checkpoint of this moment, and waits; returns its number of committed steps.

        ``directory`` must not exist. Its safetensors files hold ``model.NAME`` in fp32, and ``MOMENT.NAME`` for each
        moment. All ranks of a run call it together, with the same ``directory`` of a file system that all share, and
        it is there once all have written their shards; any number of ranks can restore it.
        """
        self._hosting.check_attached()
        self._written.send()
        return self._checkpoints.save(directory)

    def save_beside(self, path: str | os.PathLike[str]) -> None:
        """All ranks of a run write this moment beside ``path``, where one of them is about to pickle ``state_dict()``.

        What it pickles there, before the next step, names their checkpoint. See trainer.py.
        """
        self._checkpoints.save_beside(path, self.save_checkpoint)

    def restore_checkpoint(self, directories: Directories) -> None:
        """Goes back, or on, to a checkpoint: parameters, moments, step and hyper-parameters become those saved.

        All ranks of a run call it together; they may be another number than those that saved.
        """
        self._checkpoints.restore_checkpoint(directories)

    # Memory.

    def release(self) -> None:
        """Gives GPU memory back, for somebody else to compute with; the daemon keeps everything.

        That is what parameters, slots, and state on the GPU take. ``model.state_dict()`` has the parameters meanwhile,
        on the CPU; whoever else uses one is told to call ``resume()``. Without a GPU there is nothing to give back.
        FAILED_PRECONDITION: there are gradients; parameters were written and not pushed; or the daemon copies
        (``GpuOptions(mover="trainer")`` does not have that).
        """
        self._hosting.release()

    def resume(self) -> None:
        """After ``release()``: parameters are at their addresses again. RESOURCE_EXHAUSTED: out of GPU memory."""
        self._hosting.resume()

    def lend_memory(self, size: int) -> mmap.mmap:
        """Memory of the daemon's, on its NUMA node, for uses of this process's own, as long as it is mapped.

        It counts as the user's until ``close()``. RESOURCE_EXHAUSTED: the daemon, or the user's share, has no more.
        """
        return self._hosting.attachment.lend(size)

    # The daemon.

    @property
    def gpu_report(self) -> GpuReport | None:
        """What was found out about the GPU; None when the parameters are not on one."""
        return None if self._hosting.gpu is None else self._hosting.gpu.report

    @property
    def metrics_address(self) -> str:
        """Where Prometheus reads the daemon's metrics: HOST:PORT; empty when nowhere."""
        return self._hosting.connection.server_info.metrics_address

    # Ending.

    def close(self) -> None:
        """Ends the attachment. Parameters stay where they are; an optimizer without a name is deleted.

        On a GPU that is memory which the optimizer has made; it is given back, in pieces, as parameters leave it.
        """
        if not self._hosting.attached:
            return
        with contextlib.suppress(Error):  # of a daemon that is gone
            self._hosting.quiesce()
        self.state.clear()
        self._lineage.end()
        self._hosting.close()

    def delete(self) -> None:
        """Ends the attachment, and deletes the optimizer from the daemon. Of several ranks, each deletes its own."""
        self._hosting.check_attached()
        name, endpoint = self.name, self._hosting.endpoint
        self.close()
        connection = Connection(endpoint)
        try:
            run.delete(connection, name)
        finally:
            connection.close()

    def disown(self) -> None:
        """In a forked child: hooks and finalizers leave the parent's optimizer alone."""
        self._hosting.disown()

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise TypeError("a superoffload optimizer cannot be copied; build another one")

    def __reduce__(self) -> NoReturn:
        raise TypeError("a superoffload optimizer cannot be pickled; save state_dict() instead")
