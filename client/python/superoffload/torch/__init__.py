"""Optimizers for PyTorch whose state and arithmetic live in superoffloadd.

One changed line::

    optimizer = superoffload.torch.AdamW(model.parameters(), lr=3e-4, max_grad_norm=1.0)

Parameters are bfloat16, float16 or float32, dense, on the CPU or one GPU; fp32 masters and moments never leave the
daemon. Gradients are submitted bucket by bucket while backward runs, and the daemon computes new parameters as soon
as it has them, speculating on the verdict about the step; the result is bit for bit that of an optimizer which waits.

Parameters change in ``step()`` and nowhere else; a gradient belongs to the loop until ``step()``. What a loop can see:

- A gradient that was submitted during backward is compared with what the daemon got before the step is committed. In
  the first steps, and whenever the loop's pattern of calls has changed, nothing leaves early. If the loop has changed
  one, all are submitted again, and from then on in ``step()``.
- Parameters that somebody else has written are an error in ``step()``, before anything is committed. On a GPU
  writes that bump no version (``.data``, collectives) are looked for in two bytes of every 16 KiB.
- A parameter without a gradient in a step is left alone, as in torch: its weights, moments and step count stay.
- On a GPU parameters, row-major only, become views of memory that the daemon's are copied to, together with the tensors
  that share their memory when the optimizer is built. Other processes cannot share it.
- On a GPU a gradient that has left early is NaN until ``step()``, None after it, and ``step()`` does not wait for the
  new parameters: the forward of each module does, on the GPU. Code that reads parameters outside of their module's
  forward calls ``synchronize()`` first.
"""

from superoffload._core import extras

extras.need("torch", "torch")

# ruff: noqa: E402
from superoffload._core.gpu_attachment import GpuReport
from superoffload._core.policies import CheckpointSchedule
from superoffload._core.step_result import StepResult, VerdictKind
from superoffload.torch.adam import Adam, Adam8bit, AdamW, AdamW8bit
from superoffload.torch.gpu.activations import ActivationOffload, offload_activations
from superoffload.torch.gpu.frozen import FrozenBlocks, stream_frozen
from superoffload.torch.gpu.options import GpuOptions
from superoffload.torch.lion import Lion, Lion8bit
from superoffload.torch.pretrained import pretrained_weights

__all__ = [
    "ActivationOffload",
    "Adam",
    "Adam8bit",
    "AdamW",
    "AdamW8bit",
    "CheckpointSchedule",
    "FrozenBlocks",
    "GpuOptions",
    "GpuReport",
    "Lion",
    "Lion8bit",
    "StepResult",
    "VerdictKind",
    "offload_activations",
    "pretrained_weights",
    "stream_frozen",
]
