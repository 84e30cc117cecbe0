"""Waits, bucket by bucket, for the parameters that a forward pass is about to read.

The tail of an optimizer step then hides behind the head of the next forward pass. A hook before the forward of every
module has the GPU's stream wait for the module's own parameters, and for those of its submodules whose own hooks do not
run: modules that are never called (as torch.nn.MultiheadAttention uses its output projection), and those within
compiled ones, which wait for all that is inside (compiled.py). What FSDP gathers waits where the all-gather begins, on
its stream.

A CUDA graph calls no hooks when it is replayed, so nothing in it waits. In front of a module that
torch.cuda.make_graphed_callables has captured, that module's own hook waits for all that is inside. Before any other
replay step() itself has waited. A gradient of parameters that nobody has waited for was computed by code that calls no
hooks either: see were_read().
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import grpc
import torch

from superoffload._core import warn
from superoffload._core.error import Error
from superoffload._core.gpu_attachment import GpuAttachment
from superoffload.torch import cuda
from superoffload.torch.gpu import calling, compiled
from superoffload.torch.guards.reads import ReadWatch
from superoffload.torch.hooks import weakly
from superoffload.torch.ranks import fsdp
from superoffload.torch.ranks.shards import HostedParameter

_READS_WATCHED = 3  # steps

# Of a module: buckets that its hook waits for, and modules compiled in place inside of it, which wait for their own.
_Needs = tuple[frozenset[int], tuple[torch.nn.Module, ...]]


class _Hooked(Protocol):
    """Whose hooks are called around every module."""

    def before_forward(self, module: torch.nn.Module) -> None: ...
    def after_forward(self, module: torch.nn.Module, output: Any) -> None: ...
    def on_traced(self) -> None: ...


_alive: "weakref.WeakSet[_Hooked]" = weakref.WeakSet()


def _on_traced() -> None:
    """Called for real while torch.compile traces a module's forward; what it makes of it will not call any hook."""
    for waits in list(_alive):
        waits.on_traced()


# As torch.compiler.assume_constant_result does, which imports torch._dynamo at once: half a second.
_on_traced._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _before_forward(waits: _Hooked) -> Callable[..., None]:
    call = weakly(waits.before_forward, passes=1)

    def before_forward(module: torch.nn.Module, _: object) -> None:
        if torch.compiler.is_compiling():
            _on_traced()
            return
        call(module)

    return before_forward


def _after_forward(waits: _Hooked) -> Callable[..., None]:
    call = weakly(waits.after_forward, passes=2)

    def after_forward(module: torch.nn.Module, _: object, output: object) -> None:
        if not torch.compiler.is_compiling():
            call(module, output)

    return after_forward


def _before_compiled(module: torch.nn.Module) -> None:
    for waits in list(_alive):
        waits.before_forward(module)


def _after_compiled(module: torch.nn.Module, output: object) -> None:
    for waits in list(_alive):
        waits.after_forward(module, output)


class _AroundCompiled:
    """A handle, as torch's: it is called around modules that are compiled, too."""

    def __init__(self, waits: _Hooked) -> None:
        self._waits = weakref.ref(waits)
        _alive.add(waits)

    def remove(self) -> None:
        waits = self._waits()
        if waits is not None:
            _alive.discard(waits)


def hook(waits: _Hooked, outputs: bool) -> list[Any]:
    """Has it called around every module, until the handles are removed. ``outputs``: after the call, too."""
    handles: list[Any] = [_AroundCompiled(waits)]
    handles.append(torch.nn.modules.module.register_module_forward_pre_hook(_before_forward(waits)))
    if outputs:
        handles.append(torch.nn.modules.module.register_module_forward_hook(_after_forward(waits), always_call=True))
    return handles


def call_around(module: torch.nn.Module) -> None:
    """Has all of them called around a module that is compiled in place."""
    compiled.call_around(module, _before_compiled, _after_compiled)


class Streams(Protocol):
    """Parameters that stream, for which others wait; see streams.py."""

    def streams(self, parameter: torch.Tensor) -> bool: ...
    def before_forward(self, module: torch.nn.Module) -> None: ...
    def after_forward(self, module: torch.nn.Module, output: Any) -> None: ...
    def on_traced(self, around: Sequence[torch.nn.Module]) -> None: ...
    def before_all_gather(self, parameters: Iterable[torch.Tensor], streams: Iterable[int]) -> None: ...
    def on_step_end(self) -> None: ...
    def check_read(self, parameter: HostedParameter) -> None: ...
    def close(self) -> None: ...


