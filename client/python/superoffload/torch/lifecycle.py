"""Attaches an optimizer of this process to one in the daemon, and detaches it."""

import atexit
import contextlib
import dataclasses
import functools
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import torch

from superoffload._core import names, owner, policies, run, run_checkpoint
from superoffload._core.attachment import Attachment
from superoffload._core.control import Connection
from superoffload._core.daemon import resolve_endpoint
from superoffload._core.error import Error
from superoffload._core.optimizers import Directories, checkpoints
from superoffload.torch import cuda, groups, parameters
from superoffload.torch.algorithm import Algorithm
from superoffload.torch.attach import Attached, Backend, Gpu, Subject, attach
from superoffload.torch.fingerprint import digests
from superoffload.torch.guards import clip
from superoffload.torch.guards.clip_calls import ClipCalls
from superoffload.torch.hooks import weakly
from superoffload.torch.hosting import Loop, tensors_of
from superoffload.torch.live import LiveParameters
from superoffload.torch.overlap import Overlap
from superoffload.torch.ranks import sharding
from superoffload.torch.ranks.matrices import Matrices
from superoffload.torch.ranks.replicas import Replicas, gather_state
from superoffload.torch.ranks.shards import HostedParameter
from superoffload.torch.stepping import Stepping
from superoffload.torch.submitter import Given, Submitter
from superoffload.v1 import optimizer_pb2


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What the user asks for; the optimizers' documentation explains it."""

    name: str | None
    endpoint: str | None
    sync: policies.Sync
    restore: Directories | None
    policies: optimizer_pb2.Policies
    bucket_bytes: int
    seed: int | None  # None: 0, or the one that the optimizer has
    overlap: Overlap
    replicas: Any
    device: str | int | torch.device | None  # the GPU that parameters move to; None: they stay where they are


