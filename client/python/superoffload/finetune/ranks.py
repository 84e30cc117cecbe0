"""The processes of a run: started where a recipe has several ranks, joined, and the model divided among them."""

import dataclasses
import gc
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed

from superoffload.finetune.recipe import Recipe
from superoffload.torch import cuda
from superoffload.torch.ranks import divided_attention


@dataclasses.dataclass
class Ranks:
    """This process among those of the run."""

    rank: int
    count: int
    device: torch.device
    on_gpu: bool  # whether that is a GPU

    @property
    def first(self) -> bool:
        return self.rank == 0

    def sum(self, value: torch.Tensor) -> float:
        """Over all ranks."""
        if self.count > 1:
            value = value.clone()
            torch.distributed.all_reduce(value)
        return float(value)

    def wait(self) -> None:
        """For all ranks."""
        if self.count > 1:
            torch.distributed.barrier()

    def leave(self) -> None:
        """Ends gloo's threads, too: one that still drops a tensor when Python ends would abort the process.

        They end with the last reference to their group, of which models and optimizers have some in cycles.
        """
        if self.count > 1:
            gc.collect()
            torch.distributed.destroy_process_group()


def are_started(recipe: Recipe) -> bool:
    """Whether this process is one of the recipe's ranks; ValueError: a launcher has started another number of them."""
    world = os.environ.get("WORLD_SIZE")
    if world is not None and world != str(recipe.ranks):
        raise ValueError(f"the launcher has started {world} ranks, but the recipe has ranks: {recipe.ranks}")
    return world is not None or recipe.ranks == 1


def start(recipe: Recipe, words: Sequence[str]) -> int:
    """Runs `superoffload finetune` with these words in as many processes, under torchrun's agent; its exit status."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // recipe.ranks)))
    agent = ["--standalone", f"--nproc-per-node={recipe.ranks}", "--module", "superoffload", "finetune", *words]
    try:
        run.main(agent)
    except ChildFailedError as error:
        return next(iter(error.failures.values())).exitcode if error.failures else 1
    return 0


def join(recipe: Recipe) -> Ranks:
    """Raises ValueError where there are fewer GPUs than ranks."""
    local = int(os.environ.get("LOCAL_RANK", 0)) if recipe.ranks > 1 else 0
    device = cuda.of_rank(local) or torch.device("cpu")
    if recipe.ranks == 1:
        return Ranks(0, 1, device, device.type == "cuda")
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    return Ranks(torch.distributed.get_rank(), recipe.ranks, device, device.type == "cuda")


def divide(model: Any, recipe: Recipe) -> Any:
    """FSDP2 over all ranks, block by block; and the sequences among some of them, where the recipe says so."""
    parallel = None
    if recipe.sequence_parallel > 1:
        from superoffload.torch import ulysses

        parallel = ulysses.SequenceParallel(model, recipe.sequence_parallel)
    if recipe.ranks > 1:
        from torch.distributed.fsdp import fully_shard

        for block in divided_attention.layers(model).values():
            fully_shard(block)
        fully_shard(model)
    return parallel
