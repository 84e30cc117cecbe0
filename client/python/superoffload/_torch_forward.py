"""Waits, bucket by bucket, for the parameters that a forward pass is about to read.

The tail of an optimizer step then hides behind the head of the next forward pass. A hook before the forward of every
module has the GPU's stream wait for the module's own parameters, and for those of its submodules that are never called
themselves (as torch.nn.MultiheadAttention uses its output projection).
"""

import weakref
from collections.abc import Callable

import torch

from superoffload import _torch_gpu
from superoffload._gpu_attachment import GpuAttachment
from superoffload._torch_parameters import HostedParameter


def _make_hooks(waits: "weakref.ref[ForwardWaits]") -> tuple[Callable[..., None], Callable[..., None]]:
    """Before a module's forward, and before its state_dict(). A model must not keep its optimizer alive."""

    def before_forward(module: torch.nn.Module, _: object) -> None:
        alive = waits()
        if alive is not None:
            alive.before_forward(module)

    def before_state_dict(*_: object) -> None:
        alive = waits()
        if alive is not None:
            alive.wait_all()

    return before_forward, before_state_dict


class ForwardWaits:
    def __init__(self, attachment: GpuAttachment, hosted: list[HostedParameter]) -> None:
        self._attachment = attachment
        self._hosted = hosted
        self._buckets = {id(parameter.tensor): parameter.buckets for parameter in hosted}
        self._called: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # modules whose own hook waits for them
        self._needs: weakref.WeakKeyDictionary[torch.nn.Module, frozenset[int]] = weakref.WeakKeyDictionary()
        self._pending: dict[int, set[int]] = {}  # by stream: buckets it has not waited for since the last step
        self._step_ended = False
        before_forward, self._before_state_dict = _make_hooks(weakref.ref(self))
        self._handle = torch.nn.modules.module.register_module_forward_pre_hook(before_forward)

    def close(self) -> None:
        self._handle.remove()

    def on_step_end(self) -> None:
        """Parameters are on their way."""
        self._pending.clear()
        self._step_ended = True

    def _of(self, module: torch.nn.Module) -> frozenset[int]:
        own = {bucket for p in module.parameters(recurse=False) for bucket in self._buckets.get(id(p), ())}
        for child in module.children():
            if child not in self._called:
                own |= self._of(child)
        return frozenset(own)

    def before_forward(self, module: torch.nn.Module) -> None:
        if module not in self._called:
            self._called.add(module)
            self._needs.clear()
            if any(id(p) in self._buckets for p in module.parameters(recurse=False)):
                module.register_state_dict_pre_hook(self._before_state_dict)
        if not self._step_ended:
            return
        needs = self._needs.get(module)
        if needs is None:
            needs = self._needs[module] = self._of(module)
        if needs:
            self._wait(needs)

    def _wait(self, buckets: frozenset[int] | None) -> None:
        stream = _torch_gpu.current_stream(self._hosted[0].tensor)
        pending = self._pending.setdefault(stream, set(range(len(self._attachment.optimizer.layout.buckets))))
        for bucket in sorted(pending if buckets is None else pending & buckets, reverse=True):
            self._attachment.await_parameters(bucket, stream)
            pending.discard(bucket)

    def wait_all(self) -> None:
        """Has the current stream wait for all parameters."""
        if self._step_ended:
            self._wait(None)
