"""Where an optimizer of this process begins and ends to be one of the daemon."""

import atexit
import contextlib
import functools
import weakref
from collections.abc import Callable
from typing import Any

import grpc

from superoffload._core import names, policies, run
from superoffload._core.attachment import Attachment
from superoffload._core.control import Connection
from superoffload._core.daemon import resolve_endpoint
from superoffload._core.error import Error
from superoffload._core.gpu_attachment import GpuAttachment
from superoffload._core.hosting import Directories, checkpoints
from superoffload.torch import groups, options, parameters
from superoffload.torch.attach import Attached, Subject, attach
from superoffload.torch.gpu import cuda
from superoffload.torch.gpu.forward import ForwardWaits
from superoffload.torch.gpu.options import GpuOptions
from superoffload.torch.gpu.report import GpuReporter
from superoffload.torch.gpu.residents import Residents
from superoffload.torch.gpu.submitter import GpuSubmitter
from superoffload.torch.growing import Growing
from superoffload.torch.guards import clip
from superoffload.torch.host_submitter import HostSubmitter
from superoffload.torch.ranks import sharding
from superoffload.torch.ranks.replicas import Replicas
from superoffload.torch.stepping import Stepping
from superoffload.torch.submitter import Submitter


class Attaching(Growing):
    """The part of the optimizers that begins and ends attachments."""

    _forward_waits: ForwardWaits | None
    _residents: Residents | None

    def _begin_hosting(
        self,
        name: str | None,
        endpoint: str | None,
        sync: policies.Sync,
        restore: Directories | None,
        gpu: GpuOptions,
        replicas: Any,
    ) -> bool:
        """Hosts the parameters of the groups; returns whether the daemon had the optimizer already."""
        self.name = name or names.make_name()
        options.check_whole(self.param_groups)
        self._sharding = sharding.sharding(self.param_groups, replicas, outlives=name is not None)
        if self._sharding is not None:
            self.name = run.name_of_rank(self.name, self._sharding.group)
        self._hosted = parameters.collect(self.param_groups, self._sharding, moves=gpu.device is not None)
        device = self._hosted[0].tensor.device if gpu.device is None else cuda.resolve(gpu.device)
        self._gpu = gpu if gpu.device is not None or cuda.is_on_gpu(self._hosted[0].tensor) else None
        self._replicas = None if self._sharding is None else Replicas(self._sharding, on_gpu=self._gpu is not None)
        clip.check_free(self.hosted_parameters())
        self._device = None if self._gpu is None else device
        self._connection = run.together(
            None if self._sharding is None else self._sharding.group,
            lambda: Connection(resolve_endpoint(endpoint, lambda: cuda.pci_address(self._device))),
        )
        synchronize = _weak(weakref.WeakMethod(self.synchronize))
        try:
            source = None if restore is None else checkpoints(restore)
            self._agree(name, start_over=restore is not None)
            given = self._policies, source, self._bucket_bytes
            attached = attach(self._subject(), sync, *given, synchronize)
        except BaseException:
            self._connection.close()
            raise
        self._host(attached)
        return not attached.created

    def _follow_replaced(self) -> None:
        """accelerate shards a model after its optimizer was built, and puts the shards into the parameter groups."""
        present = [id(tensor) for tensor in self._all_parameters()]
        if present[: len(self._built_of)] == self._built_of:  # what has been added comes behind
            return
        if set(self._built_of) < set(present):
            raise parameters.has_grown()
        if self._committed_steps() > 0:
            raise Error(
                grpc.StatusCode.FAILED_PRECONDITION,
                "somebody has replaced parameters in the parameter groups after the first step; build a new optimizer",
            )
        self._release_model()
        self._live.close()
        self.state.clear()
        self._finalizer.detach()
        _end(self._connection, self._attachment, self.name)
        self._begin(self)
        self._fill_state()

    def _host(self, attached: Attached) -> None:
        """Has this optimizer be the one that was attached to."""
        self._attachment, self._live = attached.attachment, attached.live
        prepare_step = weakref.WeakMethod(self._prepare_step)
        given = self._hosted, self._overlap, prepare_step, self._sharding, self._replicas
        gpu = attached.attachment if isinstance(attached.attachment, GpuAttachment) else None
        self._gpu_attachment = gpu
        self._submitter: Submitter
        if gpu is None or self._gpu is None:
            self._submitter = HostSubmitter(self._attachment, *given)
        else:
            self._forward_waits = ForwardWaits(gpu, self._hosted)
            self._submitter = GpuSubmitter(
                gpu, *given, self._forward_waits, weakref.WeakMethod(self._send_written_state)
            )
            self._residents = Residents(gpu, self._gpu, alone=self._sharding is None)
            self._reporter = GpuReporter(gpu, attached.cast_timings)
            self._reporter.report()
        self._attached = True
        self._built_of = [id(tensor) for tensor in self._all_parameters()]
        send_groups = functools.partial(groups.send, self.algorithm, self._attachment)
        self._stepping = Stepping(self._attachment, self._live, self._submitter, send_groups, self._forward_waits)
        clip.register(self, self.hosted_parameters())
        self._finalizer = weakref.finalize(
            self, _end, self._connection, self._attachment, self.name if self._anonymous else None
        )
        self._finalizer.atexit = False
        atexit.register(self._finalizer)  # after a private daemon's own exit handler, so that it runs before it

    def _subject(self) -> Subject:
        groups, hosted = self.param_groups, self._hosted
        return Subject(
            connection=self._connection,
            name=self.name,
            anonymous=self._anonymous,
            algorithm=self.algorithm,
            param_groups=groups,
            hosted=hosted,
            gpu=self._gpu,
            device=self._device,
            member=self._member,
            replicas=self._replicas,
            group=None if self._sharding is None else self._sharding.group,
        )

    def _agree(self, name: str | None, start_over: bool) -> None:
        """Has all ranks of a run come to the same step."""
        self._member = None
        if self._sharding is None:
            return
        self._member = run.join(self._connection, self.name, name, self._sharding.group, start_over)

    def _release_model(self) -> None:
        self._attached = False
        self._stepping.close()
        if self._forward_waits is not None:
            self._forward_waits.close()
        clip.unregister(self.hosted_parameters())


def _weak(method: weakref.WeakMethod) -> Callable[[], None]:
    """Calls it as long as its object lives."""

    def call() -> None:
        alive = method()
        if alive is not None:
            alive()

    return call


def _end(connection: Connection, attachment: Attachment, delete: str | None) -> None:
    """Ends an attachment and deletes an optimizer that nobody can name."""
    attachment.end()
    if delete is not None:
        with contextlib.suppress(Error):  # it is gone, or the daemon is
            run.delete(connection, delete)
    connection.close()
