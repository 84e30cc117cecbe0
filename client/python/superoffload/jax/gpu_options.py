"""How an optimizer uses the GPU that its parameters are on."""

import dataclasses
from collections.abc import Iterator

import grpc

from superoffload._core import gradient_memory
from superoffload._core.error import Error
from superoffload._core.gradient_memory import GradientMemory


@dataclasses.dataclass(frozen=True)
class GpuOptions:
    """How an optimizer uses the GPU that its parameters are on; nothing of it changes results."""

    # Of the last buckets, whose parameters the next forward needs first: their optimizer state is on the GPU, too, and
    # updated there. XLA takes most of the GPU's memory when it starts, so that how many fit in the rest is known to who
    # has set XLA_PYTHON_CLIENT_MEM_FRACTION.
    resident_buckets: int = 0
    # The daemon takes in the gradients of so many steps at once where a bucket is resident, at most 31: it keeps them
    # in a log, of 2 bytes per bf16 parameter and step, and reads the state once for all. 1: there is no log.
    resident_steps: int = 4
    # For each bucket's gradient in the host's memory, 1 or 2. With one slot a gradient waits until the daemon has taken
    # in the one before it: that saves 2 bytes per bf16 parameter, and a step reads the state twice. "in_place": one,
    # over which the daemon publishes the parameters, so that they take no memory of their own: 2 bytes less, and all of
    # the step's passes after its verdict; there are no logs. "auto": the first of 2, 1 and "in_place" that the daemon
    # has memory for. Buckets with a log have two.
    gradient_slots: gradient_memory.Slots = "auto"

    def __post_init__(self) -> None:
        if not self.resident_buckets >= 0:
            raise ValueError(f"resident_buckets is {self.resident_buckets} but must be 0 or more")
        gradient_memory.check(self.gradient_slots, self.resident_steps)

    def check_streams(self) -> None:
        """Raises Error for what weights that stream do not have."""
        if why := gradient_memory.why_not_streamed(self.gradient_slots, self.resident_buckets):
            raise Error(grpc.StatusCode.UNIMPLEMENTED, why)

    def gradient_memories(self, streams: bool) -> Iterator[GradientMemory]:
        """What an optimizer to be created has for gradients. Where the daemon has no memory for it, the next one.

        ``streams``: whether parameters do, which have to lie beside their gradients then.
        """
        logged = self.resident_buckets if self.resident_steps > 1 else 0
        logs = (logged, self.resident_steps + 1) if logged > 0 else (0, 0)
        for slots in (2, 1):
            if self.gradient_slots in ("auto", slots):
                yield GradientMemory(False, slots, *logs)
        if self.gradient_slots == "in_place" or self.gradient_slots == "auto" and not streams:
            yield GradientMemory(gradient_slots=1, in_place=True)
