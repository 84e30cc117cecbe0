"""Lion: names of scalars and state, and defaults. What optimizers have in common: optimizer.py."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from superoffload.torch import groups
from superoffload.torch.algorithm import Algorithm
from superoffload.torch.keywords import Keywords
from superoffload.torch.optimizer import Optimizer

if TYPE_CHECKING:
    from typing_extensions import Unpack  # typing has it from Python 3.11 on


def _scalars(group: Mapping[str, Any]) -> dict[str, float]:
    beta1, beta2 = group["betas"]
    values = {"lr": group["lr"], "beta1": beta1, "beta2": beta2, "weight_decay": group["weight_decay"]}
    return groups.numbers(values)


def _group_values(scalars: Mapping[str, float]) -> dict[str, Any]:
    values = {name: scalars[name] for name in ("lr", "weight_decay")}
    return {**values, "betas": (scalars["beta1"], scalars["beta2"])}


def _algorithm(daemon_name: str, name: str, state_bits: int = 32) -> Algorithm:
    return Algorithm(
        daemon_name=daemon_name,
        name=name,
        moments=("exp_avg",),
        scalars=_scalars,
        group_values=_group_values,
        in_bfloat16=state_bits == 32,
        masters_in_bfloat16=True,
        state_bits=state_bits,
    )


class Lion(Optimizer):
    """Lion (Chen et al. 2023) in the daemon, on fp32 masters; arguments that are not Lion's own as for AdamW.

    A step moves every element by ``lr`` in the direction of the sign of its momentum, so that learning rates are 3 to
    10 times smaller than AdamW's and weight decay as much larger. State is one moment: 8 bytes per parameter, 6 with
    ``state_dtype=torch.bfloat16``.
    """

    algorithm = _algorithm("lion", "Lion")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        **options: "Unpack[Keywords]",
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay}, {}, **options)


class Lion8bit(Lion):
    """Lion whose moment is kept as those of AdamW8bit: 5 bytes of state per parameter."""

    algorithm = _algorithm("lion_8bit", "Lion8bit", state_bits=8)
