"""Overlap with backward under DistributedDataParallel: gradients leave as soon as their bucket is averaged.

    superoffload.torch.ddp.register(model, optimizer)  # built with replicas=True on the model's parameters

Without it the optimizer takes gradients in ``step()``; results are the same. DistributedDataParallel averages
gradients bucket by bucket, and a bucket is complete some time after its gradients were computed. So whenever another
one begins, those that are complete are handed over, by the thread that runs backward; what is not leaves in
``step()``. ``.grad`` is the average on all ranks, as ever. On a GPU what leaves is read in the bucket's memory, on a
stream of its own, which waits for the average; backward does not.
"""

import weakref
from collections.abc import Callable
from typing import Any

import grpc
import torch

from superoffload._core.error import Error
from superoffload.torch.hooks import weakly


def register(model: torch.nn.parallel.DistributedDataParallel, optimizer: Any) -> None:
    """Has gradients of ``model`` leave early; ``optimizer`` is built with ``replicas=`` on its parameters."""
    hosted = {id(parameter) for parameter in optimizer.hosted_parameters()}
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    group = optimizer.replica_group()
    if group is None or not trained <= hosted:
        raise Error(
            grpc.StatusCode.FAILED_PRECONDITION,
            "the optimizer was not built with replicas= on the parameters of this DistributedDataParallel; build it so",
        )
    if torch.distributed.get_process_group_ranks(group) != torch.distributed.get_process_group_ranks(
        model.process_group
    ):
        raise Error(
            grpc.StatusCode.FAILED_PRECONDITION,
            "DistributedDataParallel averages over other ranks than replicas= has; give both the same process group",
        )
    model.register_comm_hook(_Averaging(model.process_group, optimizer), _Averaging.hook)


class _Averaging:
    """The buckets that are being averaged."""

    def __init__(self, group: Any, optimizer: Any) -> None:
        self._group = group
        self._optimizer = weakref.ref(optimizer)
        self._open: list[tuple[Any, Any]] = []  # futures, and what the submitter expects of them

    def hook(self, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer().div_(self._group.size())
        future = _all_reduce(buffer, self._group)
        if bucket.index() == 0:
            self._open.clear()  # of a backward pass before
        optimizer = self._optimizer()
        if optimizer is not None and optimizer.is_attached():
            gradients = zip(bucket.parameters(), bucket.gradients(), strict=True)
            watched, expected = optimizer.submitter().expect(gradients)
            self._open.append((future, expected))
            if watched:
                future.wait()
            self._hand_over(optimizer.submitter())
            if bucket.is_last():
                _after_backward(weakly(optimizer.submitter().on_averages_in_place))
        return future.then(lambda done: done.value()[0])

    def _hand_over(self, submitter: Any) -> None:
        while self._open and self._open[0][0].done():
            future, expected = self._open.pop(0)
            with submitter.beside_backward():
                future.wait()  # NCCL's is done as soon as it is launched
                submitter.on_averaged(expected)


def _all_reduce(buffer: torch.Tensor, group: Any) -> Any:
    return torch.distributed.all_reduce(buffer, group=group, async_op=True).get_future()


def _after_backward(call: Callable[[], None]) -> None:
    """Calls it when backward is over, and DistributedDataParallel with it, whose callback is queued next."""
    queue = torch.autograd.Variable._execution_engine.queue_callback  # FSDP has no other way either
    queue(lambda: queue(call))
