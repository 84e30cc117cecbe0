"""A Hugging Face Trainer, or one that is derived from it, gets our counterpart of its own optimizer.

    trainer = trl.SFTTrainer(...)
    superoffload.stand_ins.trainer.host(trainer, weights="auto")
    trainer.train()

Learning rates, decay and groups of parameters stay those that the Trainer's arguments say.
"""

import inspect
from typing import Any

import torch

from superoffload.stand_ins import counterparts, named_groups
from superoffload.stand_ins.counterparts import Counterpart, NoCounterpart
from superoffload.torch.optimizer import Optimizer
from superoffload.torch.trainer import LogSteps, SaveOnAllRanks


def host(trainer: Any, **options: Any) -> None:
    """Before the Trainer makes its optimizer, which ``optim=`` and others of its arguments say; adds our callbacks.

    ``options``: keyword arguments of superoffload's optimizer. Raises ValueError where the Trainer would use no other
    optimizer than it has, or where the one that it names has no counterpart.
    """
    if trainer.optimizer is not None:
        raise ValueError("the Trainer has an optimizer already: call host() before train(), and pass no optimizers=")
    if trainer.is_deepspeed_enabled:
        raise ValueError("the Trainer's DeepSpeed engine has weights of its own: leave deepspeed= out")
    cls, arguments = trainer.optimizer_cls_and_kwargs or trainer.get_optimizer_cls_and_kwargs(
        trainer.args, trainer.model
    )
    try:
        counterpart = _find(cls, arguments)
    except NoCounterpart as error:
        raise ValueError(
            f"the Trainer's optimizer is {getattr(cls, '__qualname__', cls)}: {error}; choose optim='adamw_torch' or "
            "'adamw_bnb_8bit'"
        ) from error
    ours = _with_names(counterpart.cls), {**counterpart.arguments, **options}
    if trainer.optimizer_cls_and_kwargs is None:
        trainer.get_optimizer_cls_and_kwargs = lambda args, model=None: ours  # Axolotl groups others differently
    else:
        trainer.optimizer_cls_and_kwargs = ours
    trainer.add_callback(LogSteps())
    trainer.add_callback(SaveOnAllRanks())


def _find(cls: Any, arguments: dict[str, Any]) -> Counterpart:
    factory = not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer))
    if factory or {"params", "model", "optimizer_dict"} & arguments.keys():
        raise NoCounterpart("it makes groups of parameters itself")
    bound = inspect.signature(cls).bind((), **arguments)
    bound.apply_defaults()
    return counterparts.find(cls, bound.arguments)


def _with_names(cls: type[Optimizer]) -> type[Optimizer]:
    """The Trainer passes parameters without the names by which blocks stream and messages speak."""

    class Hosted(cls):  # type: ignore[misc,valid-type]
        def __init__(self, params: Any, **named: Any) -> None:
            super().__init__(named_groups.copies(params), **named)

    Hosted.__name__, Hosted.__qualname__, Hosted.__doc__ = cls.__name__, cls.__qualname__, cls.__doc__
    return Hosted
