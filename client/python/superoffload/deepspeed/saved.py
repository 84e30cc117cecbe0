"""What an engine goes on with, beside its optimizer."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Saved:
    """Of a checkpoint."""

    global_steps: int
    global_samples: int
    skipped_steps: int
    scheduler: dict[str, Any] | None
    loss_scale: dict[str, float] | None
    groups: list[dict[str, Any]]  # of the next step, which the optimizer's own checkpoint does not know yet
    client_state: dict[str, Any]
