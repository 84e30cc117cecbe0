"""Submits gradients that are on a GPU."""

import contextlib
import weakref
from collections.abc import Callable, Sequence

import torch

from superoffload._core.attachment import Stays
from superoffload._core.gpu_attachment import GpuAttachment
from superoffload._core.step_result import StepResult
from superoffload.torch.eager import eager
from superoffload.torch.fingerprint import fingerprint, first_difference
from superoffload.torch.gpu import cuda
from superoffload.torch.gpu.forward import ForwardWaits, unwaited
from superoffload.torch.gpu.gradient_room import GradientRoom
from superoffload.torch.guards import tombstone
from superoffload.torch.guards.overlap import Overlap
from superoffload.torch.guards.tombstone import Tombstones
from superoffload.torch.guards.versions import Versions
from superoffload.torch.parameters import DATA_TYPES, HostedParameter
from superoffload.torch.ranks import shards
from superoffload.torch.ranks.replicas import Replicas
from superoffload.torch.ranks.sharding import Sharding
from superoffload.torch.submitter import Submitter


def _make_hook_of_others(submitter: "weakref.ref[GpuSubmitter]") -> Callable[[torch.Tensor], None]:
    @eager
    def hook(tensor: torch.Tensor) -> None:
        alive = submitter()
        if alive is not None:
            alive._on_accumulated(tensor)

    return hook


def _make_hook(submitter: "weakref.ref[GpuSubmitter]", index: int) -> Callable[[torch.Tensor], None]:
    @eager
    def hook(_: torch.Tensor) -> None:
        alive = submitter()
        if alive is not None:
            alive.before_gradient(index)

    return hook


