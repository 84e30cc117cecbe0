"""Hands gradients over that are on a GPU."""

import weakref

import grpc
import torch

from superoffload import _torch_gpu
from superoffload._attachment import StepResult
from superoffload._error import Error
from superoffload._gpu_attachment import GpuAttachment
from superoffload._torch_hand_over import HandOver
from superoffload._torch_parameters import DATA_TYPES, HostedParameter, buckets_of
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


class GpuHandOver(HandOver):
    """Gradients stay where autograd put them until their bucket is complete; then one kernel packs it, and they go.

    Under a GradScaler they are kept until the step's end, because it looks at them.
    """

    def __init__(
        self,
        attachment: GpuAttachment,
        hosted: list[HostedParameter],
        overlap: bool,
        prepare_step: weakref.WeakMethod,
    ) -> None:
        super().__init__(attachment, hosted, overlap, prepare_step)
        self._pieces = bucket_pieces(attachment.optimizer.layout, hosted)
        self._handed_over: set[int] = set()  # buckets of the open step
        self._streams = [0] * len(hosted)  # on which the gradient was taken
        self.keeps_gradients = False

    def _reset(self) -> None:
        super()._reset()
        self._handed_over = set()

    def _take_gradient(self, index: int) -> None:
        tensor = self._hosted[index].tensor
        if tensor.grad is None:
            return
        self._check_dense(index, tensor.grad)
        if not tensor.grad.is_contiguous():
            tensor.grad = tensor.grad.contiguous()
        self._streams[index] = _torch_gpu.current_stream(tensor)

    def _version(self, index: int) -> int:
        gradient = self._hosted[index].tensor.grad
        return -1 if gradient is None else gradient._version

    def _freed(self, index: int) -> bool:
        return not self.keeps_gradients and self._handed_over.issuperset(self._hosted[index].buckets)

    def _changed(self, index: int, tolerated_writes: int) -> bool:
        now, then = self._version(index), self._arrived_version[index]
        if self._freed(index):
            if now != -1:
                raise Error(
                    grpc.StatusCode.FAILED_PRECONDITION,
                    f"a gradient of {self._hosted[index].name} was set after it had been handed over; build the "
                    "optimizer with overlap=False if gradients are changed between backward and step",
                )
            return False
        return now not in ((then, then + tolerated_writes) if then != -1 else (then,))

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
        if self.keeps_gradients:
            return
        for index, *_ in self._pieces[bucket]:
            tensor = self._hosted[index].tensor
            if tensor.grad is not None and self._freed(index):
                _torch_gpu.keep_for_stream(tensor.grad, attachment.pack_stream())
                tensor.grad = None

    def abandon(self) -> None:
        if self._begun and not self._attachment.step_is_open():  # the daemon died, and the step with it
            self._begun = False
        super().abandon()

    def _wait_end(self) -> StepResult:
        for parameter in self._hosted:
            if parameter.tensor.grad is not None:
                _torch_gpu.keep_for_stream(parameter.tensor.grad, self._attachment.pack_stream())
        return self._attachment.wait_verdict()


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
