"""An optimizer of JAX trainers that the daemon hosts, whatever its algorithm."""

import atexit
import contextlib
import functools
import os
import sys
import weakref
from collections.abc import Mapping
from typing import Any, NoReturn

import grpc
import jax

from superoffload._core import names, optimizers, owner, policies, run, stored
from superoffload._core.attachment import Attachment
from superoffload._core.control import Connection
from superoffload._core.daemon import resolve_endpoint
from superoffload._core.error import Error
from superoffload._core.gpu_attachment import GpuAttachment
from superoffload._core.optimizers import Directories
from superoffload._core.resident_buckets import ResidentBuckets
from superoffload._core.step_result import StepResult, VerdictKind
from superoffload.jax import ffi, processes, streams
from superoffload.jax.algorithm import Algorithm
from superoffload.jax.attach import Subject, attach
from superoffload.jax.gpu_options import GpuOptions
from superoffload.jax.groups import Groups
from superoffload.jax.hosted_tree import HostedTree
from superoffload.jax.live import LiveParameters
from superoffload.jax.state import State
from superoffload.jax.stepping import Stepping
from superoffload.jax.streams import Weights
from superoffload.v1 import optimizer_pb2

_TAKE_TRANSFORMATIONS = ("optax", "flax")  # packages that call init() of what they take for one
_NO_TRANSFORMATION = (
    "an optimizer of superoffload.jax makes new parameters, not updates that are added to them, so it cannot be a "
    "transformation inside of optax.chain, optax.MultiSteps, TrainState or nnx.Optimizer: call params = "
    "optimizer.init(params) yourself, and params, report = optimizer.step(gradients, params=params) in place of "
    "update() and apply_updates(); transform or accumulate gradients before, and clip with max_norm="
)


