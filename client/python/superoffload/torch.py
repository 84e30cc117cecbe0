"""Optimizers for PyTorch whose state and arithmetic live in superoffloadd.

One changed line::

    optimizer = superoffload.torch.AdamW(model.parameters(), lr=3e-4, max_grad_norm=1.0)

Parameters are bfloat16, float16 or float32, dense, on the CPU or one GPU; fp32 masters and moments never leave the
daemon. Gradients are handed over bucket by bucket while backward runs, and the daemon computes new parameters as soon
as it has them, speculating on the verdict about the step; the result is bit for bit that of an optimizer which waits.

Parameters change in ``step()`` and nowhere else; a gradient belongs to the loop until ``step()``. What a loop can see:

- A gradient that was handed over during backward is compared with what the daemon got before the step is committed: in
  the first steps, and whenever the loop's pattern of calls has changed, nothing leaves early and every bit is compared;
  later 64 bytes of every 4 KiB, at a place chosen anew each step. If the loop has changed one, all are handed over
  again, and from then on in ``step()``. ``overlap=False`` is exact always.
- Parameters that somebody else has written are an error in ``step()``, before anything is committed. On a GPU
  writes that bump no version (``.data``, collectives) are looked for in two bytes of every 16 KiB.
- A parameter without a gradient in a step counts as one with a zero gradient (torch leaves it alone); it is named once.
- On a GPU parameters become views of memory that the daemon's are copied to, a gradient that has left early is NaN
  until ``step()`` and None after it, and ``step()`` does not wait for the new parameters: the forward of each module
  does, on the GPU. Code that reads parameters outside of their module's forward calls ``synchronize()`` first.
"""

import atexit
import contextlib
import dataclasses
import datetime
import functools
import math
import os
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Literal

import grpc
import torch

from superoffload import (
    _owner,
    _torch_clip,
    _torch_gpu,
    _torch_gpu_hand_over,
    _torch_interrupt,
    _torch_options,
    _torch_parameters,
    _torch_warn,
)
from superoffload._attachment import Attachment, StepResult, VerdictKind
from superoffload._control import Connection
from superoffload._daemon import resolve_endpoint
from superoffload._error import Error
from superoffload._gpu_attachment import MOVERS, GpuAttachment, GpuReport, Mover, measure_casts
from superoffload._torch_forward import ForwardWaits
from superoffload._torch_gpu_live import GpuParameters
from superoffload._torch_hand_over import HandOver, HostHandOver
from superoffload._torch_live import HostParameters, LiveParameters
from superoffload._torch_missing import MissingGradients
from superoffload._torch_overlap import Overlap
from superoffload._torch_residents import ResidentTuner
from superoffload._torch_state import Directories, StateOwner
from superoffload.v1 import optimizer_pb2

__all__ = ["Adam", "AdamW", "CheckpointSchedule", "GpuOptions", "GpuReport", "StepResult", "VerdictKind"]

Sync = Literal["check", "push_params", "pull_params"]
Speculation = Literal["adaptive", "always", "never"]

_SYNC = {
    "check": optimizer_pb2.SYNC_CHECK,
    "push_params": optimizer_pb2.SYNC_PUSH,
    "pull_params": optimizer_pb2.SYNC_PULL,
}
_SPECULATION = {
    "adaptive": optimizer_pb2.SPECULATION_ADAPTIVE,
    "always": optimizer_pb2.SPECULATION_ALWAYS,
    "never": optimizer_pb2.SPECULATION_NEVER,
}
_WARN_AFTER_SKIPS = 4
_ANONYMOUS_LEASE_SECONDS = 300.0
_DEFAULT_BUCKET_BYTES = 64 << 20  # the daemon's


@dataclasses.dataclass(frozen=True)
class CheckpointSchedule:
    """Checkpoints that the daemon takes by itself, while training goes on."""

    every_steps: int  # committed ones
    directory: str  # must exist on the daemon's machine; checkpoints become its step-00001000, ...
    keep: int = 2  # newest ones that stay; 0 keeps all


