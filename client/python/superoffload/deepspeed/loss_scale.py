"""The factor by which an fp16 loss is scaled, so that small gradients are not 0."""

import sys

from superoffload.deepspeed.config import LossScaleFields

_FACTOR = 2.0


class LossScale:
    """Static, or as large as gradients allow: halved where they overflow, doubled after so many steps without."""

    def __init__(self, fields: LossScaleFields) -> None:
        self._fields = fields
        self.scale = fields.static or fields.initial
        self._step = 0
        self._last_overflow = -1
        self._hysteresis = fields.hysteresis  # so many overflows until the scale is halved

    def update(self, overflow: bool, says: bool) -> None:
        """A step is over, which did nothing if it was an ``overflow``. ``says``: whether this rank tells the user.

        Raises RuntimeError where the scale cannot become smaller.
        """
        if self._fields.static == 0:
            self._on_overflow(says) if overflow else self._on_step()
        self._step += 1

    def _on_overflow(self, says: bool) -> None:
        before = self.scale
        if self._hysteresis > 1:
            self._hysteresis -= 1
        elif self.scale == self._fields.least:
            raise RuntimeError(
                f"the loss scale is fp16.min_loss_scale, {self.scale:g}, and gradients still overflow; train in bf16, "
                "or with a smaller learning rate"
            )
        else:
            self.scale = max(self.scale / _FACTOR, self._fields.least)
        self._last_overflow = self._step
        if says:
            print(
                f"superoffload: gradients overflow, the step is skipped; loss scale {before:g}, then {self.scale:g}",
                file=sys.stderr,
            )

    def _on_step(self) -> None:
        if self._fields.refills_hysteresis:
            self._hysteresis = self._fields.hysteresis
        steady = self._step - self._last_overflow - 1
        if steady > 0 and steady % self._fields.window == 0:
            self._hysteresis = self._fields.hysteresis
            self.scale *= _FACTOR

    def state_dict(self) -> dict[str, float]:
        return {
            "scale": self.scale,
            "step": self._step,
            "last_overflow": self._last_overflow,
            "hysteresis": self._hysteresis,
        }

    def load_state_dict(self, state: dict[str, float]) -> None:
        if self._fields.static == 0:
            self.scale = state["scale"]
        self._step, self._last_overflow = int(state["step"]), int(state["last_overflow"])
        self._hysteresis = int(state["hysteresis"])
