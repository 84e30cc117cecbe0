"""Builds one of our optimizers in an object of somebody else's class, which is then of both classes; or leaves it."""

import functools
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grpc
import torch

from superoffload._core.error import Error
from superoffload.stand_ins import counterparts, named_groups, options
from superoffload.stand_ins.counterparts import Counterpart, NoCounterpart
from superoffload.torch.guards.grad_scale import ATTRIBUTES
from superoffload.torch.live import ParametersChanged
from superoffload.torch.optimizer import Optimizer

# Of what we refuse: what the class that was asked for does not mind. Memory: where a rank alone would have none, the
# others would go on with ours.
_OURS_ALONE = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.RESOURCE_EXHAUSTED)
_OURS_ALONE_IN_RANKS = (grpc.StatusCode.UNIMPLEMENTED,)

_said: set[str] = set()


def build(self: Any, initialize: Callable[..., None], arguments: Sequence[Any], named: Mapping[str, Any]) -> None:
    """``initialize``: the constructor that was called, with ``arguments`` and ``named``."""
    asked = type(self)
    bound = inspect.signature(initialize).bind(self, *arguments, **named)
    bound.apply_defaults()
    (_, parameters), *others = ((name, bound.arguments[name]) for name in list(bound.arguments)[1:])
    groups = named_groups.repeatable(parameters)
    try:
        if _is_for_deepspeed(sys._getframe(2).f_globals.get("__name__", "")):
            raise NoCounterpart("DeepSpeed's engine has weights of its own")
        counterpart = counterparts.find(asked, dict(others))
        _become(self, asked, counterpart, groups)
        _say_hosted(self, asked, counterpart)
        return
    except NoCounterpart as error:
        reason = str(error)
    except Error as error:
        if error.code not in (_OURS_ALONE_IN_RANKS if _ranks() > 1 else _OURS_ALONE):
            raise
        reason = error.message
    self.__class__ = asked
    self.__dict__.clear()
    _say(f"{_name(asked)} stays as it is: {reason}")
    initialize(self, groups, **dict(others))


def _become(self: Any, asked: type, counterpart: Counterpart, groups: Any) -> None:
    self.__class__ = _of_both(counterpart.cls, asked)  # type: ignore[arg-type]  # looks at __hash__ of its objects
    counterpart.cls.__init__(self, named_groups.copies(groups), **{**counterpart.arguments, **options.chosen()})
    for name, value in counterpart.shown.items():
        self.defaults.setdefault(name, value)
        for group in self.param_groups:
            group.setdefault(name, value)


@functools.cache
def _of_both(ours: Any, asked: type) -> type:
    """Ours, of which ``isinstance`` says that it is what was asked for."""
    return type(asked.__name__, (_StandIn, ours, asked), {"__module__": asked.__module__, "__doc__": ours.__doc__})


class _StandIn(Optimizer):
    """What comes before ours, and before what was asked for."""

    __setstate__ = torch.optim.Optimizer.__setstate__

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """What the script has written to parameters counts, as with what it has asked for."""
        loss = None
        of_scaler = {name: value for name, value in vars(self).items() if name in ATTRIBUTES}

        def compute() -> Any:
            nonlocal loss
            loss = None if closure is None else closure()
            return loss

        # Not super(): torch has put hooks around the step of the class between, and calls them around this one already.
        try:
            return Optimizer.step(self, compute)
        except ParametersChanged as error:
            _say(f"{error.message.partition(',')[0]}: that counts, also where it is less precise than the masters")
        self.push_params()
        self.__dict__.update(of_scaler)
        Optimizer.step(self)
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(named_groups.added(self.param_groups, param_group))


def _is_for_deepspeed(caller: str) -> bool:
    """Whether its engine builds the optimizer, or is given it: accelerate's launcher and the Trainer say so before."""
    launched = os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true"
    trainer = sys.modules.get("transformers.integrations.deepspeed")
    return (
        caller.startswith("deepspeed.") or launched or (trainer is not None and trainer.deepspeed_config() is not None)
    )


def _ranks() -> int:
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def _say_hosted(self: Any, asked: type, counterpart: Counterpart) -> None:
    if os.environ.get("LOCAL_RANK", "0") == "0":
        count = len(self.hosted_parameters())
        _say(f"{_name(asked)} is superoffload's {counterpart.cls.__name__}, with {count} parameters")


def _say(text: str) -> None:
    """Once: some loops build an optimizer for each parameter."""
    if text not in _said:
        _said.add(text)
        print(f"superoffload: {text}", file=sys.stderr, flush=True)


def _name(asked: type) -> str:
    """As it is imported: its module is in a package that has it as well."""
    return f"{asked.__module__.rpartition('.')[0]}.{asked.__name__}"
