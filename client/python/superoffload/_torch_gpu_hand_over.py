"""Hands gradients over that are on a GPU."""

import weakref
from collections.abc import Callable

import grpc
import torch

from superoffload import _torch_gpu, _torch_warn
from superoffload._attachment import StepResult
from superoffload._error import Error
from superoffload._gpu_attachment import GpuAttachment
from superoffload._torch_fingerprint import fingerprint, first_difference
from superoffload._torch_hand_over import HandOver
from superoffload._torch_overlap import Overlap
from superoffload._torch_parameters import DATA_TYPES, HostedParameter, buckets_of
from superoffload._torch_tombstone import Tombstones
from superoffload.v1 import optimizer_pb2


def bucket_pieces(layout: optimizer_pb2.Layout, hosted: list[HostedParameter]) -> list[list[tuple[int, int, int, int]]]:
    """Per bucket, ascending: parameter, its first element that is in the bucket, where in the bucket, how many."""
    pieces: list[list[tuple[int, int, int, int]]] = [[] for _ in layout.buckets]
    for index, (parameter, placement) in enumerate(zip(hosted, layout.placements, strict=True)):
        for number in buckets_of(placement):
            bucket = layout.buckets[number]
            begin = max(placement.state_offset, bucket.state_offset)
            end = min(placement.state_offset + parameter.tensor.numel(), bucket.state_offset + bucket.elements)
            pieces[number].append((index, begin - placement.state_offset, begin - bucket.state_offset, end - begin))
    for bucket_list in pieces:
        bucket_list.sort(key=lambda piece: piece[2])
    return pieces


def _make_hook(hand_over: "weakref.ref[GpuHandOver]", index: int) -> Callable[[torch.Tensor], None]:
    def hook(_: torch.Tensor) -> None:
        alive = hand_over()
        if alive is not None:
            alive.before_gradient(index)

    return hook


