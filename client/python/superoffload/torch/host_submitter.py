"""Submits gradients that are on the CPU."""

import os

import torch

from superoffload._core import memory
from superoffload._core.step_result import StepResult
from superoffload.torch.submitter import Submitter

_SAMPLE_EVERY_BYTES = 4096


class HostSubmitter(Submitter):
    """Taking a gradient copies it to a slot that the daemon shares; ``.grad`` stays the loop's own tensor."""

    def _reset(self) -> None:
        super()._reset()
        self._late = False
        self._versions: dict[int, tuple[int, int, int]] = {}  # address and versions of gradients that were taken

    def _slot(self, index: int) -> torch.Tensor:
        return self._hosted[index].slots[self._attachment.next_slot]

    def _on_late_gradient(self, index: int) -> None:
        self._late = True  # the daemon may be reading the slot: it is submitted again in step()

    @torch.no_grad()
    def _take(self, index: int) -> None:
        gradient = self._given.get(index, self._hosted[index].gradient)
        if gradient is None:
            return
        self._slot(index).copy_(gradient)
        self._versions[index] = self._version(index, gradient)

    def _version(self, index: int, gradient: torch.Tensor) -> tuple[int, int, int]:
        """What is written to a DTensor counts on the DTensor, and not on the part of this rank."""
        return gradient.data_ptr(), gradient._version, self._hosted[index].tensor.grad._version

    def _outdated(self) -> bool:
        return self._late or any((self._hosted[i].tensor.grad is None) == (i in self._versions) for i in self._taken)

    def _find_edited(self) -> str | None:
        samples: list[tuple[int, torch.Tensor]] = []
        whole: list[tuple[int, torch.Tensor]] = []
        for index, taken in self._versions.items():
            gradient, slot = self._hosted[index].gradient, self._slot(index)
            assert gradient is not None, "what was taken and has gone since is outdated"
            if gradient.dtype != slot.dtype or not gradient.is_contiguous():
                whole.append((index, gradient.to(slot.dtype).contiguous()))
            elif self._policy.early and taken == self._version(index, gradient):
                samples.append((index, gradient))
            else:
                whole.append((index, gradient))
        for group, every in ((samples, _SAMPLE_EVERY_BYTES), (whole, 0)):
            ranges = [(gradient.data_ptr(), self._slot(index).data_ptr(), gradient.nbytes) for index, gradient in group]
            random = int.from_bytes(os.urandom(4), "little")
            found = memory.find_difference(ranges, torch.get_num_threads(), every, random)
            if found is not None:
                return self._hosted[group[found][0]].name
        return None

    def _submit(self, bucket: int) -> None:
        self._attachment.gradient_ready(bucket)

    def _wait_end(self) -> StepResult:
        return self._attachment.wait_step()
