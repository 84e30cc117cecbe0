"""Steps that were skipped: counted, and told to the user when there are many in a row."""

from superoffload._core import warn
from superoffload._core.step_result import StepResult, VerdictKind

_WARN_AFTER_SKIPS = 4


def count_skip(result: StepResult, skipped_steps: dict[VerdictKind, int]) -> None:
    """Counts a step that may have been skipped, and warns when many in a row were."""
    if not result.kind.skipped:
        return
    skipped_steps[result.kind] += 1
    skips = result.consecutive_skips
    if skips >= _WARN_AFTER_SKIPS and skips & (skips - 1) == 0:
        reason = "gradients are infinite or NaN"
        if result.kind == VerdictKind.SKIP_OVERFLOW:
            reason = "the gradient norm is beyond what the second moment can hold"
        warn.warn(f"{skips} steps in a row were skipped: {reason}")
