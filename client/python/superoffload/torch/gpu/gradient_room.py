"""Whether a GPU can keep a gradient of each parameter until step()."""

from collections.abc import Callable, Sequence

import torch

from superoffload.torch import cuda

# Of the GPU's memory, what backward needs beside gradients and activations.
_FREE_SHARE = 0.1


class GradientRoom:
    """Compares what gradients of ``tensors`` need with what is free. ``is_tombstone``: whether a gradient has gone."""

    def __init__(self, tensors: Sequence[torch.Tensor], is_tombstone: Callable[[torch.Tensor], bool]) -> None:
        self._tensors = tensors
        self._is_tombstone = is_tombstone
        self.between_steps()

    def between_steps(self) -> None:
        """There are no activations now."""
        self._before_forward = self._allocated()

    def holds_gradients(self) -> bool:
        """Whether they fit; it is asked when backward begins.

        Backward frees activations while gradients come. Its peak is at one of its ends, and the first one has fitted.
        """
        needed = sum(tensor.nbytes for tensor in self._tensors if not self._has_gradient(tensor))
        activations = max(0, self._allocated() - self._before_forward)
        device = self._tensors[0].device
        reserve = int(_FREE_SHARE * cuda.total_bytes(device))
        return needed + reserve <= cuda.free_bytes(device) + activations

    def _has_gradient(self, tensor: torch.Tensor) -> bool:
        return tensor.grad is not None and not self._is_tombstone(tensor.grad)

    def _allocated(self) -> int:
        """Bytes on the GPU that torch's tensors are in, but for gradients."""
        if not self._tensors:
            return 0
        kept = sum(
            tensor.grad.nbytes for tensor in self._tensors if tensor.grad is not None and self._has_gradient(tensor)
        )
        return cuda.allocated_bytes(self._tensors[0].device) - kept
