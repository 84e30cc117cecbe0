"""Runs of FSDP2 on gloo, one after the other: python -m tests.support.run_trainer DIRECTORY ENDPOINTS PHASE...

Each phase is a JSON object: its ``name``, how many ``ranks``, and arguments of `train`. Its ranks are forked from this
process, so that torch is imported once; rank r uses the r-th endpoint, counted around. DIRECTORY gets NAME.pt, what
rank 0 returned.
"""

import datetime
import json
import os
import pathlib
import sys
import traceback

import torch
import torch.distributed
import torch.distributed.checkpoint as dcp
from tests.support import process_group
from tests.support.sharded_trainer import Model
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import superoffload.torch
from superoffload._core.error import Error

_BATCH = 12  # samples of a step, over all ranks


def train(
    name: str,
    rank: int,
    ranks: int,
    *,
    steps: int,
    save: dict[str, str] | None = None,
    columns: bool = False,
    sharded: bool = True,
    dcp_save: str | None = None,
    dcp_load: str | None = None,
    skip_bias_at: int | None = None,
    back_to: str | None = None,
    schedule: dict | None = None,
    expect_error: bool = False,
    **options,
) -> dict:
    """``save``: directories by step, as JSON has it. ``columns``: matrices are sharded by columns, not by rows."""
    torch.manual_seed(0 if "restore" not in options else 1)
    model = Model()
    torch.nn.init.zeros_(model.blocks[1].bias)  # frozen: a checkpoint does not have it
    by_column = {"shard_placement_fn": lambda p: Shard(1) if p.ndim == 2 and p.shape[1] % ranks == 0 else None}
    for module in [*model.blocks, model] if sharded else []:
        fully_shard(module, **(by_column if columns else {}))
    if schedule is not None:
        options["checkpoint"] = superoffload.torch.CheckpointSchedule(**schedule)
    try:
        optimizer = superoffload.torch.AdamW(
            model.named_parameters(), lr=1e-2, max_grad_norm=0.5, name=name, bucket_bytes=4096, **options
        )
    except Error as error:
        if not expect_error:
            raise
        return {"error": f"{error.code.name}: {error}"}
    if dcp_load is not None:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=dcp_load)
        set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    begun = optimizer.committed_steps
    result = {"begun": begun, "losses": {}, "states": {begun: full_state(model, optimizer)}}
    for step in range(begun, steps):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(33, (_BATCH, 9), generator=generator)
        mine = tokens[rank * _BATCH // ranks : (rank + 1) * _BATCH // ranks]
        loss = torch.nn.functional.cross_entropy(model(mine[:, :-1]).flatten(0, 1), mine[:, 1:].flatten())
        loss.backward()
        if skip_bias_at == step:
            model.blocks[0].bias.grad = None
        if sharded:
            torch.distributed.all_reduce(loss.detach_())
            loss /= ranks
        optimizer.step()
        optimizer.zero_grad()
        result["losses"][step] = float(loss)
        if directory := (save or {}).get(str(step + 1)):
            optimizer.save_checkpoint(directory)
            result["states"][step + 1] = full_state(model, optimizer)
    if dcp_save is not None:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=dcp_save)
        result["states"][steps] = full_state(model, optimizer)
    if back_to is not None:
        optimizer.restore_checkpoint(back_to)
        result["states"]["back"] = full_state(model, optimizer)
    optimizer.close()
    return result


def full_state(model: torch.nn.Module, optimizer: superoffload.torch.AdamW) -> dict[str, torch.Tensor]:
    """Parameters and state of all ranks, put together."""
    options = StateDictOptions(full_state_dict=True)
    weights, state = get_state_dict(model, optimizer, options=options)
    arrays = {f"{name}.{key}": value for name, values in state["state"].items() for key, value in values.items()}
    return {key: value.clone() for key, value in {**weights, **arrays}.items()}


def run(directory: pathlib.Path, phase: dict, rank: int) -> None:
    name, ranks = phase.pop("name"), phase.pop("ranks")
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{directory}/{name}.store",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=120),
    )
    result = train(name, rank, ranks, **phase)
    if rank == 0:
        torch.save(result, directory / f"{name}.pt")
    process_group.leave()


def main() -> None:
    directory, endpoints, *phases = sys.argv[1:]
    for phase in map(json.loads, phases):
        children = []
        for rank in range(phase["ranks"]):
            child = os.fork()
            if child == 0:
                os.environ["SUPEROFFLOAD_ENDPOINT"] = endpoints.split(",")[rank % len(endpoints.split(","))]
                try:
                    run(pathlib.Path(directory), phase, rank)
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
                os._exit(0)
            children.append(child)
        if any([os.waitpid(child, 0)[1] for child in children]):
            sys.exit(f"phase {phase['name']} failed")


if __name__ == "__main__":
    main()