class GpuHandOver(HandOver):
    """Gradients stay where autograd put them until their bucket is complete; then one kernel packs it, and they go.

    A tombstone takes the place of a gradient that has gone early: NaN, expanded to the parameter's shape. What writes
    to it raises, what reads it sees NaN. ``step()`` makes it None. A gradient that goes in ``step()`` stays, as in
    torch, and so does any under a GradScaler, which looks at it.
    """

    def __init__(
        self,
        attachment: GpuAttachment,
        hosted: list[HostedParameter],
        overlap: Overlap,
        prepare_step: weakref.WeakMethod,
    ) -> None:
        self._streams = [0] * len(hosted)  # on which the gradient was taken
        self._keeps_gradients = False
        self._tolerated_writes = 0  # per gradient, of those that are known to have kept its value
        self._tombstones = Tombstones()
        self._left: dict[int, tuple[int, int]] = {}  # address and version of gradients that stayed after the last step
        self._lost: set[int] = set()  # whose gradients had gone when their step was abandoned
        super().__init__(attachment, hosted, overlap, prepare_step)
        self._pieces = bucket_pieces(attachment.optimizer.layout, hosted)
        self._handles += [
            parameter.tensor.register_hook(_make_hook(weakref.ref(self), index))
            for index, parameter in enumerate(hosted)
        ]

    def _reset(self) -> None:
        super()._reset()
        self._handed_over: set[int] = set()  # buckets of the open step
        self._versions: dict[int, tuple[int, int]] = {}  # address and version of gradients that were taken
        self._gone: set[int] = set()  # of these, those that a tombstone stands for
        self._fingerprints: dict[int, torch.Tensor] = {}  # of those that must be the same in step(), to the bit
        self._late = False

    def on_grad_scaler(self, used: bool) -> None:
        """A GradScaler looks at the gradients in step(), and rewrites each once with the same value."""
        self._keeps_gradients |= used
        self._tolerated_writes = int(used)

    def before_gradient(self, index: int) -> None:
        """Autograd is about to accumulate a gradient of parameter `index`."""
        gradient = self._hosted[index].tensor.grad
        if gradient is None:
            return
        if self._policy.is_first(index) and self._left.get(index) == (gradient.data_ptr(), gradient._version):
            if self._policy.on:
                self._policy.turn_off()
                _torch_warn.warn(
                    f"the gradient of {self._hosted[index].name} goes on from the step before: from now on gradients "
                    "are handed over in step(), without overlap with backward (zero_grad() keeps it)"
                )
        elif self._tombstones.is_one(gradient):
            self._policy.on_surprise()
            self.abandon()
            self._lost.clear()  # said here
            raise Error(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"{self._hosted[index].name} got another gradient after its first ones had left the GPU: this "
                "step runs more backward passes than those before. It was abandoned; call zero_grad() and compute its "
                "gradients again, or build the optimizer with overlap=False if the number of backward passes changes",
            )

    def on_gradient(self, index: int) -> None:
        self._lost.discard(index)
        super().on_gradient(index)

    def _on_late_gradient(self, index: int) -> None:
        self._late = True

    def has_gradients(self) -> bool:
        if lost := [self._hosted[i].name for i in sorted(self._lost) if self._hosted[i].tensor.grad is None]:
            raise _gone(lost[0])
        return super().has_gradients()

    def _take(self, index: int) -> None:
        tensor = self._hosted[index].tensor
        if tensor.grad is None:
            return
        if not tensor.grad.is_contiguous():
            tensor.grad = tensor.grad.contiguous()
        self._streams[index] = _torch_gpu.current_stream(tensor)
        self._versions[index] = tensor.grad.data_ptr(), tensor.grad._version
        if self._policy.watched or (self._asked_for_norm and not self._policy.early):
            self._fingerprints[index] = fingerprint(tensor.grad)

    def _goes(self, index: int) -> bool:
        """Whether the gradient's memory is given back once handed over; of one element a tombstone is no guard."""
        if self._finishing or self._keeps_gradients or self._hosted[index].tensor.numel() == 1:
            return False
        return self._handed_over.issuperset(self._hosted[index].buckets)

    def _outdated(self) -> bool:
        return self._late or any((self._hosted[i].tensor.grad is None) == (i in self._versions) for i in self._taken)

    def _find_edited(self) -> str | None:
        self._tombstones.check()
        for index, (address, version) in self._versions.items():
            gradient = self._hosted[index].tensor.grad
            if index in self._gone:
                if not self._tombstones.is_one(gradient):
                    self.abandon()
                    raise Error(
                        grpc.StatusCode.FAILED_PRECONDITION,
                        f"a gradient of {self._hosted[index].name} was set after that from backward had left the GPU; "
                        "call zero_grad() and compute the gradients again, and build the optimizer with overlap=False "
                        "if gradients are changed between backward and step",
                    )
                continue
            edited = gradient.data_ptr() != address
            edited |= gradient._version not in (version, version + self._tolerated_writes)
            if edited:
                return self._hosted[index].name
        now = [fingerprint(self._hosted[index].tensor.grad) for index in self._fingerprints]
        found = first_difference(list(self._fingerprints.values()), now)
        return None if found is None else self._hosted[list(self._fingerprints)[found]].name

    def abandon(self) -> None:
        if self._begun and not self._attachment.step_is_open():  # the daemon died, and the step with it
            self._begun = False
        for index in self._gone:
            if self._tombstones.is_one(self._hosted[index].tensor.grad):
                self._hosted[index].tensor.grad = None
                self._lost.add(index)
        super().abandon()

    def settle(self, committed_steps: int) -> StepResult | None:
        committed = super().settle(committed_steps)
        if committed is not None:
            self._lost.clear()
        return committed

    def on_zero_grad(self) -> None:
        super().on_zero_grad()
        self._lost.clear()

    def _start_over(self) -> None:
        self.abandon()
        if self._lost:
            raise _gone(self._hosted[min(self._lost)].name)

    def _hand_over(self, bucket: int) -> None:
        pieces, dtypes, streams = [], set(), set()
        for index, first, position, elements in self._pieces[bucket]:
            gradient = self._hosted[index].tensor.grad
            if gradient is not None:  # none counts as zero
                dtypes.add(gradient.dtype)
                streams.add(self._streams[index])
                pieces.append((gradient.data_ptr() + first * gradient.element_size(), position, elements))
        if len(dtypes) > 1:
            raise Error(grpc.StatusCode.UNIMPLEMENTED, f"gradients of one bucket have dtypes {dtypes}; use one")
        some_tensor = self._hosted[self._pieces[bucket][0][0]].tensor
        dtype = dtypes.pop() if dtypes else some_tensor.dtype
        attachment: GpuAttachment = self._attachment
        stream = _torch_gpu.current_stream(some_tensor)
        for other in streams - {stream}:  # branches of the model that ran beside each other
            attachment.pack_after(other)
        attachment.hand_over(bucket, pieces, DATA_TYPES[dtype], stream)
        self._handed_over.add(bucket)
        for index, *_ in self._pieces[bucket]:
            tensor = self._hosted[index].tensor
            if tensor.grad is not None and self._goes(index):
                _torch_gpu.keep_for_stream(tensor.grad, attachment.pack_stream())
                tensor.grad = self._tombstones.instead_of(tensor.grad)
                self._gone.add(index)

    def _wait_end(self) -> StepResult:
        self._left.clear()
        for index, parameter in enumerate(self._hosted):
            gradient = parameter.tensor.grad
            if self._tombstones.is_one(gradient):
                parameter.tensor.grad = None
            elif gradient is not None:
                _torch_gpu.keep_for_stream(gradient, self._attachment.pack_stream())
                self._left[index] = gradient.data_ptr(), gradient._version
        return self._attachment.wait_verdict()


def _gone(name: str) -> Error:
    return Error(
        grpc.StatusCode.FAILED_PRECONDITION,
        f"the step was abandoned after the gradient of {name} had left the GPU; call zero_grad() and compute the "
        "gradients again (overlap=False keeps them until step())",
    )


def most_pieces(layout: optimizer_pb2.Layout, hosted: list[HostedParameter]) -> int:
    """Of one bucket."""
    return max(len(pieces) for pieces in bucket_pieces(layout, hosted))


@torch.no_grad()
def map_views(hosted: list[HostedParameter], attachment: GpuAttachment) -> None:
    """Fills in where each parameter lies."""
    for parameter, placement in zip(hosted, attachment.optimizer.layout.placements, strict=True):
        parameter.buckets = buckets_of(placement)
        pointer = attachment.device_parameters() + placement.parameters_offset
        parameter.theta = _torch_gpu.view(pointer, parameter.tensor, attachment)
