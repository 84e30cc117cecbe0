"""What of each parameter this process has: all of it, or the shard of a DTensor (fully_shard, tensor parallelism)."""

import dataclasses
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from superoffload._core import dtypes

DATA_TYPES = {getattr(torch, name): number for name, number in dtypes.FLOATS.items()}


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The elements that this rank has: the tensor's own memory, as FSDP gathers it."""
    return tensor._local_tensor if is_sharded(tensor) else tensor


def is_sharded(tensor: torch.Tensor) -> bool:
    dtensor = sys.modules.get("torch.distributed.tensor")  # half a second that most do not need
    return dtensor is not None and isinstance(tensor, dtensor.DTensor)


def is_in_parts(tensor: torch.Tensor) -> bool:
    """Whether several ranks have different elements of it."""
    if not is_sharded(tensor):
        return False
    sizes: Any = tensor
    return any(place.is_shard() and sizes.device_mesh.size(dim) > 1 for dim, place in enumerate(sizes.placements))


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


def gradient_dtype(parameter: torch.Tensor) -> torch.dtype:
    """The dtype in which autograd leaves its gradients: ``grad_dtype``, where the loop has set it."""
    given = getattr(parameter, "grad_dtype", None)
    return given if given in DATA_TYPES else local(parameter).dtype


def make_gradient_row_major(parameter: torch.Tensor) -> None:
    """Has autograd's gradient of the part that this rank has lie row by row."""
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
    return distributed(parameter, mine, parameter.device_mesh)


def distributed(parameter: Any, mine: torch.Tensor, mesh: Any) -> torch.Tensor:
    """The elements ``mine`` of this rank as a DTensor on the mesh, with the parameter's shape and placements."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        mine,
        mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=torch.empty(parameter.shape, dtype=parameter.dtype, device="meta").stride(),
    )


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


def named(param_groups: Iterable[dict[str, Any]]) -> Iterator[tuple[str, int, torch.nn.Parameter]]:
    """The parameters of the groups with their names and groups, in order; tied ones more than once."""
    for group_index, group in enumerate(param_groups):
        names = group.get("param_names") or [f"group{group_index}.param{i}" for i in range(len(group["params"]))]
        for name, tensor in zip(names, group["params"], strict=True):
            yield name, group_index, tensor


@dataclasses.dataclass(frozen=True)
class Block:
    """What a rank has of a whole tensor."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The block in the memory of the whole."""
        for dim, (start, size) in enumerate(zip(self.offset, self.shape, strict=True)):
            whole = whole.narrow(dim, min(start, whole.shape[dim]), size)
        return whole


@dataclasses.dataclass(eq=False)
class Matrix:
    """A parameter of which ranks have blocks, while one rank's daemon hosts all of it.

    The same on all ranks but for what the owner has of it.
    """

    parameter: torch.nn.Parameter
    name: str
    blocks: Sequence[Block]  # of each rank
    owner: int  # the rank whose daemon hosts it
    dtype: torch.dtype
    whole: torch.Tensor | None  # the owner's: what the daemon has published
    gradient: torch.Tensor | None = None  # the owner's: of the open step, once it is gathered

    def holders(self, rank: int) -> tuple[int, ...]:
        """The ranks that have the same block as this one, in order."""
        return tuple(other for other, block in enumerate(self.blocks) if block == self.blocks[rank])

    def sources(self) -> list[int]:
        """The ranks of which each has another block, and which have all of it together."""
        return [rank for rank, block in enumerate(self.blocks) if block.elements and self.holders(rank)[0] == rank]

    def receivers(self) -> list[int]:
        """The ranks that have elements of it."""
        return [rank for rank, block in enumerate(self.blocks) if block.elements]


def is_divided(whole: Sequence[int], blocks: Sequence[Block]) -> bool:
    """Whether a rank has a part of it only."""
    return any(block.shape != tuple(whole) for block in blocks)


@dataclasses.dataclass
class HostedParameter:
    """One trainable parameter, or this rank's shard of it, and its views of the daemon's memory."""

    tensor: torch.nn.Parameter
    name: str
    group: int
    rows: range | None = None  # of what this rank has, the hosted ones; None: all
    matrix: Matrix | None = None  # sharded, and hosted whole: what is hosted is the owner's copy, not the shard
    buckets: range = range(0)
    theta: torch.Tensor = dataclasses.field(init=False)  # the published parameter, once attached
    slots: tuple[torch.Tensor, ...] = ()  # where gradients are handed over, step by step in turn; on the CPU only

    @property
    def local(self) -> torch.Tensor:
        """The elements that are hosted."""
        if self.matrix is not None and self.matrix.whole is not None:
            return self.matrix.whole
        return rows_of(local(self.tensor), self.rows)

    @property
    def gradient_dtype(self) -> torch.dtype:
        return gradient_dtype(self.tensor)

    @property
    def has_gradient(self) -> bool:
        return self.tensor.grad is not None if self.matrix is None else self.matrix.gradient is not None

    @property
    def gradient(self) -> torch.Tensor | None:
        """The gradients of these elements."""
        if self.matrix is not None:
            return self.matrix.gradient
        found = gradient(self.tensor)
        return None if found is None else rows_of(found, self.rows)

    def place(self) -> tuple[list[int], list[int]]:
        """The shape of the whole tensor, and where in it these elements begin; both empty where they are all of it."""
        return ([], []) if self.matrix is not None else place(self.tensor, self.rows)
