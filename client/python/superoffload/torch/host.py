"""A model whose parameters are in the CPU's memory: its parameters, who submits its gradients, and how it attaches."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import grpc
import torch

from superoffload._core import memory
from superoffload._core.attachment import Attachment, Piece
from superoffload._core.error import Error
from superoffload._core.gradient_memory import GradientMemory
from superoffload._core.step_result import StepResult
from superoffload.torch import parameters
from superoffload.torch.attach import Subject
from superoffload.torch.live import LiveParameters, Replicas
from superoffload.torch.ranks.shards import DATA_TYPES, HostedParameter
from superoffload.torch.submitter import Given, Submitter
from superoffload.v1 import optimizer_pb2


class HostParameters(LiveParameters):
    """On the CPU they are the model's own tensors, wherever it put them; digests tell whether they changed."""

    def __init__(self, hosted: list[HostedParameter], attachment: Attachment, replicas: Replicas | None) -> None:
        super().__init__(hosted, attachment)
        self._digests: list[int] = []
        self._replicas = replicas

    def before_step(self) -> None:
        pass  # the digests are there

    def on_commit(self) -> None:
        # Of those without a gradient nothing was written, and a graph that has saved them can still be used.
        self._receive([parameter.local for parameter in self.hosted if parameter.has_gradient])

    def bind(self) -> None:
        self._receive([parameter.local for parameter in self.hosted])

    def _receive(self, written: list[torch.Tensor]) -> None:
        """Sets the model's parameters to the published ones; ``written``: those in which that may change something."""
        ranges: list[memory.Range] = []
        scattered = []
        for parameter in self.hosted:
            tensor, theta = parameter.local, parameter.theta
            copies = tensor.is_contiguous()
            if not copies:
                scattered.append((tensor, theta))
            ranges.append((theta.data_ptr(), tensor.data_ptr() if copies else None, theta.nbytes))
        self._digests = self.attachment.receive(ranges)
        for tensor, theta in scattered:
            tensor.data.copy_(theta)
        torch.autograd.graph.increment_version(written)
        if self._replicas is not None:
            self._replicas.gather()

    def to_published(self) -> None:
        if self._replicas is not None:
            self._replicas.check_values()
            self._replicas.gather_whole()
        for parameter in self.hosted:
            parameter.theta.copy_(parameter.local.detach())

    def from_published(self) -> None:
        self.bind()

    def close(self) -> None:
        pass

    def keep(self) -> None:
        self._digests = self._digests_now()
        if self._replicas is not None:
            self._replicas.keep()

    def changed(self) -> list[str]:
        now = zip(self.hosted, self._digests, self._digests_now(), strict=True)
        changed = [parameter.name for parameter, then, digest in now if then != digest]
        if self._replicas is not None:
            changed += [name for name in self._replicas.changed() if name not in changed]
        return changed

    def _digests_now(self) -> list[int]:
        tensors = [parameter.local.detach().contiguous() for parameter in self.hosted]  # itself where it is
        ranges = [(tensor.data_ptr(), None, tensor.nbytes) for tensor in tensors]
        return memory.copy_and_digest(ranges, torch.get_num_threads())


def _piece(index: int, gradient: torch.Tensor) -> Piece:
    return gradient.data_ptr(), 0, gradient.numel(), index, DATA_TYPES[gradient.dtype]


