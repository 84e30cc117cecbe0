"""An engine's checkpoints:

    SAVE_DIR/latest                     the tag of the last one
    SAVE_DIR/TAG/engine.pt              counts, scheduler, the client's state, frozen parameters and buffers
    SAVE_DIR/TAG/optimizer-.../         masters and state, as the daemons have written them

engine.pt names the folder that belongs to it, and takes its place at once: a checkpoint that is written over another
one replaces it when it is whole, and the other folder goes afterwards. DeepSpeed's own checkpoints are imported beside
themselves first, where that has not been done yet.
"""

import dataclasses
import os
import pathlib
import secrets
import shutil
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed
from torch.distributed.tensor import DTensor, distribute_tensor

from superoffload._core import checkpoint_files, warn, whole_file
from superoffload.deepspeed import foreign
from superoffload.deepspeed.config import Config
from superoffload.deepspeed.saved import Saved
from superoffload.deepspeed.schedules import Schedule

_ENGINE = "engine.pt"


@dataclasses.dataclass(frozen=True)
class Found:
    """A checkpoint; ``foreign``: it is DeepSpeed's own."""

    directory: pathlib.Path
    foreign: bool


def agreed_tag(tag: str, config: Config) -> str:
    """Rank 0's. ``checkpoint.tag_validation`` says what becomes of another one."""
    tags: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(tags, tag)
    if set(tags) != {tags[0]} and config.tag_validation != "ignore":
        message = f"ranks save under different tags, {', '.join(sorted(set(tags)))}"
        if config.tag_validation == "fail":
            raise ValueError(f"{message}; give all ranks the same")
        warn.warn(f"{message}: all save under that of rank 0")
    return str(tags[0])


def save(engine: Any, save_dir: str, tag: str, client_state: dict[str, Any], with_frozen: bool) -> None:
    directory = pathlib.Path(save_dir, tag)
    folder = _from_first(f"optimizer-{secrets.token_hex(6)}")
    _on_first(lambda: directory.mkdir(parents=True, exist_ok=True))
    engine.optimizer.save_checkpoint(directory / folder)
    trained = {name for name, parameter in engine.module.named_parameters() if parameter.requires_grad}
    frozen = {name for name, parameter in engine.module.named_parameters() if not parameter.requires_grad}
    without = trained if with_frozen else trained | frozen
    client_states: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(client_states, client_state)
    state = {
        "optimizer": folder,
        "module": whole_state(engine.module, without),
        "client_states": client_states if engine.config.stage == 3 else client_states[:1],  # as DeepSpeed has them
        **engine.counts(),
    }
    _on_first(lambda: whole_file.replace(directory / _ENGINE, lambda file: torch.save(state, file)))
    _on_first(lambda: _remove_others(directory, folder))


def set_latest(save_dir: str, tag: str) -> None:
    _on_first(lambda: whole_file.replace(pathlib.Path(save_dir, "latest"), lambda file: file.write(tag.encode())))


def write(save_dir: str, name: str, state: Mapping[str, Any]) -> None:
    """Rank 0's state, with torch.save."""

    def on_first() -> None:
        os.makedirs(save_dir, exist_ok=True)
        whole_file.replace(pathlib.Path(save_dir, name), lambda file: torch.save(dict(state), file))

    _on_first(on_first)


def find(load_dir: str, tag: str | None, universal: bool) -> Found | None:
    """Without ``tag`` that of the file latest; ``load_dir`` may be what `superoffload import-checkpoint` writes."""
    directory = pathlib.Path(load_dir)
    if tag is None and checkpoint_files.is_one(directory):
        return Found(directory, foreign=False)
    if tag is None:
        names = ("latest_universal", "latest") if universal else ("latest",)
        latest = next((path for path in (directory / name for name in names) if path.is_file()), None)
        if latest is None:
            return None
        tag = latest.read_text().strip()
    directory /= tag
    if not directory.is_dir():
        raise ValueError(f"{directory} is no directory; name a tag that {load_dir} has")
    return Found(directory, foreign=not (directory / _ENGINE).exists() and not checkpoint_files.is_one(directory))


