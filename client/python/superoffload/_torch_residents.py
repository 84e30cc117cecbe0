"""How many of the last buckets to keep resident on the GPU: as few as make the trainer wait for nothing."""

_PATIENCE = 3  # steps with a stall before another bucket becomes resident
_CONTENT = 200  # steps without one before it is tried with one fewer
_STALL = 0.01  # of a step's time


class ResidentTuner:
    """Decides after each step. ``limit``: of buckets."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._least = 0  # fewer are known to stall
        self._stalled = 0  # steps in a row
        self._smooth = 0
        self.count = 0

    def after_step(self, stall_seconds: float, step_seconds: float) -> bool:
        """Whether ``count`` has changed."""
        if stall_seconds > _STALL * step_seconds:
            self._stalled, self._smooth = self._stalled + 1, 0
            self._least = max(self._least, min(self.count + 1, self._limit))
        else:
            self._stalled, self._smooth = 0, self._smooth + 1
        if self._stalled >= _PATIENCE and self.count < self._limit:
            self.count += 1
        elif self._smooth >= _CONTENT and self.count > self._least:
            self.count -= 1
        else:
            return False
        self._stalled = self._smooth = 0
        return True

    def refuse(self) -> None:
        """There was no memory for ``count``."""
        self._limit = self.count = max(0, self.count - 1)
        self._least = min(self._least, self._limit)