class ForwardWaits:
    """The hooks of one attachment, which hold it weakly, and what each stream has waited for."""

    def __init__(self, attachment: GpuAttachment, hosted: list[HostedParameter], streams: Streams) -> None:
        self._attachment = attachment
        self._hosted = hosted
        self._streams = streams
        resident = [parameter for parameter in hosted if not self._streams.streams(parameter.tensor)]
        self._buckets = {id(parameter.tensor): parameter.buckets for parameter in resident}
        self._every = frozenset(bucket for parameter in resident for bucket in parameter.buckets)
        self._called: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # modules whose own hook waits for them
        self._needs: weakref.WeakKeyDictionary[torch.nn.Module, _Needs] = weakref.WeakKeyDictionary()
        self._guarded: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # whose state_dict() waits
        self._readers: set[int] = set()  # streams on which modules were called since the last step
        self._pending: dict[int, set[int]] = {}  # by stream: buckets it has not waited for since the last step
        self._unread = self._all()  # buckets for which no stream has waited since they changed, or since the beginning
        self._step_ended = False
        self._inside: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # of compiled modules: they call no hooks
        self._only_around = False  # of other modules, only those around what was compiled count as calling their hooks
        self._captured: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # a replay may not call their hooks
        self._unseen = False  # some reader of parameters calls no hook: step() waits for them
        self._steps = 0
        self._reads = ReadWatch(resident, weakly(self.on_read, passes=1))
        fsdp.watch(self, (parameter.tensor for parameter in hosted))
        self._before_state_dict = weakly(self.wait_all)
        self._handles = hook(self, outputs=len(resident) < len(hosted))

    def close(self) -> None:
        fsdp.forget(self)
        self._reads.end()
        self._streams.close()
        for handle in self._handles:
            handle.remove()

    def before_step_end(self) -> None:
        """The next parameters come once what was launched to read the present ones has run, evaluation included."""
        for stream in self._readers | {cuda.current_stream(self._hosted[0].tensor)}:
            self._attachment.end_after(stream)

    def on_step_end(self, changed: bool, watched: bool) -> None:
        """Parameters are on their way, if they have changed. ``watched``: the loop may do something new."""
        self._pending.clear()
        self._readers.clear()
        self._streams.on_step_end()
        if changed:
            self._unread = self._all()
        self._step_ended |= changed
        self._steps += 1
        if self._unseen:
            self.wait_all()
        elif changed and (watched or self._steps <= _READS_WATCHED):
            self._reads.begin()

    def on_read(self, index: int) -> None:
        """No module was called since step(), and somebody is about to use a parameter: that waits."""
        if not self._unseen:
            warn.warn(
                f"parameter {self._hosted[index].name} was used between step() and the next forward pass: from now on "
                "step() waits for all new parameters, without overlap with forward (optimizer.synchronize() before "
                "such code keeps the overlap of other steps)"
            )
        self._unseen = True
        self.wait_all()

    def on_traced(self) -> None:
        """Some module was called that will not call its hook: those that are being called around it wait for it.

        Which one is not known. It is part of the compiled module that is being called; or any, where a function was
        compiled, and may be called both ways. Then only those around it count as having hooks from now on.
        """
        self.wait_all()
        around = calling.modules_around_compiled()
        self._streams.on_traced(around)
        self._only_around |= not around or not compiled.is_compiled(around[0])
        if self._only_around:
            self._called = weakref.WeakSet(around) - self._captured
        for module in [part for each in around for part in compiled.outermost(each)]:
            self._calls_its_hook(module)
            call_around(module)
        self._needs.clear()
        covered = frozenset[int]().union(*(self._of(module) for module in self._called))
        self._unseen |= len(covered) < len(self._every)

    def _of(self, module: torch.nn.Module) -> frozenset[int]:
        own = self._buckets_of(module.parameters(recurse=False))
        return own.union(*(self._of(child) for child in module.children() if child not in self._called))

    def _buckets_of(self, parameters: Iterable[torch.Tensor]) -> frozenset[int]:
        return frozenset(bucket for parameter in parameters for bucket in self._buckets.get(id(parameter), ()))

    def _calls_its_hook(self, module: torch.nn.Module) -> None:
        if module not in self._captured:
            self._called.add(module)
        if compiled.is_compiled(module):
            inside = set(module.modules()) - {module}
            self._inside.update(inside)
            self._called -= inside
        self._needs.clear()
        for part in module.modules():
            if part not in self._guarded and any(id(p) in self._buckets for p in part.parameters(recurse=False)):
                part.register_state_dict_pre_hook(self._before_state_dict)
                self._guarded.add(part)

    def before_forward(self, module: torch.nn.Module) -> None:
        if cuda.is_capturing():
            self._on_captured(module)
            self._streams.before_forward(module)
            return
        hooked = module not in self._inside and (compiled.is_compiled(module) or not self._only_around)
        if hooked and module not in self._called and module not in self._captured:
            self._calls_its_hook(module)
        found = self._needs.get(module)
        if found is None:
            inside = (part for part in module.modules() if part is not module and part in self._called)
            found = self._needs[module] = (self._of(module), tuple(filter(compiled.is_in_place, inside)))
        needs, in_place = found
        for part in in_place:
            call_around(part)
        if needs:
            self._wait(needs)
        self._streams.before_forward(module)

    def after_forward(self, module: torch.nn.Module, output: Any) -> None:
        self._streams.after_forward(module, output)

    def check_read(self, parameter: HostedParameter) -> None:
        """Raises Error where the gradient that autograd has of it may have come of another one's values."""
        self._streams.check_read(parameter)

    def _on_captured(self, module: torch.nn.Module) -> None:
        needs = self._buckets_of(module.parameters())
        if not needs:
            return
        graphed = calling.graphed_module()
        if module is not graphed:
            self._captured.add(module)
            self._called.discard(module)
            self._needs.clear()
        if graphed is None:
            self._unseen = True
        self._check_there(needs)

    def on_captured_gradient(self, parameter: HostedParameter) -> None:
        """Autograd captures a whole backward pass. What it makes of the parameters, step() will find in ``.grad``."""
        self._unseen = True
        self._check_there(frozenset(parameter.buckets))

    def _check_there(self, buckets: frozenset[int]) -> None:
        """Raises Error where the first replay could read parameters of the last step that are still on their way.

        torch waits for all streams before it captures. So what one of them has waited for is there.
        """
        if self._step_ended and not self._unread.isdisjoint(buckets):
            raise Error(
                grpc.StatusCode.FAILED_PRECONDITION,
                "a CUDA graph is being captured while parameters of the last step are on their way, and its replays "
                "would not wait for them; call the optimizer's synchronize() before the capture",
            )

    def were_read(self, parameter: HostedParameter) -> bool:
        """Autograd has a gradient of it. False: nobody has waited for its value, which may have been half new.

        Before the first step ends that does no harm, and shows what to expect of the steps to come.
        """
        if self._unread.isdisjoint(parameter.buckets):
            return True
        self._unseen = True
        return not self._step_ended

    def before_all_gather(self, parameters: Iterable[torch.Tensor], streams: Iterable[Any]) -> None:
        """FSDP is about to gather these shards on the streams: it waits for no parameters but those."""
        parameters = list(parameters)
        handles = {cuda.handle(stream) for stream in streams}
        self._streams.before_all_gather(parameters, handles)
        needs = self._buckets_of(parameters)
        if not needs:
            return
        if cuda.is_capturing():
            self._unseen = True
            self._check_there(needs)
            return
        for stream in handles:
            self._wait_on(stream, needs)

    def _wait(self, buckets: frozenset[int] | None) -> None:
        self._wait_on(cuda.current_stream(self._hosted[0].tensor), buckets)

    def _wait_on(self, stream: int, buckets: frozenset[int] | None) -> None:
        self._reads.end()
        self._readers.add(stream)
        if self._step_ended:
            pending = self._pending.get(stream)
            if pending is None:
                pending = self._pending[stream] = self._all()
            for bucket in sorted(pending if buckets is None else pending & buckets, reverse=True):
                self._attachment.await_parameters(bucket, stream)
                pending.discard(bucket)
        self._unread -= self._unread if buckets is None else buckets

    def _all(self) -> set[int]:
        return set(self._every)

    def wait_all(self) -> None:
        """Has the current stream wait for all parameters."""
        self._wait(None)
