"""A model's parameters on a GPU: views of the memory that the published ones are copied to.

What torch writes to them changes their versions. What is written behind torch's back is found by canaries
(guards/canaries.py).
"""

import weakref
from collections.abc import Callable

import grpc
import torch

from superoffload._core.error import Error
from superoffload._core.gpu_attachment import GpuAttachment
from superoffload.torch import cuda
from superoffload.torch.gpu.published import published_of
from superoffload.torch.gpu.resident_masters import ResidentMasters
from superoffload.torch.gpu.state_dicts import StateDicts
from superoffload.torch.gpu.streamed_values import StreamedValues
from superoffload.torch.guards import noted_masters
from superoffload.torch.guards.canaries import Canaries
from superoffload.torch.live import LiveParameters, Replicas, alike
from superoffload.torch.ranks import host_mesh, shards
from superoffload.torch.ranks.shards import HostedParameter


class GpuParameters(LiveParameters):
    """``synchronize`` has the current stream wait for the parameters of the last step.

    A parameter that several ranks have whole is no view: of the rows that this rank hosts, those that were published
    are copied to it, and ``replicas`` brings the others, as soon as the step is committed.
    """

    attachment: GpuAttachment

    def __init__(
        self,
        hosted: list[HostedParameter],
        attachment: GpuAttachment,
        synchronize: Callable[[], None],
        replicas: Replicas | None = None,
    ) -> None:
        super().__init__(hosted, attachment)
        self._synchronize = synchronize
        self._replicas = replicas
        self._views = [index for index, parameter in enumerate(hosted) if parameter.rows is None]
        self._versions: dict[int, tuple[int, int]] = {}
        self._addresses = [parameter.theta.data_ptr() for parameter in hosted]
        self._in_place = attachment.optimizer.layout.in_place  # parameters are published over their gradients
        self._canaries = Canaries(hosted, attachment)
        if self._in_place:
            parameters = [parameter.theta for parameter in hosted]
            device, canaries = hosted[0].tensor.device, self._canaries
            noted = noted_masters.NotedMasters(attachment, parameters, canaries.owners, canaries.places, device)
            canaries.note_instead, canaries.know_better = noted.note, noted.write
        self._noted = False  # canaries of the last step
        self._masters = ResidentMasters(attachment, hosted[0].tensor.device)
        self._resident_changes = attachment.resident_changes
        self._streamed = StreamedValues(hosted, attachment, host_mesh.like_on_host)
        for tensor in self._streamed.tensors.values():
            host_mesh.prepare(tensor)
        self._state_dicts = StateDicts(self._streamed.tensors, self._streamed)
        attachment.on_successor = weakref.WeakMethod(self._on_successor)

    def _on_successor(self) -> None:
        """What residents had ahead of the published parameters is published now; a step that is open goes on."""
        self._look_at_residents()
        self._canaries.note_published()

    def before_step(self) -> None:
        if not self._noted:
            self.attachment.wait_over()
            self._accept_same_bits()
            self._canaries.note_published()
            self._noted = True

    def _look_at_residents(self) -> None:
        if self._resident_changes == self.attachment.resident_changes:
            return
        self._resident_changes = self.attachment.resident_changes
        self._masters = ResidentMasters(self.attachment, self.hosted[0].tensor.device)
        if not self._in_place:
            self._canaries.know_better = self._masters.find(self._canaries.places).write

    def _published(self, index: int) -> torch.Tensor:
        """What a parameter is since the last step: flat, on the CPU."""
        tensor, placement = self.hosted[index].local, self.attachment.optimizer.layout.placements[index]
        if self._in_place:
            return noted_masters.values_of(self.attachment, index, tensor)
        published = published_of(self.attachment, index, tensor).view(-1).clone()
        for elements, values in self._masters.of(placement.parameters_offset, tensor):
            published[elements] = values.cpu()
        return published

    def _accept_same_bits(self) -> None:
        """Whoever wrote parameters and has brought them back, as an evaluation of averaged weights does."""
        self._look_at_residents()
        written = self._written()
        if written:
            self._synchronize()
        for index in written:
            parameter = self.hosted[index]
            tensor, theta = parameter.local, parameter.theta
            if not alike(tensor, theta) or not tensor.is_contiguous() or theta.data_ptr() != self._addresses[index]:
                continue
            if self._streamed.has(index) and tensor.data_ptr() == theta.data_ptr():
                self._streamed.forget_if_same(index, self._published(index))
                continue  # in its slot may be another
            if torch.equal(tensor.detach().cpu().view(-1).view(torch.uint8), self._published(index).view(torch.uint8)):
                if tensor.data_ptr() != theta.data_ptr():
                    if shards.is_sharded(parameter.tensor):
                        continue
                    if not self._streamed.has(index):
                        theta.copy_(tensor.detach())
                    tensor.data = theta
                self._versions[index] = self._counts(index)

    def on_commit(self) -> None:
        self._noted = False
        if self._replicas is not None and self._replicas.has_any():
            self._synchronize()
            self._share()

    def _share(self) -> None:
        """The published rows of parameters that several ranks have become theirs, on all of them."""
        if self._replicas is None or not self._replicas.has_any():
            return
        for parameter in self.hosted:
            if parameter.rows is not None:
                parameter.local.detach().copy_(parameter.theta)
        self._replicas.gather()

    def _check_shards(self) -> None:
        """Raises Error for a shard that somebody has given other memory, which FSDP gathers then."""
        for index in self._views:
            parameter = self.hosted[index]
            if shards.is_sharded(parameter.tensor) and parameter.local.data_ptr() != self._addresses[index]:
                raise Error(
                    grpc.StatusCode.FAILED_PRECONDITION,
                    f"the shard of parameter {parameter.name} lies elsewhere than when the optimizer was built; build "
                    "a new optimizer after replacing it",
                )

    def move_in(self) -> None:
        self._share()
        self.keep()  # move.py

    def bind(self) -> None:
        self._share()
        self.keep()

    def push_first(self) -> None:
        if self._replicas is not None:
            self._replicas.check_values()
        self.publish()  # the attach has copied them

    def to_published(self) -> None:
        self._check_shards()
        if self._replicas is not None:
            self._replicas.check_values()
        self._streamed.to_published(set(self._written()))
        for index, parameter in enumerate(self.hosted):
            if parameter.local.data_ptr() != parameter.theta.data_ptr() and not self._streamed.has(index):
                parameter.theta.copy_(parameter.local.detach())
        self.attachment.push(cuda.current_stream(self.hosted[0].tensor))

    def from_published(self) -> None:
        self._streamed.forget_loaded()
        self.attachment.pull()
        self.bind()

    def keep(self) -> None:
        self._check_shards()
        for index in self._views:
            parameter = self.hosted[index]
            if parameter.local.data_ptr() != parameter.theta.data_ptr():  # its bits are there, since push()
                parameter.tensor.data = parameter.theta
        self._versions = {index: self._counts(index) for index in self._views}
        if self._replicas is not None:
            self._replicas.keep()
        self._noted = False

    def begin_check(self) -> Callable[[], None]:
        find_different = self._begin_comparison()
        return lambda: self.check_unchanged(lambda: self._find_changed(find_different))

    def changed(self) -> list[str]:
        return self._find_changed(self._begin_comparison())

    def _begin_comparison(self) -> Callable[[], list[int]]:
        self.before_step()
        self._synchronize()
        self._look_at_residents()
        return self._canaries.begin_comparison()

    def _find_changed(self, find_different: Callable[[], list[int]]) -> list[str]:
        if written := self._written():
            return [self.hosted[index].name for index in written]
        changed = [self.hosted[index].name for index in find_different()]
        return changed + ([] if self._replicas is None else self._replicas.changed())

    def _counts(self, index: int) -> tuple[int, int]:
        """Versions of a DTensor, and of the part that this rank has: each counts only what is written to itself."""
        return self.hosted[index].tensor._version, self.hosted[index].local._version

    def _written(self) -> list[int]:
        """Indices of parameters that somebody has written through torch, or replaced."""
        loaded = self._streamed.loaded()
        return [
            index
            for index in self._views
            if index in loaded
            or self._counts(index) != self._versions[index]
            or self.hosted[index].local.data_ptr() != self._addresses[index]
        ]

    def close(self) -> None:
        """The model's parameters stay where they are: copies of them may not fit. Those that stream are on the CPU."""
        self.attachment.on_successor = lambda: None
        del self._canaries
        self._state_dicts.close()
        self._streamed.close()
        for parameter in self.hosted:
            del parameter.theta
        self.attachment.leave_memory()