@dataclasses.dataclass(frozen=True)
class GpuOptions:
    """How an optimizer uses the GPU that its parameters are on; the defaults measure and adapt."""

    # Who copies: "daemon", from and to GPU memory that it maps; "trainer", from and to memory that the daemon shares;
    # "direct", the kernel that packs gradients stores into that memory; "auto" measures them.
    mover: Mover = "auto"
    # Buckets that may be on their way out at once.
    gradient_slots: int = 4
    # Of the last buckets, whose parameters the next forward needs first: their optimizer state is on the GPU, too, and
    # updated there. "auto": as few as make the trainer wait for nothing.
    resident_buckets: int | Literal["auto"] = "auto"
    # GPU memory for "auto".
    resident_bytes: int = 2 << 30
    # Dtype in which gradients leave the GPU: "fused", their own; "gpu_fp32", fp32; "auto": whichever leaves sooner, as
    # measured when the optimizer is created. Never changes results.
    cast: Literal["auto", "fused", "gpu_fp32"] = "auto"


class AdamW(StateOwner):
    """AdamW as torch.optim.AdamW defines it, in the daemon, on fp32 masters.

    Args:
        params: parameters, (name, parameter) pairs, or groups of either, as for torch.optim.AdamW. Parameters that do
            not require gradients are left alone; tied ones are updated once.
        lr, betas, eps, weight_decay: as for torch.optim.AdamW; schedulers and direct changes of ``param_groups`` work.
        amsgrad, maximize, differentiable: only False, torch's default; True is refused.
        foreach, capturable, fused: taken as torch.optim takes them; they change nothing.
        max_grad_norm: clip the global 2-norm of the gradients to this; None does not clip.
        endpoint: the daemon, "unix:/path/control.sock". Default: $SUPEROFFLOAD_ENDPOINT, a daemon at its usual places
            ($XDG_RUNTIME_DIR/superoffloadd, /run/superoffloadd, /tmp/superoffloadd-UID), else a private one that ends
            with this process.
        name: the optimizer's name in the daemon. With a name it outlives this process, and building an optimizer of
            that name attaches to it again. Without one it is deleted in the end.
        sync: when attaching to an existing optimizer: "check" that the model's parameters are the published ones,
            "push_params" (the model wins) or "pull_params" (the daemon wins).
        speculation: "adaptive", "always" or "never"; never changes results.
        restore: directory of a checkpoint, or directories of all its ranks, that an optimizer which is created begins
            with: masters, moments, step and hyper-parameters. One that exists already is newer and goes on as it is,
            unless its trainer ended before it had been filled.
        checkpoint: have the daemon take checkpoints while training goes on; None leaves an existing optimizer's schedule.
        state_directory: where the daemon writes the state of a ``state_dict()`` that is pickled or deeply copied; the
            Hugging Face Trainer's and accelerate's goes into their own directory. None: it goes into the pickle, and
            needs as much memory while that is loaded.
        lease_seconds: the daemon deletes an optimizer with a name when no trainer was attached to it for so long; None
            keeps it.
        bucket_bytes: gradient bytes per bucket; 0 is the daemon's default, 64 MiB.
        overlap: hand gradients over during backward. "auto" does where watching the loop has shown no harm in it; True
            does without watching; False hands all over in step().
        gpu: for parameters on a GPU.

    Raises:
        Error: what the daemon or the adapter refuses, with a canonical code and a sentence.
    """

    _algorithm = optimizer_pb2.ALGORITHM_ADAMW

    # torch.amp.GradScaler then leaves unscaling and the decision to skip to step().
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        max_grad_norm: float | None = None,
        endpoint: str | None = None,
        name: str | None = None,
        sync: Sync = "check",
        speculation: Speculation = "adaptive",
        restore: Directories | None = None,
        checkpoint: CheckpointSchedule | None = None,
        state_directory: str | os.PathLike[str] | None = None,
        lease_seconds: float | None = None,
        bucket_bytes: int = 0,
        overlap: Overlap = "auto",
        gpu: GpuOptions = GpuOptions(),
    ) -> None:
        if gpu.mover not in MOVERS:
            raise ValueError(f"mover is {gpu.mover!r} but must be one of {', '.join(map(repr, MOVERS))}")
        if gpu.cast not in ("auto", "fused", "gpu_fp32"):
            raise ValueError(f"cast is {gpu.cast!r} but must be 'auto', 'fused' or 'gpu_fp32'")
        if sync not in _SYNC:
            raise ValueError(f"sync is {sync!r} but must be one of {', '.join(map(repr, _SYNC))}")
        if speculation not in _SPECULATION:
            raise ValueError(f"speculation is {speculation!r} but must be one of {', '.join(map(repr, _SPECULATION))}")
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(f"max_grad_norm is {max_grad_norm} but must be positive; None means no clipping")
        if name is not None:
            _torch_options.check_name(name)
        self._attached = False
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        _torch_options.check_flags({"amsgrad": amsgrad, "maximize": maximize, "differentiable": differentiable})
        _torch_options.check_groups(self.param_groups, self._algorithm)
        self.max_grad_norm = max_grad_norm
        self.last_result: StepResult | None = None
        self.skipped_steps: dict[VerdictKind, int] = {kind: 0 for kind in VerdictKind if kind.skipped}
        self._forward_waits: ForwardWaits | None = None
        self._clip = _torch_clip.ClipCalls()  # of the open step
        self._warned_of_empty_step = False
        self._anonymous = name is None
        self.name = name or _torch_options.make_name()
        _torch_options.check_whole(self.param_groups)
        self._hosted = _torch_parameters.collect(self.param_groups)
        self._missing = MissingGradients(self._hosted)
        _torch_clip.check_free(self.hosted_parameters())
        self._gpu = gpu if _torch_gpu.is_on_gpu(self._hosted[0].tensor) else None
        self._cast_timings: list[tuple[int, float, float]] = []
        self._connection = Connection(resolve_endpoint(endpoint))
        try:
            if self._anonymous:
                lease_seconds = _ANONYMOUS_LEASE_SECONDS  # nobody could attach to it after this process
            policies = _policies(speculation, checkpoint, lease_seconds)
            created = self._attach(sync, policies, restore, bucket_bytes)
        except BaseException:
            self._connection.close()
            raise
        if created and name is not None and restore is None and checkpoint is None and state_directory is None:
            _torch_options.warn_of_private_name(name, self._connection.endpoint)
        self._sent_groups: list[tuple[float, ...] | None] = [None] * len(self.param_groups)
        make_hand_over = HostHandOver if self._gpu is None else _torch_gpu_hand_over.GpuHandOver
        prepare_step = weakref.WeakMethod(self._prepare_step)
        self._hand_over: HandOver = make_hand_over(self._attachment, self._hosted, overlap, prepare_step)
        self._tuner: ResidentTuner | None = None
        self._attached = True
        self._own_state(state_directory, continues=not created and sync != "push_params")
        if self._gpu is not None:
            self._forward_waits = ForwardWaits(self._attachment, self._hosted)
            self._start_residents(self._gpu)
            self._report_gpu()
        _torch_clip.register(self, self.hosted_parameters())
        self._finalizer = weakref.finalize(
            self, _end, self._connection, self._attachment, self.name if self._anonymous else None
        )
        self._finalizer.atexit = False
        _at_exit(self._finalizer)
        self._owner_pid = os.getpid()
        _owner.own(self)

    # Attaching.

    def _attach(
        self, sync: Sync, policies: optimizer_pb2.Policies, restore: Directories | None, bucket_bytes: int
    ) -> bool:
        """Returns False when the optimizer existed already."""
        created = self._create(policies, bucket_bytes)
        request = optimizer_pb2.AttachOptimizerRequest(
            name=self.name, sync=optimizer_pb2.SYNC_PUSH if created else _SYNC[sync]
        )
        existing = None
        if not created:
            existing = self._connection.get_whole(self.name)
            _torch_options.check_algorithm(existing, self._algorithm)
            _torch_parameters.check_same(self._hosted, existing, any_gradient_dtype=self._gpu is not None)
        if restore is not None and (existing is None or existing.state == optimizer_pb2.OPTIMIZER_STATE_INCOMPLETE):
            try:
                self._restore(restore)
            except Error:
                if created:
                    self._connection.call("DeleteOptimizer", optimizer_pb2.DeleteOptimizerRequest(name=self.name))
                raise
            request.sync = optimizer_pb2.SYNC_PULL
            created = True  # nothing of what was there before goes on
        if request.sync == optimizer_pb2.SYNC_CHECK:
            request.parameter_crc32.extend(_torch_parameters.checksums(self._hosted))
        self._attachment = self._make_attachment(request)
        self._live = self._make_live()
        if existing is not None:
            self._update_policies(existing.policies, policies)
        if request.sync == optimizer_pb2.SYNC_PUSH:
            self._push()
        self._live.adopt()
        return created

    def _make_live(self) -> LiveParameters:
        if self._gpu is None:
            return HostParameters(self._hosted)
        synchronize = weakref.WeakMethod(self.synchronize)
        return GpuParameters(self._hosted, self._attachment, lambda: synchronize()())

    def _update_policies(self, present: optimizer_pb2.Policies, given: optimizer_pb2.Policies) -> None:
        """Those that are not given stay as they are."""
        policies = optimizer_pb2.Policies(speculation=given.speculation)
        for field in ("checkpoint", "lease"):
            source = given if given.HasField(field) else present
            if source.HasField(field):
                getattr(policies, field).CopyFrom(getattr(source, field))
        if policies != present:
            request = optimizer_pb2.UpdatePoliciesRequest(name=self.name, policies=policies)
            self._connection.call("UpdatePolicies", request)

    def _make_attachment(self, request: optimizer_pb2.AttachOptimizerRequest) -> Attachment:
        if self._gpu is None:
            attachment = Attachment(self._connection, request)
            _torch_parameters.map_views(self._hosted, attachment)
            return attachment
        attachment = GpuAttachment(
            self._connection,
            request,
            _torch_gpu.ordinal(self._hosted[0].tensor),
            self._gpu.mover,
            self._gpu.gradient_slots,
            functools.partial(_torch_gpu_hand_over.most_pieces, hosted=self._hosted),
        )
        _torch_gpu_hand_over.map_views(self._hosted, attachment)
        return attachment

    def _create(self, policies: optimizer_pb2.Policies, bucket_bytes: int) -> bool:
        """Returns False when the optimizer exists already."""
        request = optimizer_pb2.CreateOptimizerRequest(
            anonymous=self._anonymous,
            name=self.name,
            algorithm=self._algorithm,
            parameters=_torch_parameters.specification(
                self._hosted, torch.float32 if self._casts_on_gpu(bucket_bytes) else None
            ),
            policies=policies,
            bucket_bytes=bucket_bytes,
        )
        for group in self.param_groups:
            lr, beta1, beta2, eps, weight_decay = _hyperparameters(group)
            request.groups.add(lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay)
        try:
            self._connection.call("CreateOptimizer", request)
        except Error as error:
            if error.code != grpc.StatusCode.ALREADY_EXISTS:
                raise
            return False
        return True

    def _casts_on_gpu(self, bucket_bytes: int) -> bool:
        """Whether gradients of an optimizer to be created leave as fp32."""
        if self._gpu is None or self._gpu.cast != "auto":
            return self._gpu is not None and self._gpu.cast == "gpu_fp32"
        total = sum(parameter.tensor.numel() for parameter in self._hosted)
        tensor = max((p.tensor for p in self._hosted), key=torch.Tensor.numel)
        elements = min(total, (bucket_bytes or _DEFAULT_BUCKET_BYTES) // tensor.element_size())
        self._cast_timings = measure_casts(
            _torch_gpu.ordinal(tensor), _torch_parameters.DATA_TYPES[tensor.dtype], elements
        )
        _, fused_seconds, gpu_fp32_seconds = self._cast_timings[-1]
        return gpu_fp32_seconds < fused_seconds

    def _report_gpu(self) -> None:
        """For superoffloadctl describe and the metrics."""
        report = self._attachment.report
        casts = any(bucket.gradient_dtype != bucket.dtype for bucket in self._attachment.optimizer.layout.buckets)
        use = optimizer_pb2.GpuUse(
            gpu=report.gpu,
            mover=report.mover,
            sharing=report.sharing,
            coherent=report.coherent,
            staged=report.staged,
            mover_seconds=report.seconds,
            cast="gpu_fp32" if casts else "fused",
            cast_timings=[
                optimizer_pb2.CastTiming(elements=elements, fused_seconds=fused, gpu_fp32_seconds=fp32)
                for elements, fused, fp32 in self._cast_timings
            ],
            resident_buckets=self._attachment.resident_buckets,
            gpu_bytes=report.gpu_bytes,
            notes=report.notes,
        )
        self._attachment.call("ReportGpu", optimizer_pb2.ReportGpuRequest(name=self.name, use=use))

    def _push(self) -> None:
        self._live.push()
        if self._gpu is not None:
            self._attachment.push(_torch_gpu.current_stream(self._hosted[0].tensor))
        self._attachment.call("PushParameters", optimizer_pb2.PushParametersRequest(name=self.name))

    # Stepping.

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One optimizer step; returns the closure's loss. ``last_result`` has the daemon's report.

        Non-finite gradients skip the step, as under torch.amp; see ``skipped_steps``. Without any gradient nothing is
        done. FAILED_PRECONDITION when somebody else has written parameters: nothing was committed, gradients are still
        there, and after ``push_params()`` or ``pull_params()`` it can be called again.
        """
        loss = None
        self._check_attached()
        committed_steps = self._committed_steps()
        try:
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self._check_attached()
            with self._hand_over.cut_off:
                stall_seconds = self._step()
        except BaseException as error:
            if self._attached:
                self._settle_for(error, committed_steps)
            raise
        if self._tuner is not None:
            self._tune_residents(self._tuner, stall_seconds)
        return loss

    def _step(self) -> float:
        """Returns how long the forward passes before it have waited for parameters."""
        self._check_unfrozen()
        if not self._hand_over.has_gradients():
            self._on_empty_step()
            return 0.0
        scale_tensor = getattr(self, "grad_scale", None)  # set by GradScaler
        if self._gpu is not None:
            self._hand_over.on_grad_scaler(scale_tensor is not None)
        self._missing.before_step([group["weight_decay"] != 0 for group in self.param_groups])
        self._hand_over.finish()
        self._check_parameters()
        self._send_groups()
        gradient_scale = 1.0 if scale_tensor is None else 1.0 / float(scale_tensor)
        thresholds = [
            t
            for t in (self._clip.threshold and self._clip.threshold * gradient_scale, self.max_grad_norm)
            if t is not None
        ]
        stall_seconds = 0.0 if self._tuner is None else self._attachment.stall_seconds()  # in the forward passes
        result = self._hand_over.end(gradient_scale, min(thresholds, default=0.0))
        self._clip = _torch_clip.ClipCalls()
        self._on_result(result)
        return stall_seconds

    def _settle(self) -> None:
        """After a call was cut off: the optimizer is between two steps."""
        if not self._hand_over.cut_off.happened:
            return
        committed = self._hand_over.settle(self._committed_steps())
        self._sent_groups = [None] * len(self.param_groups)
        if committed is not None:
            self._clip = _torch_clip.ClipCalls()
            self._on_result(committed)
        self._hand_over.cut_off.happened = False

    def _settle_for(self, error: BaseException, committed_steps: int) -> None:
        """Settles, and notes at the error what became of the step."""
        with contextlib.suppress(Error):
            self._settle()
        if self._hand_over.cut_off.happened:
            note = "it is not known whether the step was committed, because the daemon does not answer"
        elif self._committed_steps() > committed_steps:
            note = "the step was committed; go on with the next one"
        else:
            note = "the step was not committed; parameters and state are those before it, step() can be called again"
        _torch_interrupt.add_note(error, note)

    def _on_result(self, result: StepResult) -> None:
        if not result.kind.skipped:
            self._live.on_commit()
        self._account(result)
        if self._forward_waits is not None:
            self._forward_waits.on_step_end()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch.optim; gradients of a step that was begun and not ended are dropped."""
        if self._attached:
            self._settle()
            self._clip = _torch_clip.ClipCalls()
            with self._hand_over.cut_off:
                self._hand_over.on_zero_grad()
        super().zero_grad(set_to_none)

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Returns the global 2-norm of the gradients and clips the step at hand to `max_norm`.

        torch.nn.utils.clip_grad_norm_ on all parameters of this optimizer comes here.
        """
        self._check_attached()
        with torch.no_grad(), self._hand_over.cut_off:
            norm = self._hand_over.wait_norm()
        return torch.tensor(self._clip.add(max_norm, norm))

    def synchronize(self) -> None:
        """After this, whoever reads parameters on the current stream reads those of the last step."""
        if self._forward_waits is not None:
            self._forward_waits.wait_all()

    def _start_residents(self, gpu: GpuOptions) -> None:
        if gpu.resident_buckets != "auto":
            self._attachment.set_resident(gpu.resident_buckets)
            return
        limit, total = 0, 0
        for bucket in reversed(self._attachment.optimizer.layout.buckets):
            gradient_bytes = 4 if bucket.gradient_dtype == optimizer_pb2.DATA_TYPE_FLOAT32 else 2
            total += bucket.elements * (12 + gradient_bytes)
            limit += total <= gpu.resident_bytes
        self._tuner = ResidentTuner(limit)
        self._step_time = time.monotonic()

    def _tune_residents(self, tuner: ResidentTuner, stall_seconds: float) -> None:
        now = time.monotonic()
        changed = tuner.after_step(stall_seconds, now - self._step_time)
        self._step_time = now
        if not changed:
            return
        self._quiesce()
        self._attachment.call("SettleOptimizer", optimizer_pb2.SettleOptimizerRequest(name=self.name))
        try:
            self._attachment.set_resident(tuner.count)
        except Error as error:
            if error.code != grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
            tuner.refuse()
            self._attachment.set_resident(tuner.count)
        self._report_gpu()

    def _quiesce(self) -> None:
        """No step is open, the last one is over, and the current stream sees its parameters."""
        self._settle()
        self._hand_over.abandon()
        if self._gpu is not None:
            self._attachment.wait_over()
            self.synchronize()

    def _prepare_step(self) -> None:
        self._live.before_step()
        self._send_groups()

    def _check_parameters(self) -> None:
        """Nothing is committed on top of parameters that somebody else has written."""
        try:
            self._live.check()
        except Error:
            self._hand_over.abandon()
            raise

    def _on_empty_step(self) -> None:
        self._hand_over.abandon()
        self._clip = _torch_clip.ClipCalls()
        if not self._warned_of_empty_step:
            self._warned_of_empty_step = True
            _torch_warn.warn("step() was called, but no parameter has a gradient: nothing was done, as in torch.optim")

    def _send_groups(self) -> None:
        _torch_options.check_groups(self.param_groups, self._algorithm)
        for index, group in enumerate(self.param_groups):
            values = _hyperparameters(group)
            if values != self._sent_groups[index]:
                self._attachment.set_group(index, *values)
                self._sent_groups[index] = values

    def _check_attached(self) -> None:
        if not self._attached:
            if os.getpid() != self._owner_pid:
                raise Error(
                    grpc.StatusCode.FAILED_PRECONDITION,
                    f"the optimizer belongs to process {self._owner_pid}, which has built it and was forked; build "
                    "another one in this process",
                )
            raise Error(grpc.StatusCode.FAILED_PRECONDITION, "the optimizer is closed; build a new one")
        self._settle()

    def _check_unfrozen(self) -> None:
        hosted = {id(parameter.tensor) for parameter in self._hosted}
        for group in self.param_groups:
            for tensor in group["params"]:
                if tensor.grad is not None and tensor.numel() > 0 and id(tensor) not in hosted:
                    raise Error(
                        grpc.StatusCode.FAILED_PRECONDITION,
                        "a parameter that was frozen when the optimizer was built has a gradient; "
                        "build the optimizer after unfreezing",
                    )

    def _account(self, result: StepResult) -> None:
        self.last_result = result
        if not result.kind.skipped:
            return
        self.skipped_steps[result.kind] += 1
        skips = result.consecutive_skips
        if skips >= _WARN_AFTER_SKIPS and skips & (skips - 1) == 0:
            reason = "gradients are infinite or NaN"
            if result.kind == VerdictKind.SKIP_OVERFLOW:
                reason = "the gradient norm is beyond what the second moment can hold"
            _torch_warn.warn(f"{skips} steps in a row were skipped: {reason}")

    # State.

    @property
    def gpu_report(self) -> GpuReport | None:
        """What was found out about the GPU; None when the parameters are not on one."""
        return None if self._gpu is None else self._attachment.report

    def hosted_parameters(self) -> list[torch.nn.Parameter]:
        """The parameters that the daemon updates."""
        return [parameter.tensor for parameter in self._hosted]

    def push_params(self) -> None:
        """The trainer wins: masters become the model's parameters as they are; moments stay."""
        self._check_attached()
        self._quiesce()
        self._state_replaced()
        self._push()
        self._live.keep()

    def pull_params(self) -> None:
        """The daemon wins: the model's parameters become the masters again."""
        self._check_attached()
        self._quiesce()
        self._attachment.call("PullParameters", optimizer_pb2.PullParametersRequest(name=self.name))
        if self._gpu is not None:
            self._attachment.pull()
        self._live.adopt()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if getattr(self, "_attached", False):
            raise Error(
                grpc.StatusCode.UNIMPLEMENTED,
                "parameters cannot be added once the daemon has planned its memory; pass all groups when building",
            )
        super().add_param_group(param_group)

    def close(self) -> None:
        """Ends the attachment. Parameters move to memory of their own; an optimizer without a name is deleted."""
        if not self._attached:
            return
        with contextlib.suppress(Error):  # of a daemon that is gone
            self._quiesce()
        self._hand_over.close()
        if self._forward_waits is not None:
            self._forward_waits.close()
        self._state_closed()
        self._attached = False
        _torch_clip.unregister(self.hosted_parameters())
        self._live.close()
        self._finalizer()

    def disown(self) -> None:
        """In a forked child: hooks and finalizers leave the parent's optimizer alone."""
        self._attached = False
        self._finalizer.detach()
        self._hand_over.close()
        if self._forward_waits is not None:
            self._forward_waits.close()
        _torch_clip.unregister(self.hosted_parameters())

    def __deepcopy__(self, memo: Any) -> None:
        raise TypeError("a superoffload optimizer cannot be copied; build another one")

    def __reduce__(self) -> None:
        raise TypeError("a superoffload optimizer cannot be pickled; save state_dict() instead")


class Adam(AdamW):
    """Adam as torch.optim.Adam defines it (weight decay as an L2 term); arguments as for AdamW."""

    _algorithm = optimizer_pb2.ALGORITHM_ADAM

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **options)