class Lifecycle:
    """One optimizer in the daemon after another, as `hosting.Hosting` describes it.

    It holds ``loop``, the optimizer, weakly. ``backend_of`` makes the `Backend` of a GPU, or of the CPU.
    """

    connection: Connection
    attachment: Attachment
    hosted: list[HostedParameter]
    live: LiveParameters
    submitter: Submitter
    stepping: Stepping

    def __init__(
        self,
        loop: Loop,
        algorithm: Algorithm,
        wanted: Wanted,
        backend_of: Callable[[torch.device | None], Backend],
    ) -> None:
        self._loop = weakref.ref(loop)
        self._wanted = wanted
        self._backend_of = backend_of
        self.algorithm = algorithm
        self.name = wanted.name or ""
        self.anonymous = wanted.name is None
        self.policies = wanted.policies
        self.bucket_bytes = wanted.bucket_bytes
        self.attached = False
        self.sharding: sharding.Sharding | None = None
        self.gpu: Gpu | None = None

    @property
    def loop(self) -> Loop:
        alive = self._loop()
        assert alive is not None, "the optimizer has its parts only while it lives"
        return alive

    @property
    def endpoint(self) -> str:
        return self.connection.endpoint

    @property
    def group(self) -> sharding.TorchGroup | None:
        return None if self.sharding is None else self.sharding.group

    def ranks(self) -> int:
        return 1 if self.sharding is None else self.sharding.group.ranks

    def trained(self) -> list[torch.nn.Parameter]:
        """The parameters that the daemon updates, or the daemons of all ranks that train them."""
        return [parameter.tensor for parameter in self.hosted] if self.sharding is None else self.sharding.trained

    # Beginning and ending.

    def begin(self, send_written_state: Callable[[], None], fill_state: Callable[[], None]) -> bool:
        """Hosts the parameters of the groups; returns whether the daemon had the optimizer already.

        ``send_written_state`` sends what the loop has written to ``optimizer.state``. ``fill_state`` fills that when
        another optimizer of the daemon has taken the place of this one.
        """
        self._send_written_state, self._fill_state = send_written_state, fill_state
        return self._begin()

    def _begin(self) -> bool:
        wanted, param_groups = self._wanted, self.loop.param_groups
        self.name = wanted.name or names.make_name()
        groups.check_whole(param_groups)
        self.sharding = sharding.sharding(
            param_groups, wanted.replicas, outlives=wanted.name is not None, matrices=self.algorithm.matrices
        )
        self._matrices = None
        if self.sharding is None:
            self.hosted = parameters.collect(param_groups, moves=wanted.device is not None)
        else:
            self.name = run.name_of_rank(self.name, self.sharding.group)
            self._matrices = Matrices(self.sharding.group, self.sharding.matrices, digests)
            divided = self.sharding.rows, self._matrices.of
            self.hosted = parameters.collect(param_groups, *divided, moves=wanted.device is not None)
            self._matrices.check_stay(wanted.device)
        first = self.hosted[0].tensor
        device = first.device if wanted.device is None else cuda.resolve(wanted.device)
        on_gpu = device if wanted.device is not None or cuda.is_on_gpu(first) else None
        self._backend = self._backend_of(on_gpu)
        self._is_on_gpu = on_gpu is not None
        self._replicas = None
        if self.sharding is not None and self._matrices is not None:
            self._replicas = Replicas(self.sharding, self._matrices, self._is_on_gpu, digests)
        clip.check_free(self.trained())
        self.connection = run.all_or_none(
            self.group,
            "reach its daemon",
            lambda: Connection(resolve_endpoint(wanted.endpoint, lambda: cuda.pci_address(on_gpu))),
        )
        try:
            source = None if wanted.restore is None else checkpoints(wanted.restore)
            self._member = self._join()
            if self._matrices is not None:
                self._matrices.gather_values()
            given = wanted.policies, source, wanted.bucket_bytes
            attached = attach(self.subject(), wanted.sync, *given, weakly(self.synchronize))
        except BaseException:
            self.connection.close()
            raise
        self._host(attached)
        return not attached.created

    def _join(self) -> run.Member | None:
        """Has all ranks of a run come to the same step."""
        if self.sharding is None:
            return None
        wanted = self._wanted
        start_over = wanted.restore is not None
        return run.join(self.connection, self.name, wanted.name, self.sharding.group, start_over, wanted.seed)

    def subject(self) -> Subject:
        return Subject(
            connection=self.connection,
            name=self.name,
            anonymous=self.anonymous,
            algorithm=self.algorithm,
            param_groups=self.loop.param_groups,
            hosted=self.hosted,
            backend=self._backend,
            seed=self._wanted.seed,
            member=self._member,
            replicas=self._replicas,
            group=self.group,
        )

    def _host(self, attached: Attached) -> None:
        """Has this optimizer be the one that was attached to."""
        self.attachment, self.live = attached.attachment, attached.live
        given = Given(
            hosted=self.hosted,
            overlap=self._wanted.overlap,
            prepare_step=functools.partial(_prepare_step, self._loop, self.algorithm, self.live, self.attachment),
            make_clipping=functools.partial(ClipCalls, alone=self.sharding is None),
            ranks=self.sharding,
            replicas=self._replicas,
            matrices=self._matrices,
        )
        self.submitter, self.gpu = self._backend.serve(self.attachment, given, self._send_written_state)
        self.attached = True
        self._built_of = [id(tensor) for tensor in tensors_of(self.loop)]
        send_groups = functools.partial(groups.send, self.algorithm, self.attachment)
        self.stepping = Stepping(self.attachment, self.live, self.submitter, send_groups, self.gpu)
        clip.register(self.loop, self.trained())
        self._owner_pid = os.getpid()
        self._finalizer = weakref.finalize(
            self, _end, self.connection, self.attachment, self.name if self.anonymous else None
        )
        self._finalizer.atexit = False
        # After a private daemon's own exit handler, so that it runs before it.
        atexit.register(_at_exit, self._finalizer, weakref.ref(self.attachment))

    def _follow_replaced(self) -> None:
        """accelerate shards a model after its optimizer was built, and puts the shards into the parameter groups."""
        present = [id(tensor) for tensor in tensors_of(self.loop)]
        if present[: len(self._built_of)] == self._built_of:  # what has been added comes behind
            return
        if set(self._built_of) < set(present):
            raise parameters.has_grown()
        if self.committed_steps() > 0:
            raise Error(
                grpc.StatusCode.FAILED_PRECONDITION,
                "somebody has replaced parameters in the parameter groups after the first step; build a new optimizer",
            )
        self._release_model()
        self.live.close()
        self.loop.state.clear()
        self._finalizer.detach()
        _end(self.connection, self.attachment, self.name)
        self._begin()
        self._fill_state()

    def is_plain(self) -> bool:
        return self.anonymous and not self._is_on_gpu and self.sharding is None

    def replace_by(self, subject: Subject, attached: Attached) -> None:
        before, self.connection = self.stepping, subject.connection
        self.close()  # deletes the one before
        self.name, self.hosted = subject.name, subject.hosted
        self._host(attached)
        self.stepping.continue_from(before)

    def close(self) -> None:
        """Ends the attachment; an optimizer without a name is deleted."""
        if self.gpu is not None:
            self.gpu.before_close()
        self._release_model()
        self._finalizer()
        self.live.close()

    def disown(self) -> None:
        """In a forked child: hooks and finalizers leave the parent's optimizer alone."""
        self._finalizer.detach()
        self._release_model()

    def _release_model(self) -> None:
        self.attached = False
        self.stepping.close()
        if self.gpu is not None:
            self.gpu.close()
        clip.unregister(self.trained())

    # While it is attached.

    def check_attached(self) -> None:
        if not self.attached:
            owner.check_process(self._owner_pid)
            raise Error(grpc.StatusCode.FAILED_PRECONDITION, "the optimizer is closed; build a new one")
        self.stepping.settle()
        if self.gpu is not None:
            self.gpu.check_present()
        self._follow_replaced()

    def release(self) -> None:
        """The GPU has no memory of it, until `resume`. No gradient may be there."""
        if self._is_released():
            return
        self.check_attached()
        if self.submitter.has_gradients():
            raise Error(
                grpc.StatusCode.FAILED_PRECONDITION,
                "there are gradients, and the memory that they were computed in is to go; call step() or zero_grad() "
                "before release()",
            )
        self.check_parameters()
        if self.gpu is not None:
            self.gpu.release(self.quiesce)

    def resume(self) -> None:
        if self.gpu is not None and self._is_released():
            self.gpu.resume(self.quiesce)
        else:
            self.check_attached()

    def _is_released(self) -> bool:
        return self.attached and self.gpu is not None and self.gpu.is_released

    def check_unfrozen(self) -> None:
        """Raises Error when a parameter that the daemon does not update has a gradient."""
        parameters.check_unfrozen(self.loop.param_groups, self.trained(), self._built_of)

    def quiesce(self) -> None:
        self.stepping.abandon()
        if self.gpu is not None:
            self.gpu.wait_over()
            self.gpu.synchronize()

    def synchronize(self) -> None:
        if self.gpu is not None:
            self.gpu.synchronize()

    def committed_steps(self) -> int:
        return self.stepping.committed_steps()

    def check_parameters(self) -> None:
        self.stepping.check_parameters()

    def changed_parameters(self) -> list[str]:
        return self.live.changed()

    def push_parameters(self) -> None:
        self.live.push()
        self.live.keep()

    def pull_parameters(self) -> None:
        self.live.pull()

    def gather_state(self, by_tensor: dict[int, dict[str, torch.Tensor]], keys: Sequence[str]) -> None:
        if self.sharding is not None and self._matrices is not None:
            gather_state(self.sharding, self._matrices, by_tensor, keys)

    def gather_loaded(self, by_tensor: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
        return {} if self._matrices is None else self._matrices.gather_state(by_tensor)

    def load(self, source: optimizer_pb2.RestoreOptimizerRequest) -> None:
        run_checkpoint.restore(self.group, self._member, functools.partial(self._load_detached, source))
        self.stepping.restored()
        self.live.bind()

    def _load_detached(self, source: optimizer_pb2.RestoreOptimizerRequest) -> None:
        with self.attachment.detached():
            self.subject().restore(source)


def _prepare_step(
    loop: "weakref.ref[Loop]", algorithm: Algorithm, live: LiveParameters, attachment: Attachment
) -> None:
    """The open step begins: published parameters are those of the last one, and hyper-parameters those of now."""
    alive = loop()
    assert alive is not None, "its optimizer has submitters only while it lives"
    live.before_step()
    groups.send(algorithm, attachment, alive.param_groups)


def _end(connection: Connection, attachment: Attachment, delete: str | None) -> None:
    """Ends an attachment and deletes an optimizer that nobody can name."""
    attachment.end()
    attachment.give_values_back()
    if delete is not None:
        with contextlib.suppress(Error):  # it is gone, or the daemon is
            run.delete(connection, delete)
    connection.close()


def _at_exit(finalizer: weakref.finalize, attachment: "weakref.ref[Attachment]") -> None:
    """Nobody computes with the model any more."""
    alive = attachment()
    if alive is not None:
        alive.values_back = None
    finalizer()
