"""One rank of a run on gloo: python -m tests.support.sharded_trainer STORE RANK RANKS OUT SCENARIO...

Each scenario is a JSON object of arguments of `train`; OUT gets a list of what it returned for each.
"""

import copy
import functools
import os
import pathlib
import signal
import time

import pytest
import torch
import torch.distributed
from tests.support import process_group
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import superoffload.torch
from superoffload.torch import ddp
from superoffload.torch.ranks import replicas

_GROUP_SECONDS = 60


class Model(torch.nn.Module):
    """Uneven shards (33 rows), shards that are empty on the last rank (1 row), tied and frozen weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(33, 16)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(3))
        self.scale = torch.nn.Parameter(torch.ones(1, 16))
        self.head = torch.nn.Linear(16, 33, bias=False)
        self.head.weight = self.embedding.weight
        self.blocks[1].bias.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
        return self.head(hidden * self.scale)


class Parallel:
    """A model distributed in one of several ways; ``parallel(tokens)`` are its logits."""

    def __init__(
        self, model: Model, layout: str, reshard: bool, casts: list[str | None] | None = None, blocks: str = "eager"
    ) -> None:
        self._options = {}
        if casts is not None:
            dtypes = [name and getattr(torch, name) for name in casts]
            self._options["mp_policy"] = MixedPrecisionPolicy(param_dtype=dtypes[0], reduce_dtype=dtypes[1])
        for block in model.blocks:
            if "compiled" in blocks:
                block.compile(backend="aot_eager")
            if "recomputed" in blocks:
                block.forward = functools.partial(checkpoint, block.forward, use_reentrant="re-entering" in blocks)
        self.model, self.called, self.wholes = model, model, []
        ranks = torch.distributed.get_world_size()
        self._mesh = init_device_mesh("cpu", (ranks,))
        getattr(self, f"_{layout}")(reshard)

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.called(tokens)

    def _shard(self, reshard: bool, **options) -> None:
        options = {**self._options, **options}
        for block in self.model.blocks:
            fully_shard(block, reshard_after_forward=reshard, **options)
        fully_shard(self.model, reshard_after_forward=reshard, **options)

    def _whole(self, _: bool) -> None:
        pass

    def _fsdp2(self, reshard: bool) -> None:
        self._shard(reshard)

    def _hsdp(self, reshard: bool) -> None:
        """On two ranks nothing is sharded."""
        ranks = torch.distributed.get_world_size()
        self._shard(reshard, mesh=init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard")))

    def _ignored(self, reshard: bool) -> None:
        """FSDP leaves two parameters alone; the loop averages their gradients."""
        self.wholes = [self.model.scale, self.model.blocks[0].bias]
        fully_shard(self.model, reshard_after_forward=reshard, ignored_params=set(self.wholes))

    def _ddp(self, _: bool) -> None:
        self.called = torch.nn.parallel.DistributedDataParallel(self.model, bucket_cap_mb=0.001)

    def _tensors(self, _: bool) -> None:
        """Columns, rows, and parameters that all ranks have whole, plain and as DTensors."""
        plan = {
            "blocks.0": ColwiseParallel(output_layouts=Replicate()),
            "blocks.2": RowwiseParallel(input_layouts=Replicate()),
        }
        parallelize_module(self.model, self._mesh, plan)

    def _batches(self, _: bool) -> None:
        """Replicated DTensors, whose gradients are sums of parts."""
        distribute_module(self.model, self._mesh)
        self.model.head.weight = self.model.embedding.weight
        shard = lambda tokens: DTensor.from_local(tokens, self._mesh, [Shard(0)])  # noqa: E731
        self.called = lambda tokens: self.model(shard(tokens)).to_local()

    def average(self) -> None:
        for parameter in self.wholes:
            torch.distributed.all_reduce(parameter.grad)
            parameter.grad /= torch.distributed.get_world_size()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _reduce(model: Model) -> None:
    """Sums the parts of gradients: torch.optim of torch 2.11 trains with them as well, but to other weights."""
    for parameter in model.parameters():
        if isinstance(parameter.grad, DTensor):
            parameter.grad = parameter.grad.redistribute(placements=parameter.placements)


def _switch(model: Model, optimizer: torch.optim.Optimizer, layout: str, reshard: bool) -> Parallel:
    """What Accelerator.prepare does, which distributes models on GPUs only."""
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for index, parameter in enumerate(group["params"]):
            group["params"][index] = torch.empty(1)
            group["params"][index].data_ptr = parameter.data_ptr()
    parallel = Parallel(model, layout, reshard)
    mapping = {before[name]: parameter for name, parameter in model.named_parameters()}
    from accelerate.utils.fsdp_utils import fsdp2_switch_optimizer_parameters  # only here: it takes a second

    fsdp2_switch_optimizer_parameters(optimizer, mapping)
    return parallel


def _fill(model: Model, values: dict[str, torch.Tensor]) -> None:
    """Gives whole parameters that are frozen, and on meta, their values."""
    frozen = [name for name, parameter in model.named_parameters() if parameter.device.type == "meta"]
    model.load_state_dict({name: values[name] for name in frozen}, assign=True, strict=False)


def _all_reduced(buffer: torch.Tensor, group: object) -> torch.futures.Future:
    """At once, so that it is certain which buckets are averaged when the next one begins."""
    torch.distributed.all_reduce(buffer, group=group)
    done = torch.futures.Future()
    done.set_result([buffer])
    return done


def train(
    rank: int,
    *,
    layout: str = "fsdp2",
    alone: bool = False,
    same: bool = False,
    reduces: bool = True,
    spread: float = 0.0,
    switches: bool = False,
    swaps: bool = False,
    hooked: bool = False,
    edits: bool = False,
    writes: bool = False,
    spoils_at: int | None = None,
    strays: bool = False,
    steps: int = 6,
    dtype: str = "bfloat16",
    reshard: bool = True,
    casts: list[str | None] | None = None,
    blocks: str = "eager",
    accumulate: int = 1,
    syncs: bool = False,
    zeroes: bool = True,
    grad_dtype: str | None = None,
    clip: str | None = "option",
    nan_at: int | None = None,
    die_at: tuple[int, int, str] | None = None,
    plain: bool = False,
    threads: int = 2,
    pause_seconds: float = 0.0,
    gpu: dict | None = None,
    meta: str | None = None,
    reloads_at: int | None = None,
    halves_at: int | None = None,
    writes_state_at: int | None = None,
    keepers: tuple[int, ...] = (),
    releases: bool = False,
    looks: bool = False,
    **options,
) -> dict:
    """Trains to `steps`, wherever it begins. ``die_at``: rank, step, and where in it the process kills itself.

    ``alone``: the gradients are those of rank 0, whatever the number of ranks. ``same``: all ranks have its data.
    ``reduces``: it averages gradients that FSDP does not. ``spread``: how much parameters differ between ranks.
    ``switches``: the optimizer is built first, as under accelerate. ``swaps``: at the end
    ranks load what they have saved themselves, and then what the other one has. ``hooked``: gradients leave as
    DistributedDataParallel averages them. ``edits``: after steps that are watched the loop halves all gradients.
    ``writes``: each rank writes what the other one hosts.
    ``spoils_at``: a step before which rank 1 alone writes a parameter; all ranks take it back then and end the step.
    ``casts``: the dtypes in which FSDP computes and reduces. ``blocks``: whether they are compiled, recomputed.
    ``strays``: rank 1 looks for its daemon where none is. ``gpu``: of `GpuOptions`; parameters are on the fake GPU.
    ``meta``: parameters are there while the model is distributed; then the optimizer gives them their "weights",
    only "frozen" ones, or "none", or torch does ("torch").
    ``syncs``: gradients are reduced in each part of a step. ``zeroes``: they are zeroed after each step.
    ``writes_state_at``: a step before which rank 1 alone writes to ``optimizer.state``.
    ``reloads_at``: a step before which its state leaves and comes back by torch.distributed.checkpoint.
    ``halves_at``: a step before which the model loads the half of each of its values.
    ``keepers``: processes of the ranks' daemons. ``releases``: the GPU's memory, after each step.
    ``looks``: at parameters, after each step.
    """
    ranks = torch.distributed.get_world_size()
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = Model().to(getattr(torch, dtype))
    with torch.no_grad():
        model.scale += rank * spread
    values = {name: value.clone() for name, value in model.state_dict().items()}
    if meta is not None:
        with torch.device("meta"):
            model = Model().to(getattr(torch, dtype))
    if gpu is not None:
        given = {"weights": values, "frozen": {"blocks.1.bias": values["blocks.1.bias"]}}
        options["gpu"] = superoffload.torch.GpuOptions(**gpu, weights=given.get(meta))
    clips = {"max_grad_norm": 0.5} if clip == "option" and not plain else {}
    make = torch.optim.AdamW if plain else superoffload.torch.AdamW
    if strays and rank == 1:
        options["endpoint"] = "unix:/nowhere/control.sock"
    if switches:
        optimizer = make(model.parameters(), lr=1e-2, **clips, **options)
        parallel = _switch(model, optimizer, layout, reshard)
    elif meta is not None and layout == "ddp":
        optimizer = make(model.named_parameters(), lr=1e-2, **clips, **options)
        _fill(model, values)
        parallel = Parallel(model, layout, reshard, casts, blocks)
    else:
        parallel = Parallel(model, layout, reshard, casts, blocks)
        if meta == "torch":
            model.to_empty(device="cpu")
            from_rank_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
            set_model_state_dict(model, values if rank == 0 else {}, options=from_rank_0)
        for parameter in model.parameters() if grad_dtype is not None else ():
            parameter.grad_dtype = getattr(torch, grad_dtype)
        named = meta or "weights" in options
        optimizer = make(model.named_parameters() if named else model.parameters(), lr=1e-2, **clips, **options)
        _fill(model, values)
    if hooked:
        ddp._all_reduce = _all_reduced
        ddp.register(parallel.called, optimizer)
    early = 0
    begun = 0 if plain else optimizer.committed_steps
    norms, skips, refusals = [], 0, []
    step = begun
    while step < steps:
        if step == reloads_at:
            parameters, state = get_state_dict(model, optimizer)
            set_state_dict(model, optimizer, model_state_dict=parameters, optim_state_dict=state)
        if step == halves_at:
            model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})
            optimizer.push_params()
        for part in range(accumulate):
            generator = torch.Generator().manual_seed(1000 * step + 10 * part + (0 if same else rank))
            tokens = torch.randint(33, (4, 9), generator=generator)
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(syncs or part == accumulate - 1)
            logits = parallel(tokens[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
            bad = nan_at == step and rank == 1 and not skips
            factor = float("nan") if bad else (ranks if rank == 0 else 0.0) if alone else 1.0
            (loss * factor).backward()
        if reduces:
            parallel.average()
        if plain:
            _reduce(model)
        if edits and step >= 4:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad *= 0.5
        if die_at is not None and list(die_at[:2]) == [rank, step]:
            _die(die_at[2], optimizer, *keepers[rank : rank + 1])
        early += not plain and bool(optimizer._hosting.attachment.look().begun)
        if clip == "call" or (plain and clip is not None):
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            norms.append(float(whole(norm)))
        if writes:
            for share in optimizer._hosting.sharding.shares.values():
                replicas._local_rows(share, 1 - rank).data.zero_()
        if spoils_at == step and rank == 1:
            optimizer._hosting.hosted[0].local.data.mul_(2)
        if writes_state_at == step and rank == 1:
            for state in optimizer.state.values():
                state["exp_avg"].zero_()
        try:
            optimizer.step()
        except superoffload.Error as error:
            if step not in (spoils_at, writes_state_at):
                raise
            refusals.append(str(error))
            optimizer.pull_params()
            optimizer.step()
        if zeroes:
            optimizer.zero_grad()
        if releases:
            optimizer.release()
            optimizer.resume()
        if looks:
            sum(parameter.detach().float().norm() for parameter in model.parameters())
        time.sleep(pause_seconds)
        if not plain and optimizer.last_result.kind.skipped:
            skips += 1
            continue
        step += 1
    if not plain:
        optimizer.synchronize()
    if "weights" in options:
        values = model.state_dict()
        weights = {name: whole(values[name]).clone() for name, _ in model.named_parameters()}
    else:
        weights = {name: whole(p.detach()).clone() for name, p in model.named_parameters()}
    if swaps:
        states = [None] * ranks
        torch.distributed.all_gather_object(states, copy.deepcopy(optimizer.state_dict()))
        optimizer.load_state_dict(states[rank])
        optimizer.load_state_dict(states[1 - rank])
    report = None if plain else optimizer.gpu_report
    if releases:
        optimizer.release()
    if not plain:
        optimizer.close()
    if releases:
        weights = {name: whole(p.detach()).clone() for name, p in model.named_parameters()}
    result = {"weights": weights, "norms": norms, "skips": skips, "begun": begun, "early": early, "refusals": refusals}
    return result if report is None else {**result, "gpu": report.gpu}


def _die(where: str, optimizer: superoffload.torch.AdamW, keeper: int = 0) -> None:
    if where == "daemon":  # it dies, and the trainer goes on
        children = pathlib.Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGKILL)
        return
    if where == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    attachment = optimizer._hosting.attachment
    kill = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
    if where == "hangs":
        optimizer._hosting.sharding.group.gather_doubles = lambda *_: signal.pause()
    elif where == "prepared":  # and has not contributed
        optimizer._hosting.sharding.group.gather_doubles = kill
    elif where == "gathered":
        attachment.end_prepared_step = kill
    elif where == "ended":
        attachment.wait_verdict = kill


def _try(rank: int, scenario: dict) -> dict:
    with pytest.MonkeyPatch.context() as patch:
        if scenario.get("gpu") is not None:
            from tests.support import fake_torch_gpu  # only here: it needs a build

            fake_torch_gpu.install(patch)
        if scenario.get("die_at") is not None and scenario["die_at"][2] != "daemon":
            return train(rank, **scenario)
        try:
            return train(rank, **scenario)
        except superoffload.Error as error:
            return {"error": str(error)}


if __name__ == "__main__":
    process_group.run_scenarios(_try, int(os.environ.get("GROUP_SECONDS", _GROUP_SECONDS)))
