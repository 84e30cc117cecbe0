"""Which rank's daemon hosts which elements: each element exactly one, however many ranks have it.

Elements that several ranks have (whole parameters under DistributedDataParallel or beside sharded ones, HSDP's
replicas, DTensors with Replicate) are divided among these ranks by rows of the first dimension. Where the algorithm
updates whole matrices, each parameter has an owner, sharded ones too. So each element is counted once in the norm, and
its state exists once. replicas.py brings what is published to the ranks that do not host it; matrices.py brings
gradients of shards to the owner.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import grpc
import torch

from superoffload._core.error import Error
from superoffload.torch.ranks import shards
from superoffload.torch.ranks.gathering import Gatherings
from superoffload.torch.ranks.shards import Block, Matrix, is_divided


@dataclasses.dataclass
class TorchGroup:
    """`superoffload._core.run.Group` over torch.distributed."""

    rank: int
    ranks: int
    group: Any

    def __post_init__(self) -> None:
        self._gatherings = Gatherings(self.rank, self.ranks, self.group)

    def gather_objects(self, message: Any) -> list[Any]:
        return self._gatherings.gather_objects(message)

    def absent(self, purpose: str, seconds: float) -> list[int]:
        return self._gatherings.absent(purpose, seconds)

    def gather_doubles(self, values: list[float]) -> list[list[float]]:
        own = torch.tensor(values, dtype=torch.float64, device="cpu")
        return [theirs.tolist() for theirs in self._gatherings.gather(own)]

    def gather_bytes(self, own: torch.Tensor) -> list[torch.Tensor]:
        """As many of all ranks, in rank order."""
        return self._gatherings.gather(own)

    def exchange(self, own: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        return self._gatherings.exchange(own, sent, received)


@dataclasses.dataclass
class Share:
    """This rank's share of a parameter that others have as well."""

    parameter: torch.nn.Parameter
    name: str
    ranks: tuple[int, ...]  # of the run: who has the same elements, this rank included
    owner: int | None = None  # the rank whose daemon hosts all of them

    def rows(self, rank: int) -> range:
        """Which of the local rows the daemon of a rank hosts; a scalar is one row."""
        return _rows(shards.local(self.parameter).shape, self.ranks if self.owner is None else (self.owner,), rank)


@dataclasses.dataclass
class Sharding:
    """How an optimizer's parameters are divided among the ranks that train together."""

    group: TorchGroup
    trained: list[torch.nn.Parameter]  # the same on all ranks, in order
    shares: dict[int, Share]  # by id; those that only this rank has are not in it
    matrices: list[Matrix]  # in order; for an algorithm that updates whole ones

    def rows(self, tensor: torch.Tensor) -> range | None:
        """Returns which of the local rows this rank's daemon hosts; None: all."""
        share = self.shares.get(id(tensor))
        return None if share is None else share.rows(self.group.rank)

    def reduce_gradients(self) -> None:
        """All ranks have gradients distributed as parameters are."""
        for parameter in self.trained:
            shards.reduce(parameter)


def _trained(param_groups: Iterable[dict[str, Any]]) -> list[tuple[str, torch.nn.Parameter]]:
    """Tied ones once."""
    result: dict[int, tuple[str, torch.nn.Parameter]] = {}
    for name, _, tensor in shards.named(param_groups):
        if tensor.requires_grad:
            result.setdefault(id(tensor), (name, tensor))
    return list(result.values())


def sharding(
    param_groups: Iterable[dict[str, Any]], replicas: Any = None, outlives: bool = False, matrices: bool = False
) -> Sharding | None:
    """None where this process trains alone; raises Error for what cannot be trained.

    ``replicas``: the process group whose ranks train the same whole parameters; True: all ranks. ``outlives``: the
    optimizer has a name. ``matrices``: the algorithm updates whole ones.
    """
    trained = _trained(param_groups)
    sharded = [(name, tensor) for name, tensor in trained if shards.is_sharded(tensor)]
    for name, tensor in sharded:
        _check_placements(name, tensor)
    if not sharded and not replicas:
        if outlives and replicas is None and _ranks() > 1:
            raise _refused(
                f"a name and whole parameters in a group of {_ranks()} ranks: pass replicas=True where all ranks train "
                "the same parameters (DistributedDataParallel), or replicas=False where each trains its own"
            )
        return None
    group = _group([tensor for _, tensor in sharded], replicas)
    places = group.gather_objects([shards.local_place(tensor) for _, tensor in trained])
    _check_alike(places)
    owners = _owners(places, len(trained)) if matrices else {}
    shares, divided = {}, []
    for index, (name, tensor) in enumerate(trained):
        same = _same_elements(places, index, group.rank)
        if index in owners and is_divided(tensor.shape, _blocks(places, index)):
            divided.append(_matrix(name, tensor, _blocks(places, index), owners[index], group.rank))
        elif len(same) > 1 and shards.local(tensor).numel() > 0:
            shares[id(tensor)] = Share(tensor, name, same, owners.get(index))
    for rank in range(group.ranks):
        if not any(_hosts(places, index, rank, owners.get(index)) for index in range(len(trained))):
            raise _refused(f"no element for the daemon of rank {rank}: train so small a model on fewer ranks")
    return Sharding(group, [tensor for _, tensor in trained], shares, divided)


