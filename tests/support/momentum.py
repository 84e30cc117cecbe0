"""SGD with momentum as no release has it: in bf16, in 8 bits with an fp32 scale per block, and by whole matrices.

The daemon is superoffloadd_with_test_algorithms; test_algorithms.cc has the arithmetic. Run as a module it is one rank
of a run on gloo: python -m tests.support.momentum STORE RANK RANKS OUT SCENARIO...; each scenario is a JSON object of
arguments of `train`, and OUT gets a list of what it returned.
"""

import numpy as np
import torch
from tests.support import process_group, small_training
from tests.support.build_directory import BUILD

from superoffload.torch import groups
from superoffload.torch.algorithm import Algorithm
from superoffload.torch.optimizer import Optimizer

BINARY = BUILD / "tests/support/superoffloadd_with_test_algorithms"
BLOCK = 256


def _algorithm(daemon_name: str, name: str, *moments: str, matrices: bool = False) -> Algorithm:
    return Algorithm(
        daemon_name=daemon_name,
        name=name,
        moments=moments,
        scalars=lambda group: groups.numbers({"lr": group["lr"], "momentum": group["momentum"]}),
        group_values=dict,
        matrices=matrices,
    )


class _Momentum(Optimizer):
    def __init__(self, params, lr: float = 1e-2, momentum: float = 0.9, **options) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum}, {}, **options)


class Momentum16(_Momentum):
    algorithm = _algorithm("test_momentum_bf16", "Momentum16", "momentum_buffer")


class Momentum8(_Momentum):
    algorithm = _algorithm("test_momentum_8bit", "Momentum8", "momentum_buffer")


class MomentumMatrix(_Momentum):
    algorithm = _algorithm("test_momentum_matrix", "MomentumMatrix", "momentum_buffer", matrices=True)


def fma(a: torch.Tensor | float, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Rounds once, but where fp64 lies between two floats: no step here comes to such a number."""
    return (torch.as_tensor(a, dtype=torch.float32).double() * b.double() + c.double()).float()


class Formula(torch.optim.Optimizer):
    """The same, element by element."""

    def __init__(self, params, kind: str, lr: float = 1e-2, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})
        self._round = getattr(self, f"_{kind.lower()}")

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                moment = self.state[p].get("moment", torch.zeros_like(p))
                moment = fma(group["momentum"], moment, p.grad)
                moment[moment.abs() < 2.0**-100] = 0
                p.copy_(fma(-group["lr"], self._direction(moment), p))
                self.state[p].update(self._round(moment))

    def _direction(self, moment: torch.Tensor) -> torch.Tensor:
        if self._round != self._momentummatrix:
            return moment
        squares = np.add.accumulate(np.square(moment.flatten().double().numpy()))  # one after the other
        return moment / torch.tensor(np.sqrt(np.float64(np.float32(squares[-1])) / moment.numel())).float()

    @staticmethod
    def _momentummatrix(moment: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"moment": moment, "momentum_buffer": moment}

    @staticmethod
    def _momentum16(moment: torch.Tensor) -> dict[str, torch.Tensor]:
        rounded = moment.bfloat16()
        return {"moment": rounded.float(), "momentum_buffer": rounded}

    @staticmethod
    def _momentum8(moment: torch.Tensor) -> dict[str, torch.Tensor]:
        blocks = torch.nn.functional.pad(moment.flatten(), (0, -moment.numel() % BLOCK)).view(-1, BLOCK)
        scales = blocks.abs().amax(1)
        codes = (blocks / scales.unsqueeze(1) * 64).nan_to_num(0).round()

        def shaped(values: torch.Tensor) -> torch.Tensor:
            return values.flatten()[: moment.numel()].view(moment.shape)

        moment = shaped(codes * scales.unsqueeze(1) / 64)
        return {"moment": moment, "momentum_buffer": moment}


def model() -> torch.nn.Linear:
    torch.manual_seed(3)
    return torch.nn.Linear(40, 30)


def train(
    rank: int,
    *,
    kind: str,
    steps: int,
    shards: bool = True,
    save: str | None = None,
    restore: str | None = None,
) -> dict[str, dict]:
    """Trains to ``steps``, saves a checkpoint, and goes on for two.

    ``shards``: by fully_shard; else all ranks have the model, and the same gradients.
    """
    module = model()
    options = {"name": f"{kind}-{shards}-{bool(restore)}", "restore": restore}
    if shards:
        torch.distributed.fsdp.fully_shard(module)
    else:
        options["replicas"] = True
    optimizer = globals()[kind](module.named_parameters(), **options)
    for step in range(optimizer.committed_steps, steps + 2):
        if step == steps and save is not None:
            optimizer.save_checkpoint(save)
        small_training.steps(module, optimizer, step)
    state = optimizer.state_tensors()
    optimizer.close()
    whole = {name: p.full_tensor() if shards else p.detach() for name, p in module.named_parameters()}
    return {"weights": whole, "state": state}


if __name__ == "__main__":
    import torch.distributed.fsdp  # only here: it takes a second

    process_group.run_scenarios(lambda rank, scenario: train(rank, **scenario))
