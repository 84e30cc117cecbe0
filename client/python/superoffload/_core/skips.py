"""Steps that were skipped: counted, and told to the user when there are many in a row."""

from superoffload._core import warn
from superoffload._core.step_result import StepResult, VerdictKind

_WARN_AFTER_SKIPS = 4


def count_skip(result: StepResult, skipped_steps: dict[VerdictKind, int], expected: bool = False) -> None:
    """Counts a step that may have been skipped, and warns of the first one, and when many in a row were.

    ``expected``: as by a GradScaler, which looks for its scale in this way.
    """
    if not result.kind.skipped:
        return
    first = not any(skipped_steps.values())
    skipped_steps[result.kind] += 1
    skips = result.consecutive_skips
    reason = "gradients are infinite or NaN"
    if result.kind == VerdictKind.SKIP_OVERFLOW:
        reason = "the gradient norm is beyond what the second moment can hold"
    if skips >= _WARN_AFTER_SKIPS and skips & (skips - 1) == 0:
        warn.warn(f"{skips} steps in a row were skipped: {reason}")
    elif first and not expected:
        warn.warn(f"a step was skipped: {reason}; parameters and moments stay, and skipped_steps counts (said once)")
