"""DeepSpeed's learning rate schedules: the same rates at the same steps, beginnings included."""

import math
from collections.abc import Sequence
from typing import Any

import torch

_MORE_TEXT = "must have one value, or one for each parameter group"


def make(kind: str, optimizer: torch.optim.Optimizer, params: dict[str, Any]) -> Any:
    """A scheduler of DeepSpeed's, or else of torch.optim.lr_scheduler. Raises ValueError."""
    every = {cls.__name__: cls for cls in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)}
    cls = every.get(kind) or getattr(torch.optim.lr_scheduler, kind, None)
    if not isinstance(cls, type):
        raise ValueError(
            f"scheduler.type is {kind!r} but must be one of {', '.join(every)}, or of torch.optim.lr_scheduler"
        )
    try:
        return cls(optimizer, **params)
    except TypeError as error:
        raise ValueError(f"scheduler.params: {error}") from error


class Schedule:
    """Counts steps; derived classes say which rates the next one has.

    ``last_batch_iteration``: the last step, -1 before the first one; it is all that a checkpoint has.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, last_batch_iteration: int) -> None:
        self.optimizer = optimizer
        self.last_batch_iteration = last_batch_iteration
        self._last_lr: list[float] = []

    def rates(self) -> list[float]:
        """Of each parameter group, after ``last_batch_iteration``."""
        raise NotImplementedError

    def begin(self, rates: Sequence[float]) -> None:
        """Of the first step, unless the schedule goes on."""
        if self.last_batch_iteration == -1:
            self._set(rates)

    def step(self, last_batch_iteration: int | None = None) -> None:
        following = self.last_batch_iteration + 1
        self.last_batch_iteration = following if last_batch_iteration is None else last_batch_iteration
        self.apply()

    def apply(self) -> None:
        """Sets the optimizer's rates for the next step."""
        self._set(self.rates())

    def get_lr(self) -> list[float]:
        return self.rates()

    def get_last_lr(self) -> list[float]:
        return self._last_lr

    def state_dict(self) -> dict[str, int]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.last_batch_iteration = state["last_batch_iteration"]
        if self.last_batch_iteration >= 0:
            self.apply()

    def _set(self, rates: Sequence[float]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self._last_lr = [float(group["lr"]) for group in self.optimizer.param_groups]


def _by_group(optimizer: torch.optim.Optimizer, field: str, value: Any) -> list[Any]:
    groups = len(optimizer.param_groups)
    if not isinstance(value, (list, tuple)):
        return [value] * groups
    if len(value) != groups:
        raise ValueError(f"scheduler.params.{field} has {len(value)} values, but {groups} groups; it {_MORE_TEXT}")
    return list(value)


def _check_count(field: str, value: Any) -> None:
    if not isinstance(value, int) or value <= 0:
        raise ValueError(f"scheduler.params.{field} is {value!r} but must be a whole number, at least 1")


class LRRangeTest(Schedule):
    """Grows from ``lr_range_test_min_lr``, to find the largest rate with which a model still learns."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        lr_range_test_min_lr: float | Sequence[float] = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        _check_count("lr_range_test_step_size", lr_range_test_step_size)
        self._least = _by_group(optimizer, "lr_range_test_min_lr", lr_range_test_min_lr)
        self._size, self._growth, self._in_stairs = (
            lr_range_test_step_size,
            lr_range_test_step_rate,
            lr_range_test_staircase,
        )
        self.begin(self._least)

    def rates(self) -> list[float]:
        intervals = (self.last_batch_iteration + 1) / self._size
        growth = 1 + self._growth * (math.floor(intervals) if self._in_stairs else intervals)
        return [least * growth for least in self._least]


class _Warmup(Schedule):
    """A part, 0 to 1, of what a rate grows by while it warms up."""

    def __init__(self, optimizer: Any, steps: int, kind: str, last_batch_iteration: int) -> None:
        super().__init__(optimizer, last_batch_iteration)
        _check_count("warmup_num_steps", steps)
        if kind not in ("log", "linear"):
            raise ValueError(f"scheduler.params.warmup_type is {kind!r} but must be 'log' or 'linear'")
        self._warmup, self._kind = max(2, steps), kind

    def _warmed(self) -> float | None:
        """None: it is over."""
        if self.last_batch_iteration >= self._warmup:
            return None
        if self._kind == "linear":
            return self.last_batch_iteration / self._warmup
        return 1.0 / math.log(self._warmup) * math.log(self.last_batch_iteration + 1)


class WarmupLR(_Warmup):
    """From ``warmup_min_lr`` to ``warmup_max_lr``, by default the optimizer's, and constant from then on."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, warmup_num_steps, warmup_type, last_batch_iteration)
        if warmup_max_lr is None:
            warmup_max_lr = [float(group["lr"]) for group in optimizer.param_groups]
        self._least = _by_group(optimizer, "warmup_min_lr", warmup_min_lr)
        self._most = _by_group(optimizer, "warmup_max_lr", warmup_max_lr)
        self.begin(self.rates())

    def rates(self) -> list[float]:
        if self.last_batch_iteration < 0:
            return self._least
        warmed = self._warmed()
        part = self._after_warmup() if warmed is None else warmed
        return [least + (most - least) * part for least, most in zip(self._least, self._most, strict=True)]

    def _after_warmup(self) -> float:
        return 1.0


class WarmupDecayLR(WarmupLR):
    """As WarmupLR, and then down to ``warmup_min_lr`` in a line, which ends with ``total_num_steps``."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self._total = total_num_steps
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)

    def _after_warmup(self) -> float:
        return max(0.0, (self._total - self.last_batch_iteration) / max(1.0, self._total - self._warmup))


class WarmupCosineLR(_Warmup):
    """Shares of the optimizer's rates: from ``warmup_min_ratio`` to 1, and then down a cosine to ``cos_min_ratio``."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, warmup_num_steps, warmup_type, last_batch_iteration)
        self._total, self._first_share, self._last_share = total_num_steps, warmup_min_ratio, cos_min_ratio
        self._whole = [float(group["lr"]) for group in optimizer.param_groups]
        self.begin(self.rates())

    def rates(self) -> list[float]:
        share = self._share()
        return [rate * share for rate in self._whole]

    def _share(self) -> float:
        if self.last_batch_iteration < 0:
            return 0.0
        warmed = self._warmed()
        if warmed is not None:
            return self._first_share + warmed * (1.0 - self._first_share)
        done = min(1.0, (self.last_batch_iteration - self._warmup + 1) / max(1, self._total - self._warmup))
        return max(0.0, self._last_share + (1.0 - self._last_share) * ((1 + math.cos(math.pi * done)) / 2))


class OneCycle(Schedule):
    """Up from ``cycle_min_lr`` to ``cycle_max_lr`` and down again, while momentum goes down and up; then both decay."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        cycle_min_lr: float | Sequence[float],
        cycle_max_lr: float | Sequence[float],
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: float = 2000,
        cycle_second_step_size: float | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: float = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float | Sequence[float] = 0.8,
        cycle_max_mom: float | Sequence[float] = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        second = cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
        if not cycle_first_step_size > 0 or not second >= 0:
            raise ValueError(
                "scheduler.params.cycle_first_step_size must be more than 0, and cycle_second_step_size 0 or more"
            )
        self._sizes = float(cycle_first_step_size), float(second)
        self._stairs = (
            cycle_first_stair_count,
            cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count,
        )
        self._decay_size, self._decay_of_rates, self._decay_of_momenta = decay_step_size, decay_lr_rate, decay_mom_rate
        self._least = _by_group(optimizer, "cycle_min_lr", cycle_min_lr)
        self._most = _by_group(optimizer, "cycle_max_lr", cycle_max_lr)
        self._momenta: list[tuple[float, float]] | None = None
        if cycle_momentum:
            smallest = _by_group(optimizer, "cycle_min_mom", cycle_min_mom)
            self._momenta = list(zip(smallest, _by_group(optimizer, "cycle_max_mom", cycle_max_mom), strict=True))
        self.begin(self._least)
        if self._momenta is not None and last_batch_iteration == -1:
            self._set_momenta([least for least, _ in self._momenta])

    def apply(self) -> None:
        super().apply()
        if self._momenta is not None:
            self._set_momenta(self._momenta_now(self._momenta))

    def rates(self) -> list[float]:
        if not self._is_over():
            height = self._height()
            return [least + (most - least) * height for least, most in zip(self._least, self._most, strict=True)]
        if math.isclose(self._decay_size, 0) or math.isclose(self._decay_of_rates, 0):
            return self._least
        decay = 1 + self._decay_of_rates * self._decayed()
        return [least / decay for least in self._least]

    def _momenta_now(self, bounds: list[tuple[float, float]]) -> list[float]:
        if not self._is_over():
            height = self._height()
            return [most - (most - least) * height for least, most in bounds]
        if math.isclose(self._decay_size, 0) or math.isclose(self._decay_of_momenta, 0):
            return [most for _, most in bounds]
        return [most * (1 + self._decay_of_momenta * self._decayed()) for _, most in bounds]

    def _is_over(self) -> bool:
        return self.last_batch_iteration >= sum(self._sizes)

    def _decayed(self) -> float:
        return (self.last_batch_iteration - sum(self._sizes) + 1) / self._decay_size

    def _height(self) -> float:
        """Between the least and the most, 0 to 1."""
        place = self.last_batch_iteration + 1
        total, rises = sum(self._sizes), self._sizes[0] / sum(self._sizes)
        x = 1.0 + place / total - math.floor(1 + place / total)
        up = x <= rises
        stairs = self._stairs[0 if up else 1]
        if stairs <= 0:
            return x / rises if up else (x - 1) / (rises - 1)
        # Of whole steps: x may be just below where a stair begins.
        within = place % total
        climbed = within / self._sizes[0] if within <= self._sizes[0] else (total - within) / self._sizes[1]
        return math.floor(climbed * stairs) / stairs

    def _set_momenta(self, momenta: Sequence[float]) -> None:
        for group, momentum in zip(self.optimizer.param_groups, momenta, strict=True):
            group["betas"] = (momentum, 0.99)
