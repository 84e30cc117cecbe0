"""What an engine prints: steps_per_print and wall_clock_breakdown."""

import contextlib
import sys
import time
from collections.abc import Iterator

import torch


class Reports:
    """Of one rank; rank 0 prints."""

    def __init__(self, first: bool, every: int | None, times: bool, device: torch.device) -> None:
        self._first, self._every, self._times, self._device = first, every, times, device
        self._milliseconds: dict[str, float] = {}  # of what, since the last step

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Where steps are timed."""
        if not self._times:
            yield
            return
        begun = self._now()
        try:
            yield
        finally:
            self._milliseconds[name] = self._milliseconds.get(name, 0.0) + 1000 * (self._now() - begun)

    def after_step(self, step: int, **values: object) -> None:
        if self._every and step % self._every == 0:
            self.say(", ".join(f"{name}={value}" for name, value in {"step": step, **values}.items()))
        if self._times:
            spent = ", ".join(f"{name} {milliseconds:.2f} ms" for name, milliseconds in self._milliseconds.items())
            self.say(f"time of step {step}: {spent}")
            self._milliseconds.clear()

    def say(self, text: str) -> None:
        if self._first:
            print(f"superoffload: {text}", file=sys.stderr, flush=True)

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
