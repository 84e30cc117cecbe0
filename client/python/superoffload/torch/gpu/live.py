"""A model's parameters on a GPU: views of the memory that the published ones are copied to.

What torch writes to them changes their versions. What is written behind torch's back (``.data``, collectives) is found
by canaries: two bytes in every 16 KiB of every parameter, and of each shorter one, are compared with the published
parameters, which lie in the CPU's memory.
"""

import random
from collections.abc import Callable

import grpc
import torch

from superoffload._core.error import Error
from superoffload._core.gpu_attachment import GpuAttachment
from superoffload.torch.gpu import cuda
from superoffload.torch.live import LiveParameters, alike
from superoffload.torch.parameters import HostedParameter
from superoffload.torch.ranks import shards
from superoffload.torch.ranks.replicas import Replicas

_CANARY_BYTES = 2  # no parameter's element is shorter
_CANARY_EVERY = (16 << 10) // _CANARY_BYTES


class _Canaries:
    def __init__(self, hosted: list[HostedParameter], attachment: GpuAttachment) -> None:
        dice = random.Random()
        dice.seed()
        places: list[int] = []
        self._owners: list[int] = []
        total = 0
        for index, placement in enumerate(attachment.optimizer.layout.placements):
            first = placement.parameters_offset // _CANARY_BYTES
            count = hosted[index].theta.nbytes // _CANARY_BYTES
            mine = range(first + dice.randrange(min(count, _CANARY_EVERY)), first + count, _CANARY_EVERY)
            places += mine
            self._owners += [index] * len(mine)
            total = max(total, first + count)
        device = hosted[0].tensor.device
        self._attachment = attachment
        self._bytes = total * _CANARY_BYTES
        like = torch.empty(1, dtype=torch.int16, device=device).expand(total)
        self._device = cuda.view(attachment.device_parameters(), like, attachment)
        self._host_places = torch.tensor(places, dtype=torch.int64, device="cpu")
        self._device_places = self._host_places.to(device)
        self._published = cuda.pinned_like(self._host_places.to(torch.int16))

    def note_published(self) -> None:
        """They are those of the last step, until the next one begins."""
        # A daemon that took over maps its memory elsewhere.
        host = torch.frombuffer(self._attachment.parameters(0, self._bytes), dtype=torch.int16)
        torch.take(host, self._host_places, out=self._published)

    def begin_comparison(self) -> Callable[[], list[int]]:
        """What is returned gives the indices of parameters that differ now from those noted; it waits for the GPU."""
        published = self._published.to(self._device_places.device, non_blocking=True)
        different = self._device[self._device_places] != published
        any_different = cuda.begin_read(different.any())

        def find() -> list[int]:
            if not any_different():
                return []
            return sorted({self._owners[place] for place in different.nonzero().flatten().tolist()})

        return find


class GpuParameters(LiveParameters):
    """``synchronize`` has the current stream wait for the parameters of the last step.

    A parameter that several ranks have whole is no view: of the rows that this rank hosts, those that were published
    are copied to it, and ``replicas`` brings the others, as soon as the step is committed.
    """

    _attachment: GpuAttachment

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
        self._canaries = _Canaries(hosted, attachment)
        self._noted = False  # canaries of the last step

    def before_step(self) -> None:
        if not self._noted:
            self._attachment.wait_over()
            self._accept_same_bits()
            self._canaries.note_published()
            self._noted = True

    def _accept_same_bits(self) -> None:
        """Whoever wrote parameters and has brought them back, as an evaluation of averaged weights does."""
        written = self._written()
        if written:
            self._synchronize()
        for index in written:
            parameter, placement = self._hosted[index], self._attachment.optimizer.layout.placements[index]
            tensor, theta = parameter.local, parameter.theta
            if not alike(tensor, theta) or not tensor.is_contiguous() or theta.data_ptr() != self._addresses[index]:
                continue
            published = torch.frombuffer(
                self._attachment.parameters(placement.parameters_offset, tensor.nbytes), dtype=torch.uint8
            )
            if torch.equal(tensor.detach().cpu().view(-1).view(torch.uint8), published):
                if tensor.data_ptr() != theta.data_ptr():
                    if shards.is_sharded(parameter.tensor):
                        continue
                    theta.copy_(tensor.detach())
                    tensor.data = theta
                self._versions[index] = self._version(index)

    def on_commit(self) -> None:
        self._noted = False
        if self._replicas is not None and self._replicas.has_any():
            self._synchronize()
            self._share()

    def _share(self) -> None:
        """The published rows of parameters that several ranks have become theirs, on all of them."""
        if self._replicas is None or not self._replicas.has_any():
            return
        for parameter in self._hosted:
            if parameter.rows is not None:
                parameter.local.detach().copy_(parameter.theta)
        self._replicas.gather()

    def _check_shards(self) -> None:
        """Raises Error for a shard that somebody has given other memory, which FSDP gathers then."""
        for index in self._views:
            parameter = self._hosted[index]
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
        self._publish()  # the attach has copied them

    def _to_published(self) -> None:
        self._check_shards()
        if self._replicas is not None:
            self._replicas.check_values()
        for parameter in self._hosted:
            if parameter.local.data_ptr() != parameter.theta.data_ptr():
                parameter.theta.copy_(parameter.local.detach())
        self._attachment.push(cuda.current_stream(self._hosted[0].tensor))

    def _from_published(self) -> None:
        self._attachment.pull()
        self.bind()

    def keep(self) -> None:
        self._check_shards()
        for index in self._views:
            parameter = self._hosted[index]
            if parameter.local.data_ptr() != parameter.theta.data_ptr():  # its bits are there, since push()
                parameter.tensor.data = parameter.theta
        self._versions = {index: self._version(index) for index in self._views}
        if self._replicas is not None:
            self._replicas.keep()
        self._noted = False

    def begin_check(self) -> Callable[[], None]:
        find_different = self._begin_comparison()
        return lambda: self._check(lambda: self._find_changed(find_different))

    def changed(self) -> list[str]:
        return self._find_changed(self._begin_comparison())

    def _begin_comparison(self) -> Callable[[], list[int]]:
        self.before_step()
        self._synchronize()
        return self._canaries.begin_comparison()

    def _find_changed(self, find_different: Callable[[], list[int]]) -> list[str]:
        if written := self._written():
            return [self._hosted[index].name for index in written]
        changed = [self._hosted[index].name for index in find_different()]
        return changed + ([] if self._replicas is None else self._replicas.changed())

    def _version(self, index: int) -> tuple[int, int]:
        """Of a DTensor, and of the part that this rank has: each counts what is written to it, and not to the other."""
        return self._hosted[index].tensor._version, self._hosted[index].local._version

    def _written(self) -> list[int]:
        """Indices of parameters that somebody has written through torch, or replaced."""
        return [
            index
            for index in self._views
            if self._version(index) != self._versions[index]
            or self._hosted[index].local.data_ptr() != self._addresses[index]
        ]

    def close(self) -> None:
        """The model's parameters stay where they are: copies of them may not fit."""
        del self._canaries
        for parameter in self._hosted:
            del parameter.theta
        self._attachment.leave_memory()
