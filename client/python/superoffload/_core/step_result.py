"""What the daemon reports on a step."""

import dataclasses
import enum
import math

from superoffload._core import structures


class VerdictKind(enum.IntEnum):
    """What a step turned out to be."""

    COMMIT = 1
    CLIP = 2
    SKIP_NON_FINITE = 3
    SKIP_OVERFLOW = 4
    SKIP_ABANDONED = 5

    @property
    def skipped(self) -> bool:
        return self > VerdictKind.CLIP


@dataclasses.dataclass(frozen=True)
class StepResult:
    """The daemon's report on one step."""

    kind: VerdictKind
    step: int  # attempts so far, skipped ones included
    committed_steps: int
    # L2 norm of the unscaled gradients before clipping; NaN when abandoned, or when the daemon died between committing
    # the step and saying so. Likewise clip_coefficient.
    global_norm: float
    clip_coefficient: float
    speculated_buckets: int
    republished_buckets: int
    consecutive_skips: int

    @staticmethod
    def of(verdict: structures.Verdict) -> "StepResult":
        return StepResult(
            kind=VerdictKind(verdict.kind),
            step=verdict.step,
            committed_steps=verdict.committed_steps,
            global_norm=verdict.global_norm,
            clip_coefficient=verdict.clip_coefficient,
            speculated_buckets=verdict.speculated_buckets,
            republished_buckets=verdict.republished_buckets,
            consecutive_skips=verdict.consecutive_skips,
        )

    @staticmethod
    def unseen(step: int, committed_steps: int) -> "StepResult":
        """The step was committed, and the daemon died before it could say so: what it was is not known."""
        return StepResult(
            kind=VerdictKind.COMMIT,
            step=step,
            committed_steps=committed_steps,
            global_norm=math.nan,
            clip_coefficient=math.nan,
            speculated_buckets=0,
            republished_buckets=0,
            consecutive_skips=0,
        )
