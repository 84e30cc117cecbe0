"""Submits gradients that are on the CPU."""

import grpc
import torch

from superoffload._core import memory
from superoffload._core.error import Error
from superoffload._core.step_result import StepResult
from superoffload.torch.fingerprint import digests
from superoffload.torch.submitter import Submitter


class HostSubmitter(Submitter):
    """Taking a gradient copies it to a slot that the daemon shares; ``.grad`` stays the loop's own tensor."""

    def _reset(self) -> None:
        super()._reset()
        self._late = False
        self._submitted: set[int] = set()  # indices of gradients that were taken
        self._scaled: dict[int, int] = {}  # digests of those that are now another than what was taken

    def _slot(self, index: int) -> torch.Tensor:
        return self._hosted[index].slots[self._attachment.next_slot]

    def _on_late_gradient(self, index: int) -> None:
        self._late = True  # the daemon may be reading the slot: it is submitted again in step()

    @torch.no_grad()
    def _take(self, index: int) -> None:
        gradient = self._given.get(index, self._hosted[index].gradient)
        if gradient is None:
            return
        slot, hosted = self._slot(index), self._hosted[index]
        if gradient.dtype != slot.dtype and hosted.local.dtype == hosted.theta.dtype:  # else that is what is told
            raise Error(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"the gradient of {hosted.name} is {gradient.dtype}, but was to be {slot.dtype} when the "
                "optimizer was built; set grad_dtype before, or build a new optimizer",
            )
        slot.copy_(gradient)
        self._submitted.add(index)

    def _outdated(self) -> bool:
        return self._late or any((self._hosted[i].tensor.grad is None) == (i in self._submitted) for i in self._taken)

    def _find_edited(self) -> str | None:
        if self._scaled:
            different = [index for index, digest in self._digests().items() if digest != self._scaled[index]]
            return self._hosted[different[0]].name if different else None
        gradients = self._gradients()
        ranges = [(gradient.data_ptr(), self._slot(i).data_ptr(), gradient.nbytes) for i, gradient in gradients.items()]
        found = memory.find_difference(ranges, torch.get_num_threads())
        return None if found is None else self._hosted[list(gradients)[found]].name

    def _gradients(self) -> dict[int, torch.Tensor]:
        """As they are now, of those that were taken, row-major."""
        result = {}
        for index in self._submitted:
            gradient = self._hosted[index].gradient
            assert gradient is not None, "what was taken and has gone since is outdated"
            result[index] = gradient.contiguous()
        return result

    def _digests(self) -> dict[int, int]:
        gradients = self._gradients()
        return dict(zip(gradients, digests(list(gradients.values())).tolist(), strict=True))

    def scale(self, factor: float) -> bool:
        """The slots keep what was submitted, for the daemon and its successors."""
        self._multiply(factor)
        if self._submitted:
            self._scaled = self._digests()
        return bool(self._submitted)

    def _submit(self, bucket: int) -> None:
        self._attachment.gradient_ready(bucket)

    def _wait_end(self) -> StepResult:
        return self._attachment.wait_step()
