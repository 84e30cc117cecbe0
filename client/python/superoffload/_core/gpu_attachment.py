"""An attachment whose trainer computes on a GPU (superoffload_gpu.h)."""

import ctypes
import dataclasses
import enum
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import grpc

from superoffload._core import library, structures
from superoffload._core.attachment import Attachment, Await, Resumed, Stays
from superoffload._core.control import Connection
from superoffload._core.error import Error
from superoffload._core.gpu_memory import GpuMemory
from superoffload._core.layout import array_offsets, element_bytes
from superoffload.v1 import optimizer_pb2

Mover = Literal["auto", "daemon", "trainer", "direct"]
MOVERS: tuple[Mover, ...] = ("auto", "daemon", "trainer", "direct")  # by enum superoffload_mover


class _Direction(enum.IntEnum):
    """superoffload_gpu_direction."""

    TO_GPU = 0
    FROM_GPU = 1


@dataclasses.dataclass(frozen=True)
class GpuReport:
    """What an attachment found out about its GPU, and chose."""

    gpu: str
    mover: Mover
    sharing: str  # how the daemon maps the GPU memory: "descriptor", or "" when it does not
    coherent: bool  # the GPU uses the host's page tables, as on a Superchip
    staged: bool  # registering failed, and copies are slow
    seconds: dict[str, float]  # of the same copies beside the same kernels, by mover; only those measured
    gpu_bytes: int
    gradient_slots: int  # of most buckets in the host's memory
    in_place: bool  # parameters are published over the gradients that they came of
    notes: str  # why something was not done
    weights: str = ""  # how many blocks stay where that was chosen, and why
    # While the parameters moved into the optimizer's GPU memory: how much of the GPU's was in use at most, by
    # everybody, and what the framework's allocator could not give back. 0: not known.
    attach_peak_bytes: int = 0
    unreturned_bytes: int = 0


