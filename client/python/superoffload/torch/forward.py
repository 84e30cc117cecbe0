"""Waits, bucket by bucket, for the parameters that a forward pass is about to read.

The tail of an optimizer step then hides behind the head of the next forward pass. A hook before the forward of every
module has the GPU's stream wait for the module's own parameters, and for those of its submodules whose own hooks do not
run: modules that are never called (as torch.nn.MultiheadAttention uses its output projection), and compiled ones. What
FSDP gathers waits where the all-gather begins, on its stream.
"""

import sys
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from superoffload._core.gpu_attachment import GpuAttachment
from superoffload.torch import cuda, fsdp
from superoffload.torch.parameters import HostedParameter

# Of torch._dynamo.eval_frame: a call of what was compiled; by older releases' name, too.
_COMPILED_REGION = ("compile_wrapper", "_fn")

_alive: "weakref.WeakSet[ForwardWaits]" = weakref.WeakSet()


@torch.compiler.assume_constant_result
def _on_traced() -> None:
    """Called for real while torch.compile traces a module's forward; what it makes of it will not call any hook."""
    for waits in list(_alive):
        waits.on_traced()


def _make_hooks(waits: "weakref.ref[ForwardWaits]") -> tuple[Callable[..., None], Callable[..., None]]:
    """Before a module's forward, and before its state_dict(). A model must not keep its optimizer alive."""

    def before_forward(module: torch.nn.Module, _: object) -> None:
        if torch.compiler.is_compiling():
            _on_traced()
            return
        alive = waits()
        if alive is not None:
            alive.before_forward(module)

    def before_state_dict(*_: object) -> None:
        alive = waits()
        if alive is not None:
            alive.wait_all()

    return before_forward, before_state_dict


def _modules_called_eagerly() -> list[torch.nn.Module]:
    """Those being called by this thread, from the outside up to where a compiled region is entered."""
    modules: list[torch.nn.Module] = []
    entered = False
    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        name = frame.f_code.co_name
        if name in _COMPILED_REGION and frame.f_globals.get("__name__") == "torch._dynamo.eval_frame":
            entered = True
            modules = []  # those before were inside
        elif frame.f_code is torch.nn.Module._call_impl.__code__:
            modules.append(frame.f_locals["self"])
        frame = frame.f_back
    return modules if entered else []


class ForwardWaits:
    def __init__(self, attachment: GpuAttachment, hosted: list[HostedParameter]) -> None:
        self._attachment = attachment
        self._hosted = hosted
        self._buckets = {id(parameter.tensor): parameter.buckets for parameter in hosted}
        self._called: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # modules whose own hook waits for them
        self._needs: weakref.WeakKeyDictionary[torch.nn.Module, frozenset[int]] = weakref.WeakKeyDictionary()
        self._guarded: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # whose state_dict() waits
        self._readers: set[int] = set()  # streams on which modules were called since the last step
        self._pending: dict[int, set[int]] = {}  # by stream: buckets it has not waited for since the last step
        self._step_ended = False
        self._traced = False
        self._unseen = False  # something is compiled that no module's call surrounds
        fsdp.watch(self, (parameter.tensor for parameter in hosted))
        before_forward, self._before_state_dict = _make_hooks(weakref.ref(self))
        self._handle = torch.nn.modules.module.register_module_forward_pre_hook(before_forward)
        _alive.add(self)

    def close(self) -> None:
        fsdp.forget(self)
        self._handle.remove()
        _alive.discard(self)

    def before_step_end(self) -> None:
        """The next parameters come once what was launched to read the present ones has run, evaluation included."""
        for stream in self._readers | {cuda.current_stream(self._hosted[0].tensor)}:
            self._attachment.pack_after(stream)

    def on_step_end(self) -> None:
        """Parameters are on their way."""
        self._pending.clear()
        self._readers.clear()
        self._step_ended = True
        if self._unseen:
            self.wait_all()

    def on_traced(self) -> None:
        """Some module was called that will not call its hook: those that are being called around it wait for it.

        Which one is not known, and the same module may be called both ways. So from now on only those around it, and
        modules that torch.compile has wrapped, count as having hooks.
        """
        self.wait_all()
        self._traced = True
        self._needs.clear()
        self._called = weakref.WeakSet(_modules_called_eagerly())
        covered = frozenset[int]().union(*(self._of(module) for module in self._called))
        self._unseen |= len(covered) < len(self._attachment.optimizer.layout.buckets)

    def _of(self, module: torch.nn.Module) -> frozenset[int]:
        own = {bucket for p in module.parameters(recurse=False) for bucket in self._buckets.get(id(p), ())}
        for child in module.children():
            if child not in self._called:
                own |= self._of(child)
        return frozenset(own)

    def _calls_its_hook(self, module: torch.nn.Module) -> None:
        self._called.add(module)
        self._needs.clear()
        for part in module.modules():
            if part not in self._guarded and any(id(p) in self._buckets for p in part.parameters(recurse=False)):
                part.register_state_dict_pre_hook(self._before_state_dict)
                self._guarded.add(part)

    def before_forward(self, module: torch.nn.Module) -> None:
        if module not in self._called and (not self._traced or "_orig_mod" in module._modules):
            self._calls_its_hook(module)
        needs = self._needs.get(module)
        if needs is None:
            needs = self._needs[module] = self._of(module)
        if needs:
            self._readers.add(cuda.current_stream(self._hosted[0].tensor))
            if self._step_ended:
                self._wait(needs)

    def before_all_gather(self, parameters: Iterable[torch.Tensor], streams: Iterable[Any]) -> None:
        """FSDP is about to gather these shards on the streams: it waits for no parameters but those."""
        needs = frozenset(bucket for parameter in parameters for bucket in self._buckets.get(id(parameter), ()))
        if not needs:
            return
        for stream in {cuda.handle(stream) for stream in streams}:
            self._readers.add(stream)
            if self._step_ended:
                self._wait_on(stream, needs)

    def _wait(self, buckets: frozenset[int] | None) -> None:
        self._wait_on(cuda.current_stream(self._hosted[0].tensor), buckets)

    def _wait_on(self, stream: int, buckets: frozenset[int] | None) -> None:
        pending = self._pending.setdefault(stream, set(range(len(self._attachment.optimizer.layout.buckets))))
        for bucket in sorted(pending if buckets is None else pending & buckets, reverse=True):
            self._attachment.await_parameters(bucket, stream)
            pending.discard(bucket)

    def wait_all(self) -> None:
        """Has the current stream wait for all parameters."""
        self._readers.add(cuda.current_stream(self._hosted[0].tensor))
        if self._step_ended:
            self._wait(None)
