"""How an optimizer uses the GPU that its parameters are on."""

import dataclasses
from collections.abc import Mapping
from typing import Literal

import torch

from superoffload._core import gradient_memory
from superoffload._core.gpu_attachment import MOVERS, Mover

# Of the blocks of a model: all stay on the GPU, all stream to it, this part of them streams, up to 1; or those stream
# that have no room beside what the loop needs.
Weights = Literal["auto", "resident", "streamed"] | float

_CASTS = ("auto", "fused", "gpu_fp32")


@dataclasses.dataclass(frozen=True)
class GpuOptions:
    """How an optimizer uses the GPU that its parameters are on; the defaults measure and adapt."""

    # Where parameters that are on the CPU or on meta move to when the optimizer is built, as in "cuda:0": so that they
    # never exist twice on the GPU. Buffers and frozen parameters stay where they are, but for frozen shards on meta.
    # None: they are there already.
    device: str | int | torch.device | None = None
    # Values of parameters on meta, by the names of model.named_parameters(): a state dict, or anything that loads each
    # tensor when it is asked for. Of sharded ones they are whole, or DTensors that are distributed as the parameters.
    weights: Mapping[str, torch.Tensor] | None = dataclasses.field(default=None, repr=False, compare=False)
    # Who copies: "daemon", from and to GPU memory that it maps; "trainer", from and to memory that the daemon shares;
    # "direct", the kernel that packs gradients stores into that memory; "auto" measures them.
    mover: Mover = "auto"
    # Buckets that may be on their way out at once, at most 16. "auto": 16 where those take at most 2 % more of the free
    # memory of the GPU than 8, else 8.
    device_slots: int | Literal["auto"] = "auto"
    # Of the last buckets, whose parameters the next forward needs first: their optimizer state is on the GPU, too, and
    # updated there. "auto": none while the trainer waits for nothing, else as many as fit in what the loop leaves of
    # `resident_share`, given back where the loop needs it.
    resident_buckets: int | Literal["auto"] = "auto"
    # The daemon takes in the gradients of so many steps at once where a bucket is resident, at most 31: it keeps them
    # in a log, of 2 bytes per parameter and step, and reads the state once for all. 1: there is no log. Where the host
    # has no room for logs, "auto" above takes shorter ones. Never changes results.
    resident_steps: int = 4
    # For each bucket's gradient in the host's memory, 1 or 2. With one slot a gradient waits until the daemon has taken
    # in the one before it: that saves 2 bytes per parameter, and a step reads the state twice (46 bytes per parameter
    # instead of 34 where the state takes 12).
    # "in_place": one, over which the daemon publishes the parameters, so that they take no memory of their own. That
    # saves 2 more and moves 32, all of it after the step's verdict; there are no logs. "auto": two, one or "in_place",
    # the first that the daemon has room for. Buckets with a log have two. Never changes results.
    gradient_slots: gradient_memory.Slots = "auto"
    # Where gradients of several backward passes of a step are added up: "gpu", in .grad, as ever; "daemon", in its
    # memory: each pass's leave at once, so that the GPU never has those of all parameters. It fetches a sum, adds, and
    # sends it back, in the order of the passes, rounded as .grad would be: the same bits. With cast="gpu_fp32" sums are
    # fp32, and not rounded in between. The loop finds no gradients in .grad; of one rank, and without a GradScaler.
    accumulate: Literal["gpu", "daemon"] = "gpu"
    # Of GPU memory, for blocks whose weights stream: one is read, while those that are read next are on their way to
    # the others. Never changes results.
    stream_slots: int = 3
    # Of the GPU's memory, which may be in use where "auto" fills it: with resident buckets, or with blocks that stay.
    resident_share: float = 0.92
    # Dtype in which gradients leave the GPU: "fused", their own; "gpu_fp32", fp32; "auto": whichever leaves sooner, as
    # measured when the optimizer is created, or their own with accumulate="daemon". Else it never changes results.
    cast: Literal["auto", "fused", "gpu_fp32"] = "auto"

    def __post_init__(self) -> None:
        if self.mover not in MOVERS:
            raise ValueError(f"mover is {self.mover!r} but must be one of {', '.join(map(repr, MOVERS))}")
        if self.cast not in _CASTS:
            raise ValueError(f"cast is {self.cast!r} but must be 'auto', 'fused' or 'gpu_fp32'")
        if not 0 <= self.resident_share <= 1:
            raise ValueError(f"resident_share is {self.resident_share!r} but must be 0 to 1")
        gradient_memory.check(self.gradient_slots, self.resident_steps)
        if self.accumulate not in ("gpu", "daemon"):
            raise ValueError(f"accumulate is {self.accumulate!r} but must be 'gpu' or 'daemon'")
        if self.accumulate == "daemon" and self.mover == "daemon":
            raise ValueError("with accumulate='daemon' the trainer copies: mover must not be 'daemon', too")
        if self.accumulate == "daemon" and self.gradient_slots == "in_place":
            raise ValueError(
                "with accumulate='daemon' sums lie in gradient slots before a step ends, so that parameters cannot: "
                "gradient_slots must not be 'in_place'"
            )
        if not self.stream_slots >= 1:
            raise ValueError(f"stream_slots is {self.stream_slots} but must be at least 1")


def check_weights(weights: Weights) -> None:
    """Raises ValueError for what says nothing of where weights are."""
    if weights in ("auto", "resident", "streamed") or (isinstance(weights, (int, float)) and 0 <= weights <= 1):
        return
    raise ValueError(
        f"weights is {weights!r} but must be 'auto', 'resident', 'streamed' or the part that streams, 0 to 1"
    )
