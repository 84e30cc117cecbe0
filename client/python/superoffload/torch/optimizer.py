"""torch.optim's interface to an optimizer that the daemon hosts, whatever its algorithm."""

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, NoReturn

import grpc
import torch

from superoffload._core import names, owner, policies
from superoffload._core.error import Error
from superoffload._core.gpu_attachment import GpuReport
from superoffload._core.hosting import Directories
from superoffload._core.step_result import StepResult, VerdictKind
from superoffload.torch import groups, options, parameters
from superoffload.torch.algorithm import Algorithm
from superoffload.torch.attaching import Attaching
from superoffload.torch.eager import eager
from superoffload.torch.gpu.forward import ForwardWaits
from superoffload.torch.gpu.options import GpuOptions
from superoffload.torch.gpu.residents import Residents
from superoffload.torch.grad_scale import GradScale
from superoffload.torch.guards.overlap import Overlap
from superoffload.torch.submitter import Submitter

_MEASURED = GpuOptions()


class Optimizer(Attaching):
    """What all optimizers have in common; their own documentation names the arguments.

    Args:
        defaults: of the keys of a parameter group.
        flags: options that only the algorithm's counterpart in torch has, as given.
    """

    algorithm: ClassVar[Algorithm]

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
        replicas: Any = None,
    ) -> None:
        policies.check_sync(sync, restore)
        lease_seconds = names.lease_of(name, lease_seconds)
        self.max_grad_norm = max_grad_norm
        self._policies = policies.policies(speculation, checkpoint, lease_seconds)
        self._attached = False
        super().__init__(params, {**defaults, "maximize": maximize})
        options.check_flags({**flags, "differentiable": differentiable}, self.algorithm)
        options.check_groups(self.param_groups, self.algorithm)
        self._grad_scale = GradScale()
        self._anonymous = name is None
        self._forward_waits: ForwardWaits | None = None
        self._residents: Residents | None = None
        self._overlap, self._bucket_bytes = overlap, bucket_bytes
        self._begin = functools.partial(
            Attaching._begin_hosting,
            name=name,
            endpoint=endpoint,
            sync=sync,
            restore=restore,
            gpu=gpu,
            replicas=replicas,
        )
        continues = self._begin(self)
        if not continues and name is not None and restore is None and checkpoint is None and state_directory is None:
            names.warn_of_private_name(name, self._connection.endpoint)
        self._own_state(state_directory, continues=continues and sync != "push_params")
        self._owner_pid = os.getpid()
        owner.own(self)

    def submitter(self) -> Submitter:
        """Of the present attachment."""
        return self._submitter

    def replica_group(self) -> Any:
        """The process group in which ranks agree; None where this one trains alone."""
        return None if self._sharding is None else self._sharding.group.group

    def is_divided(self) -> bool:
        """Whether other ranks have parts of the state."""
        return self._ranks() > 1

    def _ranks(self) -> int:
        return 1 if self._sharding is None else self._sharding.group.ranks

    # Stepping.

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """To torch.amp.GradScaler, which then leaves unscaling and the decision to skip to step().

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
        self._check_attached()
        committed_steps = self._stepping.committed_steps()
        try:
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self._check_attached()
            with self._submitter.told():
                self._send_written_state()
            with self._submitter.cut_off:
                with self._submitter.told():
                    parameters.check_unfrozen(self.param_groups, self.hosted_parameters(), self._built_of)
                stall_seconds = 0.0 if self._residents is None else self._residents.stall_seconds()
                grad_scale = self._grad_scale.take(self, self.hosted_parameters())
                ended = self._stepping.step(self.param_groups, grad_scale, self.max_grad_norm)
            self._grad_scale.forget()
            self._copies.on_another_moment()
            if ended and self._residents is not None:
                self._residents.after_step(stall_seconds, self._quiesce)
                self._reporter.report()
        except BaseException as error:
            self._grad_scale.on_error(self, self.hosted_parameters())
            if self._attached:
                self._stepping.settle_for(error, committed_steps)
            raise
        return loss

    def _prepare_step(self) -> None:
        self._live.before_step()
        groups.send(self.algorithm, self._attachment, self.param_groups)

    def _quiesce(self) -> None:
        """No step is open, the last one is over, and the current stream sees its parameters."""
        self._stepping.abandon()
        if self._gpu_attachment is not None:
            self._gpu_attachment.wait_over()
            self.synchronize()

    @eager
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch.optim; gradients of a step that was begun and not ended are dropped."""
        if self._attached:
            self._stepping.zero_grad()
        self._grad_scale.forget()
        super().zero_grad(set_to_none)

    @eager
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Returns the global 2-norm of the gradients and clips the step at hand to `max_norm`.

        torch.nn.utils.clip_grad_norm_ on all parameters of this optimizer comes here.
        """
        self._check_attached()
        self._send_written_state()
        return torch.tensor(self._stepping.clip_grad_norm(max_norm), dtype=torch.float32, device="cpu")

    def clips_as_torch(self) -> bool:
        """Whether torch.nn.utils.clip_grad_norm_ scales ``.grad``; nothing has been submitted then."""
        return not self._submitter.overlaps and self._sharding is None

    @property
    def max_grad_norm(self) -> float | None:
        """Steps are clipped to this global 2-norm of the gradients; None does not clip."""
        return self._max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float | None) -> None:
        policies.check_max_norm("max_grad_norm", value)
        self._max_grad_norm = value

    @property
    def last_result(self) -> StepResult | None:
        """The daemon's report on the last step; None before the first one."""
        return self._stepping.last_result

    @property
    def committed_steps(self) -> int:
        """Steps that changed the parameters, those before a restart or a restore too: from where a loop goes on."""
        self._stepping.settle()  # a step that was cut off counts once it is known to be committed
        return self._stepping.committed_steps()

    @property
    def skipped_steps(self) -> dict[VerdictKind, int]:
        """How many steps were skipped, by reason."""
        return self._stepping.skipped_steps

    # Parameters.

    def synchronize(self) -> None:
        """After this, whoever reads parameters on the current stream reads those of the last step."""
        if self._forward_waits is not None:
            self._forward_waits.wait_all()

    def hosted_parameters(self) -> list[torch.nn.Parameter]:
        """The parameters that the daemon updates, or the daemons of all ranks that train them."""
        if self._sharding is not None:
            return self._sharding.trained
        return [parameter.tensor for parameter in self._hosted]

    def push_params(self) -> None:
        """The trainer wins: masters become the model's parameters as they are; moments stay."""
        self._check_attached()
        self._quiesce()
        self._state_replaced()
        self._live.push()
        self._live.keep()

    def pull_params(self) -> None:
        """The daemon wins: the model's parameters become the masters again."""
        self._check_attached()
        self._quiesce()
        self._live.pull()

    @property
    def gpu_report(self) -> GpuReport | None:
        """What was found out about the GPU; None when the parameters are not on one."""
        return None if self._gpu_attachment is None else self._gpu_attachment.report

    @property
    def metrics_address(self) -> str:
        """Where Prometheus reads the daemon's metrics: HOST:PORT; empty when nowhere."""
        return self._connection.server_info.metrics_address

    # Ending.

    def _check_attached(self) -> None:
        if not self._attached:
            owner.check_process(self._owner_pid)
            raise Error(grpc.StatusCode.FAILED_PRECONDITION, "the optimizer is closed; build a new one")
        self._stepping.settle()
        self._follow_replaced()

    def close(self) -> None:
        """Ends the attachment. Parameters stay where they are; an optimizer without a name is deleted.

        On a GPU that is memory which the optimizer has made; it is given back, in pieces, as parameters leave it.
        """
        if not self._attached:
            return
        with contextlib.suppress(Error):  # of a daemon that is gone
            self._quiesce()
        self._state_closed()
        self._release_model()
        self._finalizer()
        self._live.close()

    def disown(self) -> None:
        """In a forked child: hooks and finalizers leave the parent's optimizer alone."""
        self._finalizer.detach()
        self._release_model()

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise TypeError("a superoffload optimizer cannot be copied; build another one")

    def __reduce__(self) -> NoReturn:
        raise TypeError("a superoffload optimizer cannot be pickled; save state_dict() instead")
