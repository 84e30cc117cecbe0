"""DTensors in the CPU's memory that are distributed as others are, which may be on GPUs."""

import operator
from typing import Any

import torch

from superoffload.torch.ranks import gathering, shards

_meshes_on_host: list[tuple[list[Any], Any]] = []  # process groups of a mesh, and the mesh of the same ranks' CPUs


def like_on_host(parameter: torch.Tensor, mine: torch.Tensor) -> torch.Tensor:
    """The elements ``mine`` of this rank, in the CPU's memory, as a DTensor there where the parameter is one.

    All ranks of the parameter's mesh call it.
    """
    if not shards.is_sharded(parameter):
        return mine
    return shards.distributed(parameter, mine, _on_host(parameter.device_mesh))


def prepare(parameter: torch.Tensor) -> None:
    """All ranks of the parameter's mesh call it; later each may call `like_on_host` alone."""
    if shards.is_sharded(parameter):
        sharded: Any = parameter
        _on_host(sharded.device_mesh)


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
