"""Parameters whose GPU memory others have for a while, and what tells those who use one meanwhile."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import torch

from superoffload._core.error import Error
from superoffload._core.gpu_attachment import GpuAttachment
from superoffload.torch import cuda
from superoffload.torch.gpu.published import published_of
from superoffload.torch.gpu.state_dicts import StateDicts
from superoffload.torch.guards.reads import UseWatch
from superoffload.torch.hooks import weakly
from superoffload.torch.ranks import shards
from superoffload.torch.ranks.shards import HostedParameter


class Suspension:
    """Of an attachment between two steps, the last of which is over. ``hook``: forward.py's."""

    def __init__(
        self,
        attachment: GpuAttachment,
        hosted: list[HostedParameter],
        device: torch.device,
        hook: Callable[["_Meanwhile"], list[Any]],
    ) -> None:
        self._attachment, self._device = attachment, device
        self._hosted, self._hook = hosted, hook
        # Parameters that the daemon's memory has whole; those that stream see to themselves.
        self._whole = {
            index: parameter.tensor
            for index, parameter in enumerate(hosted)
            if parameter.rows is None
            and not attachment.streamed_units[index]
            and not shards.is_sharded(parameter.tensor)
        }
        self._is_sharded = any(shards.is_sharded(parameter.tensor) for parameter in hosted)
        self._values_back: Callable[[], None] | None = None
        self._meanwhile: _Meanwhile | None = None

    @property
    def is_on(self) -> bool:
        return self._meanwhile is not None

    def check(self) -> None:
        """Raises Error while the parameters have no GPU memory."""
        if self.is_on:
            raise _refused("parameters have no GPU memory since release()")

    def begin(self) -> None:
        """Raises Error, with all as before, where the daemon copies or the driver cannot map memory."""
        cuda.synchronize(self._device)
        self._attachment.suspend()
        self._meanwhile = _Meanwhile(self._attachment, self._hosted, self._whole)
        self._handles = self._hook(self._meanwhile)
        self._values_back = self._attachment.values_back
        self._attachment.values_back = self._give_values_back

    def end(self) -> None:
        """Raises Error, RESOURCE_EXHAUSTED, where there is no memory; all is as before."""
        cuda.release_cached(self._device)
        self._attachment.resume()
        self._attachment.values_back = self._values_back
        self._end_watch()

    def _end_watch(self) -> None:
        meanwhile, self._meanwhile = self._meanwhile, None
        if meanwhile is not None:
            meanwhile.close()
            for handle in self._handles:
                handle.remove()

    def before_close(self) -> None:
        """Shards stay where FSDP has them, so they need the memory again; others are on the CPU afterwards."""
        if self._is_sharded and self.is_on:
            self.end()

    def _give_values_back(self) -> None:
        with contextlib.suppress(Error):
            self.before_close()
        if self.is_on:
            self._end_watch()
            for index, tensor in self._whole.items():
                tensor.data = published_of(self._attachment, index, tensor).clone()
        if self._values_back is not None:
            self._values_back()


class _Meanwhile:
    """A GPU that computes with what is gone ends the process. So nobody gets that far."""

    def __init__(
        self, attachment: GpuAttachment, hosted: list[HostedParameter], whole: dict[int, torch.Tensor]
    ) -> None:
        self._attachment, self._hosted, self._whole = attachment, hosted, whole
        self._ids = {id(parameter.tensor) for parameter in hosted}
        self._state_dicts = StateDicts(whole, self)
        self._uses = UseWatch(hosted, weakly(self._on_use, passes=2))
        self._uses.begin()

    def close(self) -> None:
        self._uses.end()
        self._state_dicts.close()

    def before_forward(self, module: torch.nn.Module) -> None:
        if not self._ids.isdisjoint(map(id, module.parameters())):
            raise _refused(f"parameters of a {type(module).__name__} have no GPU memory since release()")

    def after_forward(self, module: torch.nn.Module, output: Any) -> None:
        """As `ForwardWaits`."""

    def on_traced(self) -> None:
        raise _refused("a function is compiled whose parameters may have no GPU memory since release()")

    def _on_use(self, tensor: torch.Tensor, indices: Sequence[int]) -> None:
        names = sorted(self._hosted[index].name for index in indices)
        raise _refused(f"parameter {' or '.join(names)} has no GPU memory since release()")

    def value(self, index: int) -> torch.Tensor:
        return published_of(self._attachment, index, self._whole[index]).clone()

    def load(self, index: int, value: torch.Tensor) -> bool:
        raise _refused(f"parameter {self._hosted[index].name} cannot be loaded into: it has no GPU memory")


def _refused(why: str) -> Error:
    return Error(
        grpc.StatusCode.FAILED_PRECONDITION,
        f"{why}; call the optimizer's resume() first. model.state_dict() has the values meanwhile",
    )
