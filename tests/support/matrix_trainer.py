"""One rank of a run on gloo that trains whole matrices, as sharded_trainer.py is one of others.

Run as python -m tests.support.matrix_trainer STORE RANK RANKS OUT SCENARIO... Each scenario is a JSON object of
arguments of `train`; OUT gets a list of what it returned for each. Rank 0 has all the data, so that whatever the number
of ranks gradients are those of one process, bit for bit.
"""

import os
import pathlib
import signal

import torch
import torch.distributed
from tests.support import process_group
from tests.support.momentum import MomentumMatrix
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import superoffload.torch

CLIP = 0.01


class Model(torch.nn.Module):
    """Rows that two ranks and three do not divide, and matrices of which some ranks have no row."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = torch.nn.Linear(16, 33)
        self.second = torch.nn.Linear(33, 7, bias=False)
        self.scale = torch.nn.Parameter(torch.ones(1, 7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x))) * self.scale


def backward(called: torch.nn.Module, step: int, factor: float = 1.0) -> None:
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
    (called(x.to(next(called.parameters()).dtype)).float().square().mean() * factor).backward()


def _shard(module: Model, layout: str) -> None:
    ranks = torch.distributed.get_world_size()
    if layout == "tensors":  # rows of one matrix, columns of another, and a whole parameter; all ranks have the data
        plan = {
            "first": ColwiseParallel(output_layouts=Replicate()),
            "second": RowwiseParallel(input_layouts=Replicate()),
        }
        parallelize_module(module, init_device_mesh("cpu", (ranks,)), plan)
        return
    options = {}
    if layout == "hsdp":
        options["mesh"] = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
    if layout == "ignored":
        options["ignored_params"] = {module.scale}
    fully_shard(module.first, **options if layout == "hsdp" else {})
    fully_shard(module, **options)
    for unit in (module.first, module):
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


class _Traffic:
    """Bytes that this rank sends to others, and receives of them, in all-to-alls."""

    def __init__(self) -> None:
        self.sent, self.received = 0, 0
        self._original = torch.distributed.all_to_all_single
        torch.distributed.all_to_all_single = self

    def __call__(self, output, given, received, sent, **options):
        rank = torch.distributed.get_rank()
        self.sent += sum(sent) - sent[rank]
        self.received += sum(received) - received[rank]
        return self._original(output, given, received, sent, **options)

    def end(self) -> dict[str, int]:
        torch.distributed.all_to_all_single = self._original
        return {"sent": self.sent, "received": self.received}


def train(
    rank: int,
    *,
    steps: int,
    name: str | None = None,
    layout: str = "fsdp2",
    dtype: str = "float32",
    clip: str | None = None,
    edits: tuple[int, int, str] | None = None,
    save: str | None = None,
    save_at: int = 0,
    reloads_at: int | None = None,
    pushes_at: int | None = None,
    kills: tuple[int, int, int] | None = None,
    dies: tuple[int, int, str] | None = None,
    gpu: bool = False,
    lacks: tuple[int, int] | None = None,
    **options,
) -> dict:
    """Trains to ``steps``, wherever it begins.

    ``clip``: by the "option", or the "call". ``edits``: rank (-1: all) and step, and what it writes before step()
    there: a "parameter", a "gradient" after clipping, or "inf" into one, or it gives a parameter a "dtype".
    ``save_at``: the step before which it saves. ``reloads_at``: a step before which the state leaves and comes back by
    torch.distributed.checkpoint. ``pushes_at``: a step before which all ranks double their parameters and push them.
    ``kills``: rank, step, and the keeper of the daemon that it kills there. ``dies``: rank, step, and where in it
    the process kills itself: as matrices are "exchanged", or when it has "gathered" the norm. ``lacks``: rank and step
    where a gradient is taken away. ``gpu``: parameters are to move to one.
    """
    module = Model().to(getattr(torch, dtype))
    _shard(module, layout)
    if clip == "option":
        options["max_grad_norm"] = CLIP
    if gpu:
        options["gpu"] = superoffload.torch.GpuOptions(device="cuda")
    try:
        optimizer = MomentumMatrix(module.named_parameters(), name=name, **options)
    except superoffload.Error as error:
        return {"refusals": [str(error)]}
    hosted = sorted(parameter.name for parameter in optimizer._hosting.hosted)
    refusals, norms, traffic = [], [], {}
    step = optimizer.committed_steps
    begun = step
    skipped = 0
    while step < steps:
        if step == save_at and save is not None:
            optimizer.save_checkpoint(save)
        if step == reloads_at:
            parameters, state = get_state_dict(module, optimizer)
            set_state_dict(module, optimizer, model_state_dict=parameters, optim_state_dict=state)
        if step == pushes_at:
            for parameter in module.parameters():
                _local(parameter).data.mul_(2)
            optimizer.push_params()
        backward(module, step + skipped, float(rank == 0 or layout == "tensors"))
        if layout == "ignored":
            torch.distributed.all_reduce(module.scale.grad)
        edit = ""
        if edits is not None and edits[0] in (rank, -1) and edits[1] == step and not skipped:
            edit = edits[2]
        if edit == "parameter":
            _local(module.first.weight).data.view(-1)[0] += 1
        elif edit == "inf":
            _local(module.first.bias.grad)[0] = torch.inf
        elif edit == "dtype":
            module.first.weight._local_tensor = _local(module.first.weight).double()
        if lacks is not None and list(lacks) == [rank, step]:
            module.first.weight.grad = None
        if clip == "call":
            norms.append(float(torch.nn.utils.clip_grad_norm_(module.parameters(), CLIP)))
        if edit == "gradient":
            for parameter in module.parameters():
                parameter.grad.mul_(0.5)
        if kills is not None and list(kills[:2]) == [rank, step]:
            children = pathlib.Path(f"/proc/{kills[2]}/task/{kills[2]}/children").read_text().split()
            os.kill(int(children[0]), signal.SIGKILL)
        if dies is not None and list(dies[:2]) == [rank, step]:
            place = {"exchanged": (optimizer._hosting.group, "exchange")}
            place["gathered"] = (optimizer._hosting.attachment, "end_prepared_step")
            setattr(*place[dies[2]], lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        counted = _Traffic() if step == steps - 1 else None
        try:
            optimizer.step()
        except superoffload.Error as error:
            refusals.append(str(error))
            if edits is None or edits[2] != "parameter":
                break
            optimizer.pull_params()
            optimizer.step()
        if counted is not None:
            traffic = counted.end()
        optimizer.zero_grad()
        if optimizer.last_result.kind.skipped:
            skipped += 1
            continue
        step += 1
    result = {
        "weights": {} if refusals and step < steps else {k: _whole(p) for k, p in module.named_parameters()},
        "hosted": hosted,
        "begun": begun,
        "refusals": refusals,
        "norms": norms,
        "skipped": skipped,
        "traffic": traffic,
        "state": optimizer.state_tensors(),
    }
    optimizer.close()
    return result


if __name__ == "__main__":
    process_group.run_scenarios(lambda rank, scenario: train(rank, **scenario))