class Optimizer(State):
    """Built by the functions of this package, whose documentation names the arguments."""

    def __init__(
        self,
        algorithm: Algorithm,
        defaults: Mapping[str, Any],
        mask: Any = None,
        *,
        labels: Any = None,
        groups: Mapping[str, Mapping[str, Any]] | None = None,
        trainable: Any = None,
        state_dtype: Any = "float32",
        master_dtype: Any = "float32",
        rounding: stored.Rounding = "stochastic",
        seed: int | None = None,
        max_norm: float | None = None,
        endpoint: str | None = None,
        name: str | None = None,
        sync: policies.Sync = "check",
        speculation: policies.Speculation = "adaptive",
        restore: Directories | None = None,
        checkpoint: policies.CheckpointSchedule | None = None,
        lease_seconds: float | None = None,
        bucket_bytes: int = 0,
        gpu: GpuOptions | None = None,
        weights: Weights = "resident",
    ) -> None:
        streams.check_weights(weights)
        policies.check_sync(sync, restore)
        policies.check_max_grad_norm("max_norm", max_norm)
        stored.check_seed(seed)
        lease_seconds = names.lease_of(name, lease_seconds)
        self._algorithm = algorithm = algorithm.stored_as(state_dtype, rounding, master_dtype)
        self._seed = seed
        self._groups = Groups(algorithm, defaults, labels, groups, mask)
        self._trainable = trainable
        self._gpu_options = GpuOptions() if gpu is None else gpu
        self._weights = weights
        self.max_norm = max_norm
        self._anonymous = name is None
        self.name = name or names.make_name()
        self._endpoint, self._sync, self._bucket_bytes = endpoint, sync, bucket_bytes
        self._policies = policies.policies(speculation, checkpoint, lease_seconds)
        self._source = restore
        self._warns_of_private_name = name is not None and restore is None and checkpoint is None
        self._tree: HostedTree | None = None
        self._early_claims: list[str] = []  # of layers that were made before init()
        self._finalizer: weakref.finalize | None = None
        self._group: run.Group | None = None
        self._member: run.Member | None = None

    # Beginning.

    def init(self, params: Any) -> Any:
        """Hosts the pytree's leaves; returns the parameters to train with.

        These are ``params``, or those of the optimizer that had the name before (``sync=``), or of a checkpoint
        (``restore=``); leaves that stream (``weights=``) have no elements.

        INVALID_ARGUMENT, UNIMPLEMENTED: a leaf that cannot be hosted; the sentence names it. FAILED_PRECONDITION: the
        optimizer of that name is of other parameters, or theirs differ.
        """
        if sys._getframe(1).f_globals.get("__name__", "").partition(".")[0] in _TAKE_TRANSFORMATIONS:
            raise Error(grpc.StatusCode.UNIMPLEMENTED, _NO_TRANSFORMATION)
        if self._finalizer is not None:
            raise Error(grpc.StatusCode.FAILED_PRECONDITION, "init() was called before; build another optimizer")
        hosted = HostedTree(params, self._trainable, self._groups.assign(params), self._weights)
        if hosted.gpu is not None:
            ffi.check_handlers()
        if any(leaf.streams for leaf in hosted.hosted):
            self._gpu_options.check_streams()
        self._group = processes.group()
        given = None if self._anonymous else self.name
        if self._group is not None:
            self.name = run.name_of_rank(self.name, self._group)
        self._connection = Connection(resolve_endpoint(self._endpoint))
        try:
            if self._group is not None:
                start_over = self._source is not None
                self._member = run.join(self._connection, self.name, given, self._group, start_over, self._seed)
            own = hosted.match(params, "params")
            attachment, others = run.all_or_none(
                self._group, "attach", lambda: attach(self._subject(hosted), own, self._sync, self._checkpoints())
            )
        except BaseException:
            self._connection.close()
            raise
        if self._warns_of_private_name and attachment.optimizer.step == 0:
            names.warn_of_private_name(self.name, self._connection.endpoint)
        self._own(hosted, attachment)
        if others:
            return self._read()
        params = hosted.without_streamed(params)
        self._live.keep(hosted.match(params, "params"))
        return params

    def _checkpoints(self) -> optimizer_pb2.RestoreOptimizerRequest | None:
        return None if self._source is None else optimizers.checkpoints(self._source)

    def _own(self, hosted: HostedTree, attachment: Attachment) -> None:
        self._tree, self._attachment = hosted, attachment
        for layer in self._early_claims:
            hosted.claim(layer)
        delete = self.name if self._anonymous else None
        self._finalizer = weakref.finalize(self, _end, self._connection, attachment, delete)
        self._finalizer.atexit = False
        atexit.register(self._finalizer)  # after a private daemon's own exit handler, so that it runs before it
        self._owner_pid = os.getpid()
        owner.own(self)
        residents = None
        if isinstance(attachment, GpuAttachment):
            try:
                residents = ResidentBuckets(attachment, self._gpu_options.resident_buckets, alone=self._group is None)
            except Error:
                self._finalizer()
                raise
        self._stepping = Stepping(attachment, hosted, self._groups, self._group, residents)
        on_gpu = None if hosted.gpu is None else self._stepping.published_on_gpu
        self._live = LiveParameters(attachment, hosted.hosted, on_gpu)

    def _subject(self, hosted: HostedTree) -> Subject:
        return Subject(
            self._connection,
            self.name,
            self._anonymous,
            self._algorithm,
            self._groups,
            hosted.hosted,
            self._policies,
            self._bucket_bytes,
            self._seed,
            self._member,
            hosted.gpu,
            self._gpu_options,
        )

    # Stepping.

    def step(self, gradients: Any, *, gradient_scale: Any = 1.0, params: Any = None) -> tuple[Any, StepResult]:
        """One optimizer step; returns the new parameters and the daemon's report. Also inside ``jax.jit``.

        Args:
            gradients: a pytree as that of ``init()``. A leaf that is None has no gradient: its parameter, its moments
                and its own step count stay. Gradients of frozen leaves are ignored.
            gradient_scale: what gradients are multiplied by, the inverse of a loss scale.
            params: the present parameters. Frozen leaves are taken from there; changed ones of the others are an
                error, as for ``finish()`` (on a GPU only outside of jit).

        Non-finite gradients skip the step, which ``report.kind`` says. Inside of jit the report's fields are arrays.
        Call it once in a jitted function, or in a loop there. Outside of it, this is ``finish(gradients)``.
        """
        if not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((gradients, params))):
            return self.finish(gradients, gradient_scale=gradient_scale, params=params)
        self.check_open()
        frozen = self.hosted_tree.frozen(params, traced=True)
        found = self.hosted_tree.match(gradients, "gradients")
        live = None if params is None else self.hosted_tree.match(params, "params")
        leaves, report = self._stepping.traced(found, gradient_scale, self.max_norm or 0.0, live)
        return self.hosted_tree.assemble(leaves, frozen), report

    def finish(
        self, gradients: Any = None, *, gradient_scale: float = 1.0, params: Any = None
    ) -> tuple[Any, StepResult]:
        """Ends the step that offloaded layers have begun; returns the new parameters and the daemon's report.

        ``gradients``: a pytree as that of ``init()``, of which the leaves that offloaded layers have handed over are
        ignored; see ``remaining()``. ``gradient_scale``: as for ``step()``. The parameters of a skipped step are those
        before it. After an error no step is open.

        ``params``: the present parameters; frozen leaves are taken from there. Without them it is not seen that the
        loop has changed some since the last step, and the daemon goes on from its own.

        FAILED_PRECONDITION: a parameter has no gradient, or had two, or was changed; nothing was committed.
        """
        self._check_attached()
        given = None if gradients is None else self.hosted_tree.match(gradients, "gradients")
        frozen = self.hosted_tree.frozen(params)
        live = None if params is None else self.hosted_tree.match(params, "params")
        check = None if live is None else functools.partial(self._live.check, live)
        result = self._stepping.finish(given, float(gradient_scale), self.max_norm or 0.0, check)
        return self._read(frozen), result

    def update(self, *_: Any, **__: Any) -> NoReturn:
        """What code calls that takes this for a transformation of Optax; raises Error that says what to do."""
        raise Error(grpc.StatusCode.UNIMPLEMENTED, _NO_TRANSFORMATION)

    def abandon(self) -> None:
        """Drops what was handed over since the last step, as after an exception in backward."""
        self._check_attached()
        self._stepping.abandon()

    def remaining(self, gradients: Any) -> Any:
        """``gradients`` with None for those that offloaded layers hand over: what to return from jit, for finish()."""
        self.check_open()
        return self.hosted_tree.remaining(gradients)

    @property
    def last_result(self) -> StepResult | None:
        """The daemon's report on the last step; None before the first one."""
        return None if self._finalizer is None else self._stepping.last_result

    @property
    def skipped_steps(self) -> dict[VerdictKind, int]:
        """How many steps were skipped, by reason."""
        self.check_open()
        return self._stepping.skipped_steps()

    # For offloaded layers.

    def claim(self, name: str) -> None:
        """An offloaded layer hands over the gradients of the leaves below ``name``."""
        if self._tree is None:
            self._early_claims.append(name)
        else:
            self._tree.claim(name)

    @property
    def hosted_tree(self) -> HostedTree:
        self.check_open()
        assert self._tree is not None
        return self._tree

    @property
    def submitter(self) -> int:
        """What calls of XLA name this optimizer by."""
        return self._attachment.trainer

    # Ending.

    def check_open(self) -> None:
        """Raises Error when there is nothing to hand gradients to."""
        if self._finalizer is None or not self._finalizer.alive:
            why = "call init(params) first" if self._finalizer is None else "the optimizer is closed; build a new one"
            raise Error(grpc.StatusCode.FAILED_PRECONDITION, why)

    def _check_attached(self) -> None:
        if self._finalizer is not None:
            owner.check_process(self._owner_pid)
        self.check_open()
        self._stepping.sync()

    def close(self) -> None:
        """Ends the attachment; an optimizer without a name is deleted. Parameters stay what they are."""
        if self._finalizer is not None and self._finalizer.alive:
            with contextlib.suppress(Error):  # of a daemon that is gone
                self._stepping.abandon()
            self._finalizer()

    def disown(self) -> None:
        """In a forked child: leaves the parent's optimizer alone."""
        if self._finalizer is not None:
            self._finalizer.detach()

    @property
    def metrics_address(self) -> str:
        """Where Prometheus reads the daemon's metrics: HOST:PORT; empty when nowhere."""
        return self._connection.server_info.metrics_address


def _end(connection: Connection, attachment: Attachment, delete: str | None) -> None:
    """Ends an attachment and deletes an optimizer that nobody can name."""
    attachment.close_trainer()
    attachment.end()
    attachment.leave_memory()
    if delete is not None:
        with contextlib.suppress(Error):  # it is gone, or the daemon is
            run.delete(connection, delete)
    connection.close()
