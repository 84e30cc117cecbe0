"""A plugin for Axolotl: the optimizer that a YAML file names is hosted by superoffloadd.

    plugins: [superoffload.axolotl.Plugin]
    optimizer: adamw_torch        # or adamw_bnb_8bit
    superoffload:                 # keyword arguments of superoffload's optimizer, where there are some
      weights: auto

What it logs besides: superoffload.torch.trainer.LogSteps.
"""

from typing import Any

import pydantic
from axolotl.integrations.base import BasePlugin

from superoffload.stand_ins import options
from superoffload.stand_ins.trainer import host


class Arguments(pydantic.BaseModel):
    """What the plugin adds to Axolotl's configuration."""

    superoffload: dict[str, Any] | None = None

    @pydantic.field_validator("superoffload")
    @classmethod
    def _check(cls, given: dict[str, Any] | None) -> dict[str, Any] | None:
        options.keywords(given or {})
        return given


class Plugin(BasePlugin):
    """Axolotl 0.19 never calls its plugins' `create_optimizer`; the trainer is told before it makes one."""

    def get_input_args(self) -> str:
        return f"{Arguments.__module__}.{Arguments.__qualname__}"

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        host(trainer, **options.keywords(cfg.superoffload or {}))