class GpuSubmitter(Submitter):
    """Gradients stay where autograd put them until their bucket is complete; then one kernel packs it, and they go.

    A watched step keeps all its gradients until ``step()``. A model of half a GPU's memory has no room for them: then
    they go from the first step on, and the tombstones stand guard alone.

    A tombstone takes the place of a gradient that has gone early: NaN, expanded to the parameter's shape. What writes
    to it raises, what reads it sees NaN, until the loop zeroes gradients. A gradient that goes in ``step()`` stays, as
    in torch, and so does one that the loop keeps over steps, or zeroes in place, and any under a GradScaler, which
    looks at it. In a run of several ranks all stay: FSDP accumulates into them, and what was submitted can be submitted
    again to the successor of a daemon, while other ranks wait. Fingerprints show whether what stays was edited.
    """

    _attachment: GpuAttachment

    def __init__(
        self,
        attachment: GpuAttachment,
        hosted: list[HostedParameter],
        overlap: Overlap,
        prepare_step: weakref.WeakMethod,
        sharding: Sharding | None,
        replicas: Replicas | None,
        forward_waits: ForwardWaits,
        send_written_state: weakref.WeakMethod,
    ) -> None:
        self._forward_waits = forward_waits
        self._send_written_state = send_written_state
        self._is_state_sent = False
        self._unwaited: set[int] = set()  # whose gradients were computed with parameters that nobody had waited for
        self._streams = [0] * len(hosted)  # on which the gradient was taken
        self._keeps_gradients = sharding is not None
        self._tolerated_writes = 0  # per gradient, of those that are known to have kept its value
        self._tombstones = Tombstones()
        self._grown: set[int] = set()  # since the last step or zero_grad()
        self._goes_on: set[int] = set()  # of these, those whose gradient was there before
        self._lost: set[int] = set()  # whose gradients had gone when their step was abandoned
        self._forced = False  # for want of memory
        super().__init__(attachment, hosted, overlap, prepare_step, sharding, replicas)
        self._room = GradientRoom([parameter.tensor for parameter in hosted], self._tombstones)
        self._handles += [
            parameter.tensor.register_hook(_make_hook(weakref.ref(self), index))
            for index, parameter in enumerate(hosted)
        ]
        self._handles += [
            tensor.register_post_accumulate_grad_hook(_make_hook_of_others(weakref.ref(self)))
            for tensor in ([] if sharding is None else sharding.trained)
            if shards.is_sharded(tensor) and id(tensor) not in self._indices
        ]

    def _reset(self) -> None:
        super()._reset()
        self._versions = Versions()  # of gradients that were taken
        self._accumulated: set[int] = set()  # ids of sharded parameters that have a gradient
        self._gone: set[int] = set()  # of these, those that a tombstone stands for
        self._fingerprints: dict[int, torch.Tensor] = {}  # of those that must be the same in step(), to the bit
        self._held: dict[int, torch.Tensor] = {}  # whose memory may be submitted again, or be read still
        self._averaged: dict[int, torch.Tensor] = {}  # of those that were taken, what .grad is after backward
        self._late = False

    def on_grad_scaler(self, used: bool) -> None:
        """A GradScaler looks at the gradients in step(), and rewrites each once with the same value."""
        self._keeps_gradients |= used
        self._tolerated_writes = int(used)

    def before_gradient(self, index: int) -> None:
        """Autograd is about to accumulate a gradient of parameter `index`."""
        if cuda.is_capturing():
            return
        self._send_state_once()
        if self._hosted[index].gradient is None:
            self._unwaited.discard(index)
        if self._policy.learns() and not self._keeps_gradients and not self._room.holds_gradients():
            self._policy.force_early()
            self._forced = True
        gradient = self._hosted[index].gradient
        if gradient is None or self._sharding is not None:
            return
        if not self._tombstones.is_one(gradient):
            if index not in self._grown:
                self._goes_on.add(index)
        elif index not in self._gone:
            raise tombstone.goes_on(self._hosted[index].name)
        else:
            self._policy.on_surprise()
            self.abandon()
            self._lost.clear()  # said here
            raise tombstone.grew(self._hosted[index].name, self._forced)

    def _send_state_once(self) -> None:
        """Before the first gradient of a step leaves: sending it abandons a step that is open."""
        if self._is_state_sent or self._begun or self.cut_off.happened:
            return
        self._is_state_sent = True
        send = self._send_written_state()
        if send is not None:
            send()

    def on_gradient(self, index: int) -> None:
        if cuda.is_capturing():
            self._forward_waits.on_captured_gradient(self._hosted[index])
            return
        if not self._forward_waits.were_read(self._hosted[index]):
            self._unwaited.add(index)
        self._lost.discard(index)
        self._on_accumulated(self._hosted[index].tensor)
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

    def _on_late_gradient(self, index: int) -> None:
        self._late = True

    def has_gradients(self) -> bool:
        if lost := [self._hosted[i].name for i in sorted(self._lost) if self._hosted[i].tensor.grad is None]:
            raise tombstone.gone(lost[0])
        return super().has_gradients()

    def beside_backward(self) -> contextlib.AbstractContextManager[None]:
        if self._policy.watched:  # what is compared in step() is computed on its stream
            return contextlib.nullcontext()
        return cuda.beside(self._hosted[0].tensor.device)

    def on_averages_in_place(self) -> None:
        for index in self._averaged:
            if (gradient := self._hosted[index].gradient) is not None:
                self._versions.take(index, gradient, self._hosted[index].tensor.grad)

    def _gradient(self, index: int) -> torch.Tensor | None:
        """What is submitted of a parameter."""
        return self._averaged.get(index, self._hosted[index].gradient)

    def _take(self, index: int) -> None:
        hosted = self._hosted[index]
        if index in self._given:
            self._averaged[index] = self._given[index]
        else:
            shards.make_gradient_row_major(hosted.tensor)
        gradient = self._gradient(index)
        if gradient is None:
            return
        self._streams[index] = cuda.current_stream(hosted.tensor)
        self._versions.take(index, gradient, hosted.tensor.grad)
        compares = self._policy.watched or (self._asked_for_norm and not self._policy.early)
        if self._sharding is None:
            compares = self._asked_for_norm or not (self._finishing or self._goes(index))
        if compares:
            self._fingerprints[index] = fingerprint(gradient)

    def _goes(self, index: int) -> bool:
        """Whether the gradient's memory is given back once submitted; of one element a tombstone is no guard."""
        stays = self._finishing or self._keeps_gradients or index in self._goes_on
        return self._policy.early and not stays and self._hosted[index].tensor.numel() > 1

    def finish(self) -> None:
        self._check_waited()
        self._check_gone = self._tombstones.begin_check()
        super().finish()
        if self._sharding is None:  # the packing of all was launched
            self._held.clear()

    def check_gone(self) -> None:
        self._check_gone()

    def _check_waited(self) -> None:
        """Raises Error for a gradient that may be one of parameters that were half new."""
        found = [index for index in sorted(self._unwaited) if self._hosted[index].tensor.grad is not None]
        if not found:
            return
        self.abandon()
        self._forward_waits.wait_all()  # for the backward passes that come
        raise unwaited(self._hosted[found[0]].name)

    def _forget_grown(self) -> None:
        self._grown.clear()
        self._goes_on.clear()

    def _check_present(self) -> None:
        for index, parameter in enumerate(self._hosted):
            if index not in self._gone and self._tombstones.is_one(parameter.tensor.grad):
                raise tombstone.goes_on(self._hosted[index].name)

    def _outdated(self) -> bool:
        return self._late or any((self._hosted[i].tensor.grad is None) == (i in self._versions) for i in self._taken)

    def _find_edited(self) -> str | None:
        for index in self._versions:
            gradient = self._hosted[index].gradient
            assert gradient is not None, "what was taken and has gone since is outdated"
            if index in self._gone:
                if not self._tombstones.is_one(gradient):
                    self.abandon()
                    raise tombstone.was_set(self._hosted[index].name)
                continue
            whole = self._hosted[index].tensor.grad
            if not self._versions.is_same(index, gradient, whole, self._tolerated_writes):
                return self._hosted[index].name
        now = [fingerprint(self._hosted[index].gradient) for index in self._fingerprints]
        found = first_difference(list(self._fingerprints.values()), now)
        return None if found is None else self._hosted[list(self._fingerprints)[found]].name

    def scale(self, factor: float) -> bool:
        """What was submitted can come from nowhere else than ``.grad``, if the daemon dies: it is dropped."""
        if self._begun:
            self._policy.on_use(gone=bool(self._gone))
        if self._gone:
            return True
        self._multiply(factor)
        self.abandon()
        return False

    def _is_present(self, gradient: torch.Tensor) -> bool:
        return not self._tombstones.is_one(gradient)

    def abandon(self) -> None:
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
        self._unwaited.clear()
        self._forget_grown()
        self._drop_tombstones()

    def close(self) -> None:
        super().close()
        self._drop_tombstones()

    def _drop_tombstones(self) -> None:
        for parameter in self._hosted:
            if self._tombstones.is_one(parameter.tensor.grad):
                parameter.tensor.grad = None

    def _start_over(self) -> None:
        self.abandon()
        if self._lost:
            raise tombstone.gone(self._hosted[min(self._lost)].name)

    def _hand_over(self, indices: Sequence[int]) -> None:
        stays = Stays.UNTIL_PACKED if self._sharding is None else Stays.UNTIL_OVER
        for index in indices:
            gradient = self._gradient(index)
            assert gradient is not None, "it was taken"
            self._held[index] = gradient.detach()
            piece = (gradient.data_ptr(), 0, gradient.numel(), index, DATA_TYPES[gradient.dtype])
            left = self._attachment.hand_over_on_gpu(piece, self._streams[index], stays)
            if self._sharding is None:
                self._on_left(left)

    def _on_left(self, indices: Sequence[int]) -> None:
        """Gradients whose packing was launched."""
        for index in indices:
            del self._held[index]  # whoever has its memory shows in the count of its references
            tensor = self._hosted[index].tensor
            if tensor.grad is not None and self._goes(index):
                cuda.keep_for_stream(tensor.grad, self._attachment.pack_stream())
                tensor.grad = self._tombstones.instead_of(tensor.grad)
                self._gone.add(index)

    def _wait_end(self) -> StepResult:
        self._is_state_sent = False
        self._forget_grown()
        # They stay the loop's: nobody frees them before they are packed.
        present = [(index, parameter.gradient) for index, parameter in enumerate(self._hosted)]
        rest = {index: gradient.detach() for index, gradient in present if gradient is not None}
        self._held = rest | self._held
        self._room.between_steps()
        return self._attachment.wait_verdict()