def _blocks(places: list[list[Any]], index: int) -> tuple[Block, ...]:
    """What each rank has of a parameter."""
    return tuple(Block(shape, offset) for _, shape, offset in (theirs[index] for theirs in places))


def _matrix(name: str, tensor: torch.nn.Parameter, blocks: tuple[Block, ...], owner: int, rank: int) -> Matrix:
    whole = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu") if rank == owner else None
    matrix = Matrix(tensor, name, blocks, owner, tensor.dtype, whole)
    if sum(blocks[source].elements for source in matrix.sources()) != tensor.numel():
        raise _refused(
            f"an algorithm that updates whole matrices, and the ranks that train together have no whole {name}: pass "
            "replicas= the process group of all that do"
        )
    return matrix


def _owners(places: list[list[Any]], parameters: int) -> dict[int, int]:
    """Returns whose daemon hosts which parameter that all ranks have: the largest first, to the rank with least."""
    hosted = [0] * len(places)
    owners = {}
    for index in sorted(range(parameters), key=lambda index: -math.prod(places[0][index][0])):
        owner = hosted.index(min(hosted))
        owners[index] = owner
        hosted[owner] += math.prod(places[0][index][0])
    return owners


def _rows(shape: Sequence[int], ranks: Sequence[int], rank: int) -> range:
    count = shape[0] if len(shape) > 0 else 1
    if rank not in ranks:
        return range(count, count)
    each = -(-count // len(ranks))
    first = min(ranks.index(rank) * each, count)
    return range(first, min(first + each, count))


def _same_elements(places: list[list[Any]], index: int, rank: int) -> tuple[int, ...]:
    """The ranks that have the same elements of a parameter as this one."""
    return tuple(other for other, theirs in enumerate(places) if theirs[index] == places[rank][index])


def _hosts(places: list[list[Any]], index: int, rank: int, owner: int | None) -> bool:
    """Whether the rank's daemon hosts an element of a parameter."""
    whole, shape, _ = places[rank][index]
    if owner is not None and is_divided(whole, _blocks(places, index)):
        return rank == owner
    ranks = _same_elements(places, index, rank) if owner is None else (owner,)
    return math.prod(shape) > 0 and len(_rows(shape, ranks, rank)) > 0


def _ranks() -> int:
    available = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if available else 1


def _check_placements(name: str, tensor: torch.Tensor) -> None:
    from torch.distributed.tensor.placement_types import _StridedShard

    if any(placement.is_partial() for placement in tensor.placements):
        raise _refused(f"a parameter with Partial placements, {name}: redistribute it to Shard or Replicate first")
    if shards.local(tensor).device.type not in (tensor.device_mesh.device_type, "meta"):
        raise _refused(f"a parameter under CPUOffloadPolicy, {name}: leave the policy out, the daemon keeps the state")
    for placement in tensor.placements:
        if isinstance(placement, _StridedShard) and tensor.shape[placement.dim] % tensor.device_mesh.size() != 0:
            raise _refused(
                f"{name}, whose dimension {placement.dim} of size {tensor.shape[placement.dim]} is sharded twice and "
                f"not divisible by {tensor.device_mesh.size()} ranks: pad it, or leave it out of tensor parallelism"
            )


def _group(sharded: Sequence[Any], replicas: Any) -> TorchGroup:
    """Returns the group in which all ranks that train the parameters agree."""
    if _ranks() == 1 and not torch.distributed.is_initialized():
        raise _refused("replicas=, but torch.distributed is not initialized: call init_process_group() first")
    meshes = {tensor.device_mesh for tensor in sharded}
    if replicas and replicas is not True:
        group = replicas
        if any(mesh.size() > torch.distributed.get_world_size(group) for mesh in meshes):
            raise _refused("parameters that are sharded over more ranks than replicas= has: pass the group of all")
    elif not replicas and len(meshes) == 1 and (mesh := next(iter(meshes))).ndim == 1:
        group = mesh.get_group()
    elif replicas or any(_root(mesh).size() == _ranks() for mesh in meshes):
        group = torch.distributed.group.WORLD
    else:
        raise _refused("meshes that do not have all ranks: pass replicas= the process group of the ranks that train")
    ranks, rank = torch.distributed.get_world_size(group), torch.distributed.get_rank(group)
    if rank < 0:
        raise _refused("a process group in replicas= that this rank does not belong to")
    return TorchGroup(rank, ranks, group)


def _root(mesh: Any) -> Any:
    return mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else mesh


def _check_alike(places: list[list[Any]]) -> None:
    """Raises Error on all ranks where one has parameters of other shapes."""
    for rank, theirs in enumerate(places):
        if [whole for whole, _, _ in theirs] != [whole for whole, _, _ in places[0]]:
            raise Error(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"ranks 0 and {rank} train parameters of different shapes; ranks that train different parameters need "
                "process groups of their own",
            )


def _refused(what: str) -> Error:
    return Error(grpc.StatusCode.UNIMPLEMENTED, f"the optimizer has {what}")
