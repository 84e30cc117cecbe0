"""DeepSpeed's own checkpoints: imported beside themselves, and what they have beside masters and moments."""

import pathlib
import sys
from collections.abc import Mapping
from typing import Any

import grpc
import torch

from superoffload._core import warn
from superoffload._core.error import Error
from superoffload.deepspeed.saved import Saved
from superoffload.import_checkpoint import torch_file, zero_checkpoint
from superoffload.import_checkpoint.command import import_checkpoint
from superoffload.import_checkpoint.inert_pickle import Inert
from superoffload.import_checkpoint.saved_state import inconsistent, optional, whole_number
from superoffload.import_checkpoint.torch_file import StoredTensor

_OF_DEEPSPEED = {
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params"),
    *("frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "skipped_steps", "global_steps"),
    *("global_samples", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_config", "ds_version"),
    *("sparse_tensor_module_names", "universal_checkpoint_info"),
}


def import_once(directory: pathlib.Path, output: pathlib.Path) -> None:
    """Writes ``output``, unless it is there. Raises Error as `import_checkpoint` does."""
    if not output.exists():
        import_checkpoint(directory, output)
        print(f"superoffload: {directory} is DeepSpeed's, and was imported as {output}", file=sys.stderr)


def read(directory: pathlib.Path, rank: int, ranks: int) -> tuple[Saved, dict[str, torch.Tensor]]:
    """An engine's counts and the client's state; and buffers by name.

    Of this rank where so many ranks have saved, else of rank 0.
    """
    path, *_ = zero_checkpoint.model_files(str(directory), rank, ranks)
    state = torch_file.load(path)
    if not isinstance(state, dict):
        raise inconsistent(path, "has no dict of states")
    client = {name: _made(value) for name, value in state.items() if name not in _OF_DEEPSPEED}
    if unread := [name for name, value in client.items() if _has_inert(value)]:
        warn.warn(f"{path} has objects of other classes as {', '.join(unread)}, which are not read")
        client = {name: value for name, value in client.items() if name not in unread}
    module, buffers = optional(state, "module", dict, {}), optional(state, "buffer_names", list, [])
    saved = Saved(
        global_steps=_count(path, state, "global_steps"),
        global_samples=_count(path, state, "global_samples"),
        skipped_steps=_count(path, state, "skipped_steps"),
        scheduler=_made(state.get("lr_scheduler")),
        loss_scale=None,
        groups=[],
        client_state=client,
    )
    return saved, {name: _made(module[name]) for name in buffers if isinstance(module.get(name), StoredTensor)}


def _count(path: str, state: Mapping[str, Any], field: str) -> int:
    return whole_number(state.get(field) or 0, f"{path}: {field}")


def _made(value: Any) -> Any:
    """With tensors, where there were some in the file."""
    if isinstance(value, StoredTensor):
        return _tensor(value)
    if isinstance(value, dict):
        return {key: _made(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_made, value))
    return value


def _tensor(stored: StoredTensor) -> torch.Tensor:
    dtype = getattr(torch, stored.dtype)
    if not stored.contiguous:
        raise Error(grpc.StatusCode.UNIMPLEMENTED, f"{stored.path} has a tensor with gaps; save it again, contiguous")
    if stored.elements == 0:
        return torch.empty(stored.shape, dtype=dtype)
    with open(stored.path, "rb") as file:
        file.seek(stored.offset)
        data = bytearray(file.read(stored.elements * dtype.itemsize))
    return torch.frombuffer(data, dtype=dtype).view(stored.shape)


def _has_inert(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_inert, value.values()))
    return isinstance(value, Inert) or (isinstance(value, (list, tuple)) and any(map(_has_inert, value)))
