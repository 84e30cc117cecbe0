"""Lion: names of scalars, and defaults. What optimizers have in common: optimizer.py."""

from typing import TYPE_CHECKING, Any

from superoffload.jax.algorithm import Algorithm, Schedule
from superoffload.jax.keywords import Keywords
from superoffload.jax.optimizer import Optimizer

if TYPE_CHECKING:
    from typing_extensions import Unpack  # typing has it from Python 3.11 on

_SCALARS = {"lr": "learning_rate", "beta1": "b1", "beta2": "b2", "weight_decay": "weight_decay"}
_LION = Algorithm("lion", _SCALARS, "weight_decay")
_LION8BIT = Algorithm("lion_8bit", _SCALARS, "weight_decay", state_bits=8)


def lion(
    learning_rate: float | Schedule,
    b1: float = 0.9,
    b2: float = 0.99,
    weight_decay: float = 1e-3,
    mask: Any = None,
    **options: "Unpack[Keywords]",
) -> Optimizer:
    """Lion as optax.lion defines it; arguments as for `adamw`."""
    defaults = {"learning_rate": learning_rate, "b1": b1, "b2": b2, "weight_decay": weight_decay}
    return Optimizer(_LION, defaults, mask, **options)


def lion8bit(
    learning_rate: float | Schedule,
    b1: float = 0.9,
    b2: float = 0.99,
    weight_decay: float = 1e-3,
    mask: Any = None,
    **options: "Unpack[Keywords]",
) -> Optimizer:
    """`lion` whose moment is kept as those of `adamw8bit`."""
    defaults = {"learning_rate": learning_rate, "b1": b1, "b2": b2, "weight_decay": weight_decay}
    return Optimizer(_LION8BIT, defaults, mask, **options)