class HostSubmitter(Submitter):
    """Gradients are copied to a slot that the daemon shares; ``.grad`` stays the loop's own tensor.

    torch copies them: its threads are there, and would be in the way of others.
    """

    def reset(self) -> None:
        super().reset()
        self._late = False
        self._present: set[int] = set()  # indices of gradients that were taken
        self._digests: dict[int, int] = {}  # of those that are not in the slot, or were scaled since
        self._slot = self.attachment.look().next_slot

    def on_late_gradient(self, index: int) -> None:
        self._late = True  # the daemon may be reading the slot: it is submitted again in step()

    def _gradient(self, index: int) -> torch.Tensor:
        gradient = self.averages.get(index, self.hosted[index].gradient)
        assert gradient is not None, "what was taken and has gone since is outdated"
        return gradient.contiguous()  # itself where it is

    @torch.no_grad()
    def take(self, index: int) -> None:
        gradient, hosted = self.averages.get(index, self.hosted[index].gradient), self.hosted[index]
        if gradient is None:
            return
        if gradient.dtype != hosted.slots[0].dtype and hosted.local.dtype == hosted.theta.dtype:
            raise Error(  # else that is what is told
                grpc.StatusCode.FAILED_PRECONDITION,
                f"the gradient of {hosted.name} is {gradient.dtype}, but was to be {hosted.slots[0].dtype} when the "
                "optimizer was built; set grad_dtype before, or build a new optimizer",
            )
        self._present.add(index)
        if not (self.finishing or self.policy.early):  # it is handed over later
            self._digests |= self._digests_of([index])

    def _digests_of(self, indices: Iterable[int]) -> dict[int, int]:
        gradients = {index: self._gradient(index) for index in indices}
        ranges: list[memory.Range] = [(gradient.data_ptr(), None, gradient.nbytes) for gradient in gradients.values()]
        return dict(zip(gradients, memory.copy_and_digest(ranges, torch.get_num_threads()), strict=True))

    @torch.no_grad()
    def hand_over(self, indices: Sequence[int]) -> None:
        for index in indices:
            slot = self.hosted[index].slots[self._slot]
            slot.copy_(self.averages.get(index, self.hosted[index].gradient))
            self.attachment.hand_over([_piece(index, slot)])

    def outdated(self) -> bool:
        return self._late or any(self.hosted[i].has_gradient != (i in self._present) for i in self.taken)

    @torch.no_grad()
    def find_edited(self) -> str | None:
        now = self._digests_of(self._digests)
        different = [index for index, digest in self._digests.items() if digest != now[index]]
        if not different:
            in_slot = {index: self._gradient(index) for index in self._present - self._digests.keys()}
            found = self.attachment.find_edited([_piece(*item) for item in in_slot.items()])
            different = [] if found is None else [list(in_slot)[found]]
        return self.hosted[different[0]].name if different else None

    def scale(self, factor: float) -> bool:
        """The slots keep what was submitted, for the daemon and its successors."""
        self.multiply(factor)
        if self._present:
            self._digests = self._digests_of(self._present)
        return bool(self._present) or self.gave_to_others

    def wait_end(self) -> StepResult:
        result = self.attachment.wait_verdict()
        if result.kind.skipped:
            self.attachment.wait_over()  # else whoever receives the parameters waits for them
        return result


def _view(buffer: Any, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    return torch.frombuffer(buffer, dtype=dtype, count=shape.numel()).view(shape)


def _map_views(hosted: list[HostedParameter], attachment: Attachment) -> None:
    """Fills in where each parameter and its gradients lie."""
    for parameter, placement in zip(hosted, attachment.optimizer.layout.placements, strict=True):
        tensor = parameter.local
        published = attachment.parameters(placement.parameters_offset, tensor.nbytes)
        parameter.buckets = parameters.buckets_of(placement)
        parameter.theta = _view(published, tensor.dtype, tensor.shape)
        dtype = parameter.gradient_dtype
        parameter.slots = tuple(
            _view(attachment.gradients(offset, tensor.numel() * dtype.itemsize), dtype, tensor.shape)
            for offset in placement.gradient_offsets
        )


class HostBackend:
    """A `Backend` (attach.py, lifecycle.py)."""

    casts_gradients = False
    streams = False
    weights: Mapping[str, torch.Tensor] | None = None

    def check(self, subject: Subject) -> None:
        pass

    def choose_cast(self, hosted: list[HostedParameter], bucket_bytes: int) -> bool:
        return False

    def gradient_memories(self, subject: Subject, bucket_bytes: int, casts: bool) -> Iterator[GradientMemory]:
        yield GradientMemory()

    def map(
        self, subject: Subject, request: optimizer_pb2.AttachOptimizerRequest, synchronize: Callable[[], None]
    ) -> tuple[Attachment, LiveParameters]:
        attachment = Attachment(subject.connection, request, torch.get_num_threads())
        _map_views(subject.hosted, attachment)
        return attachment, HostParameters(subject.hosted, attachment, subject.replicas)

    def serve(
        self, attachment: Attachment, given: Given, send_written_state: Callable[[], None]
    ) -> tuple[Submitter, None]:
        return HostSubmitter(attachment, given), None