def load(engine: Any, found: Found, strict: bool, with_state: bool) -> Saved:
    """Parameters become the masters of the checkpoint; with state, moments and steps too, else these begin anew."""
    if (found.directory / _ENGINE).exists():
        # A client's own objects are in it.
        state = torch.load(found.directory / _ENGINE, map_location="cpu", weights_only=False)
        _restore(engine, found.directory / state["optimizer"], with_state)
        _fill(engine.module, state["module"], strict)
        of_ranks, counts = state["client_states"], {name: state[name] for name in engine.counts()}
        own = torch.distributed.get_rank() if len(of_ranks) == torch.distributed.get_world_size() else 0
        return Saved(**counts, client_state=of_ranks[own])
    if found.foreign:
        directory = found.directory.with_name(f"{found.directory.name}.superoffload")
        _on_first(lambda: foreign.import_once(found.directory, directory))
        saved, buffers = foreign.read(found.directory, torch.distributed.get_rank(), torch.distributed.get_world_size())
        _fill(engine.module, buffers, strict)
        _restore(engine, directory, with_state)
        return saved
    _restore(engine, found.directory, with_state)
    return of_steps(engine)


def whole_state(module: torch.nn.Module, without: set[str] | None = None) -> dict[str, torch.Tensor]:
    """Of rank 0 the module's state dict with whole tensors on the CPU; of others nothing. All ranks call it."""
    first = torch.distributed.get_rank() == 0
    names = {id(p): name for name, p in module.named_parameters()}  # the first of several that are tied
    tied = {name: names[id(p)] for name, p in module.named_parameters(remove_duplicate=False)}
    made: dict[str, torch.Tensor] = {}
    gathered: dict[str, str] = {}  # on all ranks the same
    for name, tensor in module.state_dict().items():
        once = tied.get(name, name)
        if without is not None and once in without:
            continue
        if once not in gathered:
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            gathered[once] = name
            if first:
                made[name] = whole.detach().cpu()
        elif first:
            made[name] = made[gathered[once]]
    return made


def _restore(engine: Any, directory: pathlib.Path, with_state: bool) -> None:
    optimizer = engine.optimizer
    optimizer.restore_checkpoint(directory)
    if with_state:
        return
    anew = optimizer.torch_state_dict()
    for arrays in anew["state"].values():
        for tensor in arrays.values():
            tensor.zero_()
    optimizer.load_torch_state_dict(anew)


@torch.no_grad()
def _fill(module: torch.nn.Module, saved: Mapping[str, torch.Tensor], strict: bool) -> None:
    """Frozen parameters and buffers."""
    here = module.state_dict(keep_vars=True)
    if strict and (unknown := [name for name in saved if name not in here]):
        raise ValueError(
            f"the checkpoint has {unknown[0]}, which the model has not; load_module_strict=False leaves it out"
        )
    for name, tensor in saved.items():
        target = here.get(name)
        if isinstance(target, DTensor):
            whole = tensor.to(target.device, target.dtype)
            target.copy_(distribute_tensor(whole, target.device_mesh, target.placements))
        elif target is not None:
            target.copy_(tensor)


def of_steps(engine: Any) -> Saved:
    """Of an optimizer alone that goes on: what follows from its steps."""
    steps = engine.optimizer.committed_steps
    scheduler = engine.lr_scheduler
    state = {"last_batch_iteration": steps - 1} if isinstance(scheduler, Schedule) else None
    if scheduler is not None and state is None:
        warn.warn(f"step {steps} goes on without a state of the learning rate's scheduler, which begins where it is")
    batches = engine.config.batches
    return Saved(steps, steps * batches.total, 0, state, None, [], {})


def _remove_others(directory: pathlib.Path, folder: str) -> None:
    for other in directory.glob("optimizer-*"):
        if other.name != folder:
            shutil.rmtree(other)


def _from_first(value: str) -> str:
    made = [value]
    torch.distributed.broadcast_object_list(made)
    return made[0]


def _on_first(call: Callable[[], Any]) -> None:
    """On rank 0; what it raises is raised on all."""
    verdict: list[Any] = [None]
    if torch.distributed.get_rank() == 0:
        try:
            call()
        except Exception as error:  # whatever it is, the others wait for it
            verdict = [error]
    torch.distributed.broadcast_object_list(verdict)
    if verdict[0] is not None:
        raise verdict[0]
