"""What of each parameter this process has: all of it, or the shard of a DTensor (fully_shard, tensor parallelism)."""

import operator
import sys
from typing import Any

import torch

from superoffload.torch.ranks import gathering


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The elements that this rank has: the tensor's own memory, as FSDP gathers it."""
    return tensor._local_tensor if is_sharded(tensor) else tensor


def is_sharded(tensor: torch.Tensor) -> bool:
    dtensor = sys.modules.get("torch.distributed.tensor")  # half a second that most do not need
    return dtensor is not None and isinstance(tensor, dtensor.DTensor)


def rows_of(tensor: torch.Tensor, rows: range | None) -> torch.Tensor:
    """The rows of the first dimension, in the tensor's own memory; None: all. A scalar is one row."""
    if rows is None or tensor.dim() == 0 or tensor.layout != torch.strided:
        return tensor
    return tensor.detach().narrow(0, rows.start, len(rows))


def gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """The part of ``.grad`` that this rank has."""
    grad = parameter.grad
    if not is_sharded(parameter) or grad is None or not is_sharded(grad):
        return grad
    return _without_copy(grad)


def make_gradient_row_major(parameter: torch.Tensor) -> None:
    """Of the part that this rank has."""
    mine = gradient(parameter)
    if mine is not None and not mine.is_contiguous():
        parameter.grad = like(parameter, mine.contiguous())


def _without_copy(grad: Any) -> torch.Tensor:
    mine = grad._local_tensor
    return mine.wait() if hasattr(mine, "wait") else mine  # it may still be on its way


def is_reduced(parameter: torch.Tensor) -> bool:
    """Whether ``.grad`` is distributed as the parameter is: products of sharded matrices are sums of parts at first."""
    grad = parameter.grad
    if not is_sharded(parameter) or grad is None or not is_sharded(grad):
        return True
    return grad.placements == parameter.placements


def reduce(parameter: torch.Tensor) -> None:
    """Distributes ``.grad`` as the parameter is. All ranks of its mesh call it."""
    if not is_reduced(parameter):
        parameter.grad = parameter.grad.redistribute(placements=parameter.placements)


def like(parameter: torch.Tensor, mine: torch.Tensor) -> torch.Tensor:
    """The elements ``mine`` of this rank as what the parameter is, a DTensor where it is one."""
    if not is_sharded(parameter):
        return mine
    return _distributed(parameter, mine, parameter.device_mesh)


def like_on_host(parameter: torch.Tensor, mine: torch.Tensor) -> torch.Tensor:
    """The same in the CPU's memory, where ``mine`` is. All ranks of the parameter's mesh call it."""
    return _distributed(parameter, mine, _on_host(parameter.device_mesh)) if is_sharded(parameter) else mine


def _distributed(parameter: Any, mine: torch.Tensor, mesh: Any) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        mine,
        mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=torch.empty(parameter.shape, dtype=parameter.dtype, device="meta").stride(),
    )


_meshes_on_host: list[tuple[list[Any], Any]] = []  # process groups of a mesh, and the mesh of the same ranks' CPUs


def _on_host(mesh: Any) -> Any:
    """The mesh of the same ranks that has tensors in the CPU's memory; from_local() would move them to a GPU's."""
    if mesh.device_type == "cpu":
        return mesh
    groups = mesh.get_all_groups()
    for known, on_host in _meshes_on_host:
        if len(known) == len(groups) and all(map(operator.is_, known, groups)):
            return on_host
    from torch.distributed.device_mesh import DeviceMesh

    hosts = [gathering.host_group(group) for group in groups]
    on_host = DeviceMesh.from_group(
        hosts[0] if mesh.ndim == 1 else hosts, "cpu", mesh=mesh.mesh, mesh_dim_names=mesh.mesh_dim_names
    )
    _meshes_on_host.append((groups, on_host))
    return on_host


def local_place(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """The shapes of the whole tensor and of the local one, and where in the whole the local one begins."""
    mine = local(tensor)
    if not is_sharded(tensor):
        return tuple(tensor.shape), tuple(mine.shape), (0,) * tensor.dim()
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(tensor.shape), tuple(mine.shape), tuple(offset)


def part(tensor: torch.Tensor, whole: torch.Tensor) -> torch.Tensor | None:
    """What this rank has of a tensor that is, or is to be, as ``whole``; None: that is distributed otherwise."""
    if is_sharded(whole):
        alike = is_sharded(tensor) and whole.placements == tensor.placements
        return local(whole) if alike and torch.equal(whole.device_mesh.mesh, tensor.device_mesh.mesh) else None
    _, shape, offset = local_place(tensor)
    for dim, (start, size) in enumerate(zip(offset, shape, strict=True)):
        whole = whole.narrow(dim, min(start, whole.shape[dim]), size)
    return whole


def place(tensor: torch.Tensor, rows: range | None) -> tuple[list[int], list[int]]:
    """The shape of the whole tensor, and where in it the rows begin; both empty where they are all of it."""
    whole, _, offset = local_place(tensor)
    if whole == tuple(rows_of(local(tensor), rows).shape):
        return [], []
    first = rows.start if rows is not None and offset else 0
    return list(whole), [start + (first if dim == 0 else 0) for dim, start in enumerate(offset)]
