"""Submits gradients that are on a GPU."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import grpc
import torch

from superoffload._core.attachment import Stays
from superoffload._core.error import Error
from superoffload._core.gpu_attachment import GpuAttachment
from superoffload._core.step_result import StepResult
from superoffload.torch import cuda
from superoffload.torch.fingerprint import fingerprint, first_difference
from superoffload.torch.gpu.gradient_room import GradientRoom
from superoffload.torch.gpu.passes import Passes
from superoffload.torch.guards import tombstone
from superoffload.torch.guards.tombstone import Tombstones
from superoffload.torch.guards.versions import Versions
from superoffload.torch.hooks import eager, weakly
from superoffload.torch.ranks import shards
from superoffload.torch.ranks.shards import DATA_TYPES, HostedParameter
from superoffload.torch.submitter import Given, Submitter


class Waits(Protocol):
    """Who has waited for new parameters; see forward.py."""

    def on_captured_gradient(self, parameter: HostedParameter) -> None: ...
    def were_read(self, parameter: HostedParameter) -> bool: ...
    def check_read(self, parameter: HostedParameter) -> None: ...
    def wait_all(self) -> None: ...


class GpuSubmitter(Submitter):
    """Gradients stay where autograd put them until their bucket is complete; then one kernel packs it, and they go.

    A watched step keeps all its gradients until ``step()``. A model of half a GPU's memory has no room for them: then
    they go from the first step on, and the tombstones stand guard alone.

    A tombstone takes the place of a gradient that has gone early: NaN, expanded to the parameter's shape. What writes
    to it raises, what reads it sees NaN, until the loop zeroes gradients. A gradient that goes in ``step()`` stays, as
    in torch, but for one of which other passes have brought a part, and so does one that the loop keeps over steps, or
    zeroes in place, and any under a GradScaler, which looks at it. In a run of several ranks all stay: FSDP accumulates
    into them, and what was submitted can be submitted again to the successor of a daemon, while other ranks wait.
    Fingerprints show whether what stays was edited.
    """

    attachment: GpuAttachment

    def __init__(
        self,
        attachment: GpuAttachment,
        given: Given,
        forward_waits: Waits,
        send_written_state: Callable[[], None],
        adds_up: bool,
    ) -> None:
        if adds_up and given.overlap == "auto":  # gradients of steps that are watched would have to stay
            given = dataclasses.replace(given, overlap=True)
        self._forward_waits = forward_waits
        self._send_written_state = send_written_state
        self._is_state_sent = False
        self._unwaited: set[int] = set()  # whose gradients were computed with parameters that nobody had waited for
        self._streams = [0] * len(given.hosted)  # on which the gradient was taken
        self._keeps_gradients = given.ranks is not None
        self._tolerated_writes = 0  # per gradient, of those that are known to have kept its value
        self._tombstones = Tombstones()
        self._grown: set[int] = set()  # since the last step or zero_grad()
        self._goes_on: set[int] = set()  # of these, those whose gradient was there before
        self._lost: set[int] = set()  # whose gradients had gone when their step was abandoned
        self._forced = False  # for want of memory
        self._adds_up = adds_up
        self._passes = Passes(attachment, given.hosted, self._tombstones)
        super().__init__(attachment, given)
        self._room = GradientRoom([parameter.tensor for parameter in given.hosted], self._tombstones.is_one)
        self.handles += [
            parameter.tensor.register_hook(eager(weakly(self.before_gradient, index)))
            for index, parameter in enumerate(given.hosted)
        ]
        on_accumulated = eager(weakly(self._on_accumulated, passes=1))
        self.handles += [
            tensor.register_post_accumulate_grad_hook(on_accumulated)
            for tensor in ([] if given.ranks is None else given.ranks.trained)
            if shards.is_sharded(tensor) and id(tensor) not in self.indices
        ]

    def reset(self) -> None:
        super().reset()
        self._versions = Versions()  # of gradients that were taken
        self._accumulated: set[int] = set()  # ids of sharded parameters that have a gradient
        self._gone: set[int] = set()  # of these, those that a tombstone stands for
        self._fingerprints: dict[int, torch.Tensor] = {}  # of those that must be the same in step(), to the bit
        self._held: dict[int, torch.Tensor] = {}  # whose memory may be submitted again, or be read still
        self._averaged: dict[int, torch.Tensor] = {}  # of those that were taken, what .grad is after backward
        self._late = False
        self._passes.reset()

    def on_grad_scaler(self, used: bool) -> None:
        """A GradScaler looks at the gradients in step(), and rewrites each once with the same value."""
        if used and self._adds_up:
            self.abandon()
            raise Error(
                grpc.StatusCode.UNIMPLEMENTED,
                "a GradScaler looks for gradients that accumulate='daemon' has sent away; train in bfloat16 without "
                "one, or leave accumulate out",
            )
        self._keeps_gradients |= used
        self._tolerated_writes = int(used)

    def before_gradient(self, index: int) -> None:
        """Autograd is about to accumulate a gradient of parameter `index`."""
        if cuda.is_capturing():
            return
        self._send_state_once()
        if self.hosted[index].gradient is None:
            self._unwaited.discard(index)
        if index in self._passes and index not in self.arrived:
            with self._dropping_on_error():
                self._passes.make_way(index)
            return
        learns = self.policy.learns() and not self._adds_up
        if learns and not self._keeps_gradients and not self._room.holds_gradients():
            self.policy.force_early()
            self._forced = True
        gradient = self.hosted[index].gradient
        if gradient is None or self.ranks is not None:
            return
        if not self._tombstones.is_one(gradient):
            if index not in self._grown:
                self._goes_on.add(index)
        elif index not in self._gone:
            raise tombstone.goes_on(self.hosted[index].name)
        else:
            self.policy.on_surprise()
            self.abandon()
            self._lost.clear()  # said here
            raise tombstone.grew(self.hosted[index].name, self._forced)

    @contextlib.contextmanager
    def _dropping_on_error(self) -> Iterator[None]:
        try:
            yield
        except Error:
            self.abandon()
            raise

    def on_final(self, index: int, outstanding: int) -> None:
        is_last = self.policy.early and outstanding == 0
        if not self._adds_up or index in self.arrived or is_last:
            super().on_final(index, outstanding)
            return
        self.check_strided(index)
        shards.make_gradient_row_major(self.hosted[index].tensor)
        self.begin()
        self._passes.add(index)

    def _send_state_once(self) -> None:
        """Before the first gradient of a step leaves: sending it abandons a step that is open."""
        if self._is_state_sent or self.begun or self.cut_off.happened:
            return
        self._is_state_sent = True
        self._send_written_state()

    def on_gradient(self, index: int) -> None:
        if cuda.is_capturing():
            self._forward_waits.on_captured_gradient(self.hosted[index])
            return
        if not self._forward_waits.were_read(self.hosted[index]):
            self._unwaited.add(index)
        try:
            self._forward_waits.check_read(self.hosted[index])
        except Error:
            self.abandon()
            raise
        self._lost.discard(index)
        self._on_accumulated(self.hosted[index].tensor)
        self._grown.add(index)
        super().on_gradient(index)

    def _on_accumulated(self, tensor: torch.Tensor) -> None:
        """FSDP has, and calls all hooks of a parameter before it goes on with the next one."""
        gradient = shards.gradient(tensor) if shards.is_sharded(tensor) else None
        if gradient is None:
            return
        if id(tensor) in self._accumulated:
            self._versions.on_accumulated(gradient)
        self._accumulated.add(id(tensor))

    def on_late_gradient(self, index: int) -> None:
        self._late = True

    def has_gradients(self) -> bool:
        if lost := [self.hosted[i].name for i in sorted(self._lost) if self.hosted[i].tensor.grad is None]:
            raise tombstone.gone(lost[0])
        return super().has_gradients()

    def beside_backward(self) -> contextlib.AbstractContextManager[None]:
        if self.policy.watched:  # what is compared in step() is computed on its stream
            return contextlib.nullcontext()
        return cuda.beside(self.hosted[0].tensor.device)

    def on_averages_in_place(self) -> None:
        for index in self._averaged:
            if (gradient := self.hosted[index].gradient) is not None:
                self._versions.take(index, gradient, self.hosted[index].tensor.grad)

    def _gradient(self, index: int) -> torch.Tensor | None:
        """What is submitted of a parameter."""
        return self._averaged.get(index, self.hosted[index].gradient)

    def take(self, index: int) -> None:
        hosted = self.hosted[index]
        if self.finishing and index in self._passes:
            with self._dropping_on_error():
                self._passes.check(index)
            return
        if index in self.averages:
            self._averaged[index] = self.averages[index]
        else:
            shards.make_gradient_row_major(hosted.tensor)
        gradient = self._gradient(index)
        if gradient is None:
            return
        self._streams[index] = cuda.current_stream(hosted.tensor)
        self._versions.take(index, gradient, hosted.tensor.grad)
        compares = self.policy.watched or (self.asked_for_norm and not self.policy.early)
        if self.ranks is None:
            compares = self.asked_for_norm or not (self.finishing or self._goes(index))
        if compares:
            self._fingerprints[index] = fingerprint(gradient)

    def _goes(self, index: int) -> bool:
        """Whether the gradient's memory is given back once submitted; of one element a tombstone is no guard."""
        if index in self._passes:
            return True
        stays = self.finishing or self._keeps_gradients or index in self._goes_on
        return self.policy.early and not stays and self.hosted[index].tensor.numel() > 1

    def finish(self) -> None:
        self._check_waited()
        self._check_gone = self._tombstones.begin_check(cuda.begin_read)
        super().finish()
        if self.ranks is None:  # the packing of all was launched
            self._held.clear()

    def check_gone(self) -> None:
        self._check_gone()

    def _check_waited(self) -> None:
        """Raises Error for a gradient that may be one of parameters that were half new."""
        found = [index for index in sorted(self._unwaited) if self.hosted[index].tensor.grad is not None]
        if not found:
            return
        self.abandon()
        self._forward_waits.wait_all()  # for the backward passes that come
        raise _unwaited(self.hosted[found[0]].name)

    def _forget_grown(self) -> None:
        self._grown.clear()
        self._goes_on.clear()

    def check_present(self) -> None:
        for index, parameter in enumerate(self.hosted):
            gone = index in self._gone or index in self._passes
            if not gone and self._tombstones.is_one(parameter.tensor.grad):
                raise tombstone.goes_on(self.hosted[index].name)

    def outdated(self) -> bool:
        taken = [index for index in self.taken if not self._has_all_of(index)]
        return self._late or any((self.hosted[i].tensor.grad is None) == (i in self._versions) for i in taken)

    def _has_all_of(self, index: int) -> bool:
        """Whether passes before have brought all of the gradient."""
        return index in self._passes and index not in self._versions

    def find_edited(self) -> str | None:
        for index in self._versions:
            gradient = self.hosted[index].gradient
            assert gradient is not None, "what was taken and has gone since is outdated"
            if index in self._gone:
                if not self._tombstones.is_one(gradient):
                    self.abandon()
                    raise tombstone.was_set(self.hosted[index].name)
                continue
            whole = self.hosted[index].tensor.grad
            if not self._versions.is_same(index, gradient, whole, self._tolerated_writes):
                return self.hosted[index].name
        now = [fingerprint(self.hosted[index].gradient) for index in self._fingerprints]
        found = first_difference(list(self._fingerprints.values()), now)
        return None if found is None else self.hosted[list(self._fingerprints)[found]].name

    def scale(self, factor: float) -> bool:
        """What was submitted can come from nowhere else than ``.grad``, if the daemon dies: it is dropped."""
        if self.begun:
            self.policy.on_use(gone=bool(self._gone))
        if self._gone or self._passes:
            return True
        self.multiply(factor)
        self.abandon()
        return False

    def is_present(self, gradient: torch.Tensor) -> bool:
        return not self._tombstones.is_one(gradient)

    def abandon(self) -> None:
        for index in self._passes:
            self.hosted[index].tensor.grad = None
            self._lost.add(index)
        for index in self._gone:
            if self._tombstones.is_one(self.hosted[index].tensor.grad):
                self.hosted[index].tensor.grad = None
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
        self._unwaited.clear()
        self._forget_grown()
        self._drop_tombstones()

    def close(self) -> None:
        super().close()
        self._drop_tombstones()

    def _drop_tombstones(self) -> None:
        for parameter in self.hosted:
            if self._tombstones.is_one(parameter.tensor.grad):
                parameter.tensor.grad = None

    def start_over(self) -> None:
        self.abandon()
        if self._lost:
            raise tombstone.gone(self.hosted[min(self._lost)].name)

    def hand_over(self, indices: Sequence[int]) -> None:
        stays = Stays.UNTIL_PACKED if self.ranks is None else Stays.UNTIL_OVER
        for index in indices:
            gradient = self._gradient(index)
            assert gradient is not None, "it was taken"
            if self._has_all_of(index):
                nothing_more = (0, 0, gradient.numel(), index, DATA_TYPES[gradient.dtype])
                self.attachment.hand_over_on_gpu(nothing_more, self._streams[index], stays)
                self._passes.bury(index)
                continue
            self._held[index] = gradient.detach()
            piece = (gradient.data_ptr(), 0, gradient.numel(), index, DATA_TYPES[gradient.dtype])
            left = self.attachment.hand_over_on_gpu(piece, self._streams[index], stays)
            if self.ranks is None:
                self._on_left(left)

    def _on_left(self, indices: Sequence[int]) -> None:
        """Gradients whose packing was launched."""
        for index in indices:
            del self._held[index]  # whoever has its memory shows in the count of its references
            tensor = self.hosted[index].tensor
            if tensor.grad is not None and self._goes(index):
                cuda.keep_for_stream(tensor.grad, self.attachment.pack_stream())
                tensor.grad = self._tombstones.instead_of(tensor.grad)
                self._gone.add(index)

    def wait_end(self) -> StepResult:
        self._is_state_sent = False
        self._forget_grown()
        # They stay the loop's: nobody frees them before they are packed.
        present = [(index, parameter.gradient) for index, parameter in enumerate(self.hosted)]
        rest = {index: gradient.detach() for index, gradient in present if gradient is not None}
        self._held = rest | self._held
        self._room.between_steps()
        return self.attachment.wait_verdict()


def _unwaited(name: str) -> Error:
    return Error(
        grpc.StatusCode.FAILED_PRECONDITION,
        f"the gradient of parameter {name} was computed by code that calls no module's hooks, such as functions of "
        "parameters and CUDA graphs, and that did not wait for the parameter's new value. Nothing was committed: call "
        "the optimizer's zero_grad() and compute the gradients of this step again. From now on step() waits for all "
        "parameters",
    )
