"""Steps of an optimizer: gradients that come in pieces, from here and from programs of XLA, until the verdict."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import grpc
import jax
import jax.numpy as jnp

from superoffload._core import run, run_step, skips
from superoffload._core.attachment import Attachment
from superoffload._core.error import Error
from superoffload._core.resident_buckets import ResidentBuckets
from superoffload._core.step_result import StepResult, VerdictKind
from superoffload.jax import arrays, ffi, streams, tree
from superoffload.jax.groups import Groups
from superoffload.jax.hosted_tree import HostedTree
from superoffload.jax.tree import HostedLeaf


class Stepping:
    """``hosted``: whose leaves are hosted, and which of them offloaded layers hand over. ``group``: of the run.

    ``residents``: of a GPU; None: there is none.
    """

    def __init__(
        self,
        attachment: Attachment,
        hosted: HostedTree,
        groups: Groups,
        group: run.Group | None,
        residents: ResidentBuckets | None,
    ) -> None:
        self._attachment = attachment
        self._group = group
        self._residents = residents
        self._hosted = hosted.hosted
        self._gpu = hosted.gpu
        self._groups = groups
        self._claimed = hosted.is_claimed
        self._last_result: StepResult | None = None
        self._skipped: dict[VerdictKind, int] = {kind: 0 for kind in VerdictKind if kind.skipped}
        self._steps_inside = 0  # of jit, that are known
        self.prepare()

    def prepare(self) -> None:
        """The open step, or the next one, has the hyper-parameters that are due by now."""
        scalars = self._groups.scalars(self._attachment.scalar_names, self._attachment.committed_steps)
        for group, values in enumerate(scalars):
            self._attachment.set_scalars(group, values)

    def sync(self) -> None:
        """Takes notice of steps inside of jit, and comes back from one that the daemon's death has cut off.

        Raises Error when a step is prepared whose verdict is not known.
        """
        if self._attachment.undecided:
            self._attachment.settle()
        if self._attachment.come_back():
            self.prepare()
            self.keep_residents()
        self._look_inside()

    def finish(
        self,
        given: Sequence[Any] | None,
        gradient_scale: float,
        max_grad_norm: float,
        check_parameters: Callable[[], None] | None,
    ) -> StepResult:
        """``given``: gradients of the leaves; those that have come before are ignored."""
        with self._settled(self._attachment.committed_steps):
            with contextlib.suppress(Exception):  # of a program that failed: of ours arrived() tells
                jax.effects_barrier()
            with run_step.told(self._group, self._attachment):
                if check_parameters is not None:
                    check_parameters()
                self._hand_over_rest(given)
            result = self._end(gradient_scale, max_grad_norm)
            self._count(result)
            self.prepare()
        self.keep_residents()
        return result

    def _end(self, gradient_scale: float, max_grad_norm: float) -> StepResult:
        """All gradients have come."""
        with run_step.told(self._group, self._attachment):
            self._attachment.arrived()  # or what came last was refused
            self.prepare()  # programs of XLA may have made steps since it was called last
        if self._group is None:
            self._attachment.end_step(gradient_scale, max_grad_norm)
        else:
            run_step.end_step(self._attachment, self._group, gradient_scale, max_grad_norm)
        return self._attachment.wait_step()

    @functools.cached_property
    def _publish(self) -> Callable[[], list[Any]]:
        there = {index: leaf for index, leaf in enumerate(self._hosted) if not leaf.streams}
        shapes = {index: leaf.form for index, leaf in there.items()}
        publish = functools.partial(ffi.publish, self._attachment.trainer, shapes)
        return jax.jit(publish, out_shardings=[leaf.sharding for leaf in there.values()])

    def published_on_gpu(self) -> list[Any]:
        """The parameters of the last step, once they are there; arrays without elements for those that stream."""
        values = iter(jax.block_until_ready(self._publish()))
        return [streams.nothing(leaf, self._gpu) if leaf.streams else next(values) for leaf in self._hosted]

    def _hand_over_rest(self, given: Sequence[Any] | None) -> None:
        on_gpu: dict[int, Any] = {}
        for index, (leaf, came) in enumerate(zip(self._hosted, self._attachment.arrived(), strict=True)):
            if came == leaf.elements:
                continue
            gradient = None if given is None else given[index]
            if came or gradient is None and (given is None or self._claimed(leaf.name)):
                raise self._missing(leaf, came)
            if gradient is None:
                self._attachment.set_absent([index])
                continue
            if self._gpu is not None:
                on_gpu[index] = jax.device_put(gradient, self._gpu).astype(leaf.dtype)
                continue
            if leaf.sharding is not None and self._group is not None:
                gradient = arrays.sharded_as(gradient, leaf.sharding)
            dtype = self._attachment.optimizer.parameters[index].dtype
            parts = arrays.pieces_of(gradient, leaf.dtype, leaf.part)
            self._attachment.hand_over([(part.ctypes.data, first, part.size, index, dtype) for first, part in parts])
        if on_gpu:
            self._hand_over_on_gpu(on_gpu)

    def _hand_over_on_gpu(self, gradients: Mapping[int, Any]) -> None:
        """By the call that programs make; waits until it was made."""
        try:
            ffi.hand_over(self._attachment.trainer, list(gradients), list(gradients.values()), None, [])
            jax.effects_barrier()
        except Exception:
            self._attachment.arrived()  # raises the error that the call has ended with
            raise

    def _missing(self, leaf: HostedLeaf, came: int) -> Error:
        part = f"{came} of {leaf.elements} elements of the gradient" if came else "no gradient"
        remedy = (
            "its offloaded layer did not run in this backward pass (with index= for each layer of a stack)"
            if self._claimed(leaf.name)
            else "pass finish(gradients), or make its layer an offloaded one"
        )
        return Error(grpc.StatusCode.FAILED_PRECONDITION, f"{part} of {leaf.name} came since the last step: {remedy}")

    def traced(
        self, found: Sequence[Any], gradient_scale: Any, max_grad_norm: float, live: Sequence[Any] | None
    ) -> tuple[list[Any], StepResult]:
        """A step inside of jit; returns the parameters.

        ``found``: gradients of the leaves, or None. ``live``: what the loop has of the leaves.
        """
        tree.check_one_device(self._hosted)
        tree.check_none_streams(self._hosted)
        ffi.check_devices(max((jax.typeof(leaf).sharding.mesh.size for leaf in found if leaf is not None), default=1))
        own = {
            index: jnp.asarray(gradient, leaf.dtype)
            for index, (leaf, gradient) in enumerate(zip(self._hosted, found, strict=True))
            if gradient is not None
        }
        schedules = self._groups.schedules(self._attachment.scalar_names)
        present = {} if live is None or self._gpu is not None else dict(enumerate(live))  # a GPU's are not compared
        return ffi.step(
            self._attachment.trainer,
            own,
            present,
            [leaf.form for leaf in self._hosted],
            schedules,
            gradient_scale,
            max_grad_norm,
        )

    @contextlib.contextmanager
    def _settled(self, committed_steps: int) -> Iterator[None]:
        """An exception leaves no step open, and says what became of it."""
        try:
            yield
        except BaseException as error:
            note = "it is not known whether the step was committed, because the daemon does not answer"
            with contextlib.suppress(Error):
                self.quiesce()
                note = "the step was not committed; the parameters are those before it"
                if self._attachment.committed_steps > committed_steps:
                    note = "the step was committed; pull_params() returns its parameters"
            if self._attachment.undecided:
                note = (
                    "the step is prepared, and other processes may have committed it; build the optimizer anew on all, "
                    "which agree on it"
                )
            if hasattr(error, "add_note"):  # Python 3.11
                error.add_note(f"superoffload: {note}")
            raise

    def abandon(self) -> None:
        """Drops what was handed over since the last step."""
        with contextlib.suppress(Exception):  # of a program that failed; its caller has seen it
            jax.effects_barrier()
        self.quiesce()

    def quiesce(self) -> None:
        """No step is open."""
        result = self._attachment.settle()
        if result is not None and result != self._last_result:
            self._count(result)
        self.prepare()

    def restored(self) -> None:
        """The state is that of another moment."""
        self._last_result = None
        self.prepare()
        self.keep_residents()

    def keep_residents(self) -> None:
        """Another daemon has none, nor one that has taken the state from elsewhere. No step is open."""
        if self._residents is not None:
            self._residents.keep(self.quiesce)

    def _count(self, result: StepResult) -> None:
        self._last_result = result
        skips.count_skip(result, self._skipped)

    @property
    def last_result(self) -> StepResult | None:
        self._look_inside()
        return self._last_result

    def skipped_steps(self) -> dict[VerdictKind, int]:
        inside = self._look_inside()
        return {kind: count + inside[kind] for kind, count in self._skipped.items()}

    def _look_inside(self) -> dict[VerdictKind, int]:
        """Takes notice of steps that ran inside of jit; returns how many of them were skipped."""
        step = self._attachment.look()
        if step.steps != self._steps_inside:
            self._steps_inside, self._last_result = step.steps, StepResult.of(step.verdict)
        return {kind: step.skips[kind] for kind in VerdictKind if kind.skipped}
