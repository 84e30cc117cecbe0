"""One rank of runs of DeepSpeed on the CPU: python -m tests.support.deepspeed_saver STORE RANK RANKS OUT

OUT gets a folder for each of SCENARIOS: what save_checkpoint() writes. All train the same model on the same batches.
"""

import os
import pathlib
import sys
from typing import Any

import torch

STEPS = 3
_ADAMW = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
SCENARIOS: dict[str, dict[str, Any]] = {
    "stage_1": {"optimizer": _ADAMW, "zero_optimization": {"stage": 1}},
    "stage_1_bf16": {
        "optimizer": _ADAMW,
        "zero_optimization": {"stage": 1},
        "data_types": {"grad_accum_dtype": "fp32"},
    },
    "stage_2_round_robin": {
        "optimizer": _ADAMW,
        "zero_optimization": {"stage": 2, "round_robin_gradients": True},
    },
    "stage_2_cpu_adam": {
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "adam_w_mode": False}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    },
    "stage_2_lion": {
        "optimizer": {"type": "Lion", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    },
    "stage_3": {
        "optimizer": _ADAMW,
        "zero_optimization": {"stage": 3, "sub_group_size": 300, "stage3_param_persistence_threshold": 0},
    },
}


class Model(torch.nn.Module):
    """Tied and frozen weights, and a buffer; no group has a number of elements that two ranks can divide."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(33, 15)
        self.first, self.second = torch.nn.Linear(15, 15), torch.nn.Linear(15, 7)
        self.third = torch.nn.Linear(7, 15, bias=False)
        self.head = torch.nn.Linear(15, 33, bias=False)
        self.head.weight = self.embedding.weight
        self.second.bias.requires_grad_(False)
        self.register_buffer("buffer", torch.ones(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        hidden = hidden + torch.tanh(self.first(hidden))
        return self.head(hidden + self.third(torch.tanh(self.second(hidden))))


def run(name: str, rank: int, directory: pathlib.Path) -> None:
    import deepspeed

    torch.manual_seed(0)
    model = Model()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if parameter.ndim > 1], "weight_decay": 0.1},
        {"params": [parameter for parameter in trained if parameter.ndim == 1], "weight_decay": 0.0},
    ]
    config = {"train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True}, "zero_allow_untested_optimizer": True}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config={**config, **SCENARIOS[name]})
    for step in range(STEPS):
        tokens = torch.randint(33, (4, 9), generator=torch.Generator().manual_seed(step * 2 + rank))
        logits = engine(tokens[:, :-1]).flatten(0, 1).float()
        engine.backward(torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten()))
        engine.step()
    engine.save_checkpoint(str(directory))


def main() -> None:
    store, rank, ranks, out = sys.argv[1:]
    torch.set_num_threads(1)
    os.environ.update(DS_ACCELERATOR="cpu", RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=ranks)
    import deepspeed

    deepspeed.init_distributed(
        "gloo", auto_mpi_discovery=False, init_method=f"file://{store}", rank=int(rank), world_size=int(ranks)
    )
    for name in SCENARIOS:
        run(name, int(rank), pathlib.Path(out) / name)
    torch.distributed.barrier()


if __name__ == "__main__":
    main()