def measure_casts(ordinal: int, dtype: int, bucket_elements: int) -> list[tuple[int, float, float]]:
    """Seconds to get gradients of DataType ``dtype`` off the GPU: elements, "fused", "gpu_fp32", by bucket size."""
    table = []
    for elements in sorted({max(1, bucket_elements // divisor) for divisor in (64, 8, 1)}):
        fused, gpu_fp32 = ctypes.c_double(), ctypes.c_double()
        library.call("gpu_measure_cast", ordinal, dtype, elements, ctypes.byref(fused), ctypes.byref(gpu_fp32))
        table.append((elements, fused.value, gpu_fp32.value))
    return table


def _options(
    optimizer: optimizer_pb2.Optimizer, next_slot: int, ordinal: int, mover: Mover, device_slots: int
) -> structures.GpuOptions:
    scalars = [scalar.value for group in optimizer.groups for scalar in group.scalars]
    offsets = array_offsets(optimizer.layout)
    steps = list(optimizer.parameter_steps)
    shards = (structures.Shard * len(optimizer.parameters))(*map(_shard, optimizer.parameters))
    return structures.GpuOptions(
        ordinal=ordinal,
        mover=MOVERS.index(mover),
        device_slots=device_slots,
        next_slot=next_slot,
        array_count=len(offsets),
        algorithm=optimizer.algorithm.encode(),
        scalars=(ctypes.c_double * len(scalars))(*scalars),
        array_offsets=(ctypes.c_uint64 * len(offsets))(*offsets),
        parameter_steps=(ctypes.c_uint64 * len(steps))(*steps) if steps else None,
        committed_steps=optimizer.committed_steps,
        seed=optimizer.seed,
        shards=shards,
    )


def _saved_room(layout: optimizer_pb2.Layout, gradient_slots: int) -> str:
    """What an optimizer with less room than two gradient slots and published parameters saves, and what that costs."""
    state, gradient, parameter = element_bytes(layout)
    if layout.in_place:
        return (
            f"parameters are published into the only gradient slot: {gradient + parameter:g} bytes of host memory per "
            "parameter less, but all of the update comes after the verdict"
        )
    if gradient_slots == 1:
        # One pass over the state reads two gradients and writes parameters; one lands meanwhile, and parameters leave.
        one_pass = 2 * state + 3 * gradient + 2 * parameter
        return (
            f"one gradient slot for each bucket: {gradient:g} bytes of host memory per parameter less, but a step "
            f"moves {one_pass + state:.4g} instead of {one_pass:.4g}"
        )
    return ""


def _shard(parameter: optimizer_pb2.Parameter) -> structures.Shard:
    given = parameter.shape, parameter.global_shape, parameter.global_offset
    shapes = ((ctypes.c_uint64 * len(shape))(*shape) for shape in given)
    return structures.Shard(len(parameter.shape), len(parameter.global_shape), *shapes)


@dataclasses.dataclass(frozen=True)
class Streamed:
    """Units whose parameters stream (``Parameter.unit``), and the slots of GPU memory that they share."""

    units: frozenset[int]
    slots: int


NONE_STREAMS = Streamed(frozenset(), 0)


@dataclasses.dataclass(frozen=True)
class Moved:
    """Of parameters into a `GpuMemory`: fields as in `GpuReport`."""

    stream: int  # that does it
    attach_peak_bytes: int
    unreturned_bytes: int


class GpuAttachment(Attachment):
    """Parameters are on the GPU, at ``device_parameters()``; gradients leave it through device slots.

    The GPU's memory stays the same over the death of a daemon: autograd's graph may hold views of it. Streams are
    integers.

    ``move_in`` fills `memory` with the parameters, which it frees elsewhere as it goes, when everything but memory is
    there. None: the daemon's fill it, and who has others pushes and pulls them. ``current_stream`` is the calling
    thread's.
    """

    memory: GpuMemory | None = None
    gpu_offsets: list[int]  # of parameters, in GPU memory
    streamed_units: list[int]  # of parameters; 0: it does not stream
    brings_parameters = False  # while they move in: what they are becomes the masters
    slot_changes = 0  # counts what may have changed which units that stream are in their slots
    staying: frozenset[int] = frozenset()  # of `streamed`: units that have a slot for themselves, and are copied once
    slot_bytes = 0  # of GPU memory, for each of those, and for each of the slots that the others share
    suspended = False  # parameters have no GPU memory
    resident_changes = 0  # counts what may have changed which buckets are resident, and where
    # Gives what is called when a successor's memory is there and no step goes through it yet: it holds the last step's
    # parameters.
    on_successor: Callable[[], Callable[[], None] | None] = staticmethod(lambda: None)

    def __init__(
        self,
        connection: Connection,
        request: optimizer_pb2.AttachOptimizerRequest,
        ordinal: int,
        mover: Mover,
        device_slots: int,
        move_in: Callable[["GpuAttachment"], Moved] | None,
        current_stream: Callable[[], int],
        again: str,
        streamed: Streamed = NONE_STREAMS,
    ) -> None:
        self._gpu = ordinal, mover, device_slots
        self.streamed = streamed
        self._move_in = move_in
        self._current_stream = current_stream
        self._again = again
        self._moved = Moved(0, 0, 0) if move_in is None else None
        self._readers: list[int] = []
        super().__init__(connection, request)

    def _attach(self, request: optimizer_pb2.AttachOptimizerRequest, *, resumes: bool = True) -> Resumed:
        if self._handles:
            library.call("gpu_end_landings", self._handle)  # the daemon may publish where they land
        return super()._attach(request, resumes=resumes)

    def _lay_out(self, options: structures.TrainerOptions) -> None:
        parameters = options.parameters[: options.parameter_count]
        buckets = options.buckets[: options.bucket_count]
        units = [parameter.unit for parameter in self.optimizer.parameters]
        self.streamed_units = [unit if unit in self.streamed.units else 0 for unit in units]
        if self.streamed.slots:
            for parameter, unit in zip(parameters, self.streamed_units, strict=True):
                for bucket in range(parameter.first_bucket, parameter.first_bucket + parameter.bucket_count):
                    buckets[bucket].unit = unit
            offsets, size = (ctypes.c_uint64 * len(buckets))(), ctypes.c_uint64()
            place = options.buckets, len(buckets), self.streamed.slots
            library.call("gpu_lay_out", *place, offsets, ctypes.byref(size))
            for bucket, offset in zip(buckets, offsets, strict=True):
                bucket.gpu_offset = offset
            for parameter in parameters:
                first = buckets[parameter.first_bucket]
                parameter.gpu_offset = first.gpu_offset + parameter.parameters_offset - first.parameters_offset
        self.gpu_offsets = [parameter.gpu_offset for parameter in parameters]

    def _give_memory(self, sync: int, next_slot: int) -> None:
        self._leave()
        previous = self._handles[-2] if len(self._handles) > 1 else None
        try:
            self._attach_gpu(previous, sync, next_slot)
        except Error:
            self.end()
            if previous is None:
                self.give_values_back()
            library.function("detach")(self._handles.pop())  # the GPU's memory is still the previous one's
            raise
        self.slot_changes += 1
        if previous is not None:
            library.function("detach")(self._handles.pop(0))
        self._note_residents(0)
        if note := self.on_successor():
            note()

    def _attach_gpu(self, previous: ctypes.c_void_p | None, sync: int, next_slot: int) -> None:
        """Views of the GPU's memory stay valid: it is that of the previous attachment, if there is one."""
        options = _options(self.optimizer, next_slot, *self._gpu)
        options.stream_slots = self.streamed.slots
        self.brings_parameters = pushes = sync == optimizer_pb2.SYNC_PUSH and self._move_in is not None
        if self.memory is None:
            self.memory = GpuMemory(self.trainer, self._handle, options, self._current_stream)
        if self._moved is None:
            assert self._move_in is not None
            self._moved = self._move_in(self)
        if previous is None:  # also when the daemon died while they moved in, and this is its successor
            options.push, options.push_stream = pushes, self._moved.stream
        options.previous, options.memory = previous, self.memory.handle
        report = structures.GpuReport()
        library.call("gpu_attach", self.trainer, self._handle, ctypes.byref(options), ctypes.byref(report))
        self._device_parameters, self._pack_stream = report.parameters, report.pack_stream
        self.slot_bytes = report.slot_bytes
        self.suspended = False
        # Room for the number of each, of two passes.
        self._all_parameters = ctypes.c_uint32 * (2 * len(self.optimizer.parameters))
        if not pushes:
            self.pull()
        layout = self.optimizer.layout
        gradient_slots = min(len(set(bucket.gradient_offsets)) for bucket in layout.buckets)
        notes = [report.notes.decode(errors="replace"), _saved_room(layout, gradient_slots)]
        self.report = GpuReport(
            gpu=report.gpu.decode(),
            mover=MOVERS[report.mover],
            sharing="descriptor" if report.shared else "",
            coherent=bool(report.coherent),
            staged=bool(report.staged),
            seconds={name: report.seconds[i] for i, name in enumerate(MOVERS) if report.seconds[i] > 0},
            gpu_bytes=report.gpu_bytes,
            gradient_slots=gradient_slots,
            in_place=layout.in_place,
            notes="; ".join(filter(None, notes)),
            attach_peak_bytes=self._moved.attach_peak_bytes,
            unreturned_bytes=self._moved.unreturned_bytes,
        )

    def leave_memory(self) -> None:
        """After `end()`: the GPU's memory belongs to the views of it."""
        assert self.memory is not None, "there is some since the attach"
        self.memory.leave_to_views()

    def why_none_streams(self) -> Error | None:
        """Of blocks that were to; None: they do."""
        if not self.streamed.units or any(self.streamed_units):
            return None
        return Error(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"optimizer {self.optimizer.name} was created for weights that stay on the GPU, and its blocks share "
            "buckets; create another one (with restore= of a checkpoint of it), or pass weights='resident'",
        )

    def device_parameters(self) -> int:
        """Device pointer of the parameters, each at its one of ``gpu_offsets``."""
        return self._device_parameters

    def pack_stream(self) -> int:
        """The stream that reads gradients."""
        return self._pack_stream

    def pull(self) -> None:
        library.call("gpu_copy", self._handle, _Direction.TO_GPU, 0)
        self.slot_changes += 1

    def push(self, stream: int) -> None:
        """Copies the parameters to the daemon's memory, after what ``stream`` has done."""
        library.call("gpu_copy", self._handle, _Direction.FROM_GPU, stream)
        self.slot_changes += 1

    def hand_over_on_gpu(
        self, piece: tuple[int, int, int, int, int], stream: int, stays: Stays, more_follow: bool = False
    ) -> list[int]:
        """A gradient that is there when ``stream`` has done what it was given: device pointer, first element, elements,
        parameter, DataType. Returns the parameters whose gradients have left altogether with it.

        ``more_follow``: it is of a pass after which more come in the step, and added up in the daemon's memory; the
        pointer of the last one is 0 where only those before have brought any.
        """
        left = self._all_parameters()
        gradients = structures.Gradients(
            ctypes.pointer(structures.Piece(*piece)), None, 1, 0, 0.0, stream, 1, stays, None, left, 0, more_follow
        )
        self._submit("hand_over", ctypes.byref(gradients))
        return left[: gradients.left_count]

    def masters_from_published(self) -> None:
        super().masters_from_published()
        if self.resident_buckets > 0:  # their masters were copied to the GPU before
            self.set_resident(0)

    def end_after(self, stream: int) -> None:
        """The step's end waits for what ``stream`` will have been given by then, too."""
        self._readers.append(stream)

    def _take_readers(self) -> Sequence[int]:
        readers, self._readers = self._readers, []
        return readers

    def await_parameters(self, bucket: int, stream: int) -> None:
        """Has ``stream`` wait for the parameters of the step that was ended last."""
        try:
            awaited = structures.Awaited(Await.BUCKET_ON_GPU, bucket, stream)
            self._wait("wait", self.trainer, ctypes.byref(awaited), (None,))
        except Error as error:
            self._recover(error)  # then the parameters are there

    def read_unit(self, unit: int, stream: int) -> None:
        """Has ``stream`` wait for the parameters of a unit that streams: they are there until another unit is read."""
        self.slot_changes += 1
        while True:
            try:
                library.call("gpu_read_unit", self._handle, unit, stream)
                return
            except Error as error:
                self._recover(error)

    def has_unit(self, unit: int) -> bool:
        """Whether the unit's slot holds it."""
        return self._has_unit(unit) > 0

    def stays(self, unit: int) -> bool:
        """Whether the unit has its slot for itself: also one that nobody has asked to stay."""
        return not self.suspended and self._has_unit(unit) > 1

    def _has_unit(self, unit: int) -> int:
        has = ctypes.c_uint32()
        library.call("gpu_has_unit", self._handle, unit, ctypes.byref(has))
        return has.value

    def keep_units(self, units: Iterable[int]) -> None:
        """Which units stay from now on. No step may be open, and nobody may read any meanwhile.

        RESOURCE_EXHAUSTED: there is no memory for them; all is as before.
        """
        chosen = frozenset(units)
        self.slot_changes += 1
        library.call("gpu_keep_units", self._handle, (ctypes.c_uint32 * len(chosen))(*sorted(chosen)), len(chosen))
        self.staying = chosen

    def note_weights(self, text: str) -> None:
        self.report = dataclasses.replace(self.report, weights=text)

    def suspend(self) -> None:
        """Gives the GPU's memory back, between two steps, when the GPU reads nothing there and nothing is resident.

        FAILED_PRECONDITION: the daemon copies; UNIMPLEMENTED: the driver cannot map memory. All is as before then.
        """
        library.call("gpu_suspend", self._handle)
        self.suspended = True
        self.slot_changes += 1
        weights = "" if self.staying else self.report.weights
        self._suspended_bytes, self.staying = self.report.gpu_bytes, frozenset()
        self.report = dataclasses.replace(self.report, gpu_bytes=0, weights=weights)

    def resume(self) -> None:
        """Has the parameters of the last step at their addresses again; none of what streams stays.

        RESOURCE_EXHAUSTED: there is no memory; all is as before.
        """
        library.call("gpu_resume", self._handle)
        self.slot_changes += 1
        if self.suspended:  # else a successor has taken all of it
            self.suspended = False
            self.report = dataclasses.replace(self.report, gpu_bytes=self._suspended_bytes)

    def set_resident(self, count: int) -> None:
        """Buckets that become resident, or no longer are, must have been settled since the last step."""
        library.call("gpu_set_resident", self._handle, count)
        self._note_residents(count)

    def _note_residents(self, count: int) -> None:
        self.resident_buckets = count
        self.resident_changes += 1

    def resident_masters(self, bucket: int) -> int:
        """Device pointer of the masters of a resident bucket, while `resident_changes` stays what it is."""
        pointer = ctypes.c_uint64()
        library.call("gpu_resident_masters", self._handle, bucket, ctypes.byref(pointer))
        return pointer.value

    def stall_seconds(self) -> float:
        """How long ``await_parameters`` waited for the daemon since the last step was ended."""
        return self.look().stall_seconds
