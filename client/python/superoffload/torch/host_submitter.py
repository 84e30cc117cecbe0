"""Submits gradients that are on the CPU."""

from collections.abc import Iterable, Sequence

import grpc
import torch

from superoffload._core import memory
from superoffload._core.attachment import Piece
from superoffload._core.error import Error
from superoffload._core.step_result import StepResult
from superoffload.torch.ranks.shards import DATA_TYPES
from superoffload.torch.submitter import Submitter


def _piece(index: int, gradient: torch.Tensor) -> Piece:
    return gradient.data_ptr(), 0, gradient.numel(), index, DATA_TYPES[gradient.dtype]


class HostSubmitter(Submitter):
    """Gradients are copied to a slot that the daemon shares; ``.grad`` stays the loop's own tensor.

    torch copies them: its threads are there, and would be in the way of others.
    """

    def reset(self) -> None:
        super().reset()
        self._late = False
        self._present: set[int] = set()  # indices of gradients that were taken
        self._digests: dict[int, int] = {}  # of those that are not in the slot, or were scaled since
        self._slot = self.attachment.look().next_slot

    def on_late_gradient(self, index: int) -> None:
        self._late = True  # the daemon may be reading the slot: it is submitted again in step()

    def _gradient(self, index: int) -> torch.Tensor:
        gradient = self.averages.get(index, self.hosted[index].gradient)
        assert gradient is not None, "what was taken and has gone since is outdated"
        return gradient.contiguous()  # itself where it is

    @torch.no_grad()
    def take(self, index: int) -> None:
        gradient, hosted = self.averages.get(index, self.hosted[index].gradient), self.hosted[index]
        if gradient is None:
            return
        if gradient.dtype != hosted.slots[0].dtype and hosted.local.dtype == hosted.theta.dtype:
            raise Error(  # else that is what is told
                grpc.StatusCode.FAILED_PRECONDITION,
                f"the gradient of {hosted.name} is {gradient.dtype}, but was to be {hosted.slots[0].dtype} when the "
                "optimizer was built; set grad_dtype before, or build a new optimizer",
            )
        self._present.add(index)
        if not (self.finishing or self.policy.early):  # it is handed over later
            self._digests |= self._digests_of([index])

    def _digests_of(self, indices: Iterable[int]) -> dict[int, int]:
        gradients = {index: self._gradient(index) for index in indices}
        ranges: list[memory.Range] = [(gradient.data_ptr(), None, gradient.nbytes) for gradient in gradients.values()]
        return dict(zip(gradients, memory.copy_and_digest(ranges, torch.get_num_threads()), strict=True))

    @torch.no_grad()
    def hand_over(self, indices: Sequence[int]) -> None:
        for index in indices:
            slot = self.hosted[index].slots[self._slot]
            slot.copy_(self.averages.get(index, self.hosted[index].gradient))
            self.attachment.hand_over([_piece(index, slot)])

    def outdated(self) -> bool:
        return self._late or any((self.hosted[i].tensor.grad is None) == (i in self._present) for i in self.taken)

    @torch.no_grad()
    def find_edited(self) -> str | None:
        now = self._digests_of(self._digests)
        different = [index for index, digest in self._digests.items() if digest != now[index]]
        if not different:
            in_slot = {index: self._gradient(index) for index in self._present - self._digests.keys()}
            found = self.attachment.find_edited([_piece(*item) for item in in_slot.items()])
            different = [] if found is None else [list(in_slot)[found]]
        return self.hosted[different[0]].name if different else None

    def scale(self, factor: float) -> bool:
        """The slots keep what was submitted, for the daemon and its successors."""
        self.multiply(factor)
        if self._present:
            self._digests = self._digests_of(self._present)
        return bool(self._present)

    def wait_end(self) -> StepResult:
        return self.attachment.wait_step()