def _policies(
    speculation: Speculation, checkpoint: CheckpointSchedule | None, lease_seconds: float | None
) -> optimizer_pb2.Policies:
    policies = optimizer_pb2.Policies(speculation=_SPECULATION[speculation])
    if checkpoint is not None:
        policies.checkpoint.every_steps = checkpoint.every_steps
        policies.checkpoint.directory = os.path.abspath(checkpoint.directory)
        policies.checkpoint.keep = checkpoint.keep
    if lease_seconds is not None:
        policies.lease.FromTimedelta(datetime.timedelta(seconds=lease_seconds))
    return policies


def _hyperparameters(group: dict[str, Any]) -> tuple[float, float, float, float, float]:
    beta1, beta2 = group["betas"]
    values = (group["lr"], beta1, beta2, group["eps"], group["weight_decay"])
    lr, *rest = map(float, values)
    if not math.isfinite(lr):
        raise ValueError(f"lr is {lr} but must be finite")
    return (lr, *rest)


def _end(connection: Connection, attachment: Attachment, delete: str | None) -> None:
    """Ends an attachment and deletes an optimizer that nobody can name."""
    attachment.end()
    if delete is not None:
        with contextlib.suppress(Error):  # it is gone, or the daemon is
            connection.call("DeleteOptimizer", optimizer_pb2.DeleteOptimizerRequest(name=delete))
    connection.close()


def _at_exit(finalizer: weakref.finalize) -> None:
    # Registered after a private daemon's own exit handler, so that it runs before it.
    atexit.register(finalizer)
