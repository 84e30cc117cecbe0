"""Which parameters a daemon hosts, and what it is told of them."""

import collections
import ctypes
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import grpc
import torch

from superoffload._core import blocks, optimizers
from superoffload._core.error import Error
from superoffload.torch.ranks import shards
from superoffload.torch.ranks.shards import DATA_TYPES, HostedParameter, Matrix, named
from superoffload.v1 import optimizer_pb2

_LEAST_BLOCK_BYTES = 4 << 20  # of parameters: as the last buckets have


def collect(
    param_groups: list[dict[str, Any]],
    rows_of: Callable[[torch.Tensor], range | None] = lambda _: None,
    matrix_of: Callable[[torch.Tensor], Matrix | None] = lambda _: None,
    moves: bool = False,
) -> list[HostedParameter]:
    """The trainable parameters of all groups, tied ones once, in order; raises Error for what cannot be hosted.

    ``rows_of``: the rows of a parameter that are hosted here, while others host the rest; None is all. ``matrix_of``: a
    sharded parameter that one rank hosts whole. ``moves``: they move to a GPU, whatever device each is on, or ``meta``.
    """
    devices_served = ("cpu", "cuda", "meta") if moves else ("cpu", "cuda")
    hosted: dict[int, HostedParameter] = {}
    for name, group_index, tensor in named(param_groups):
        rows, matrix = rows_of(tensor), matrix_of(tensor)
        if matrix is not None:
            nothing = matrix.whole is None
        else:
            nothing = shards.local(tensor).numel() == 0 or (rows is not None and len(rows) == 0)
        if not tensor.requires_grad or nothing or id(tensor) in hosted:
            continue
        supported = tensor.device.type in devices_served and tensor.dtype in DATA_TYPES
        if not supported or tensor.layout != torch.strided:
            raise Error(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"parameter {name} is {tensor.layout} {tensor.dtype} on {tensor.device}, but the daemon serves "
                "dense bfloat16, float16 and float32 parameters on the CPU or a GPU; move or cast the model first, "
                "or name a GPU to move to (GpuOptions(device=...))",
            )
        hosted[id(tensor)] = HostedParameter(tensor, name, group_index, rows, matrix)
    if not hosted:
        raise Error(
            grpc.StatusCode.INVALID_ARGUMENT,
            "no parameter requires gradients, or this rank has no element of them; there is nothing to optimize",
        )
    devices = {str(parameter.local.device) for parameter in hosted.values()}
    if len(devices) > 1 and not moves:
        raise Error(
            grpc.StatusCode.INVALID_ARGUMENT,
            f"parameters are on {', '.join(sorted(devices))}; build one optimizer per device",
        )
    _check_own_memory([parameter for parameter in hosted.values() if parameter.tensor.device.type != "meta"])
    return list(hosted.values())


def not_hosted(param_groups: list[dict[str, Any]], hosted: list[HostedParameter]) -> list[tuple[str, torch.Tensor]]:
    """Returns parameters that are trained and of which this rank hosts nothing, and shards that are frozen."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, _, tensor in named(param_groups):
        if tensor.requires_grad or shards.is_sharded(tensor):
            found.setdefault(id(tensor), (name, tensor))
    for parameter in hosted:
        found.pop(id(parameter.tensor))
    return list(found.values())


def _check_own_memory(hosted: list[HostedParameter]) -> None:
    """Raises Error when two of the parameters have elements in common, or one has some twice."""
    spans = []
    for parameter in hosted:
        tensor = parameter.local
        if torch._debug_has_internal_overlap(tensor) == 1:
            raise _shares_memory(parameter)
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        spans.append((tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size(), parameter))
    end = 0
    neighbours: list[tuple[int, int, HostedParameter]] = []
    for span in sorted(spans, key=lambda span: span[:2]):
        if span[0] >= end:
            neighbours = []
        neighbours.append(span)
        end = max(end, span[1])
        if len(neighbours) > 1 and _overlap(neighbours, end):
            raise _shares_memory(span[2])


def _overlap(spans: list[tuple[int, int, HostedParameter]], end: int) -> bool:
    """Whether two have an element in common: rows and columns of one matrix may lie between each other."""
    begin = min(span[0] for span in spans)
    used = torch.zeros(end - begin, dtype=torch.uint8, device="cpu")
    for address, _, parameter in spans:
        tensor = parameter.local
        strides = [stride * tensor.element_size() for stride in tensor.stride()]
        used.as_strided(tensor.shape, strides, address - begin).add_(1)
    return bool((used > 1).any())


def _shares_memory(parameter: HostedParameter) -> Error:
    return Error(
        grpc.StatusCode.INVALID_ARGUMENT,
        f"elements of parameter {parameter.name} share memory with others that the optimizer updates; to tie "
        "parameters, assign the same torch.nn.Parameter to both modules",
    )


def specification(
    hosted: list[HostedParameter],
    in_float32: list[bool],
    gradient_dtype: torch.dtype | None = None,
    joins_small_blocks: bool = True,
) -> list[optimizer_pb2.Parameter]:
    """Returns what CreateOptimizer takes; gradients have their own dtype, or `gradient_dtype`.

    ``in_float32``: whose state is kept so, whatever that of others is. ``joins_small_blocks``: blocks of which each is
    too small for a bucket of its own count as one.
    """
    units = _units(hosted, joins_small_blocks)
    return [
        optimizer_pb2.Parameter(
            name=parameter.name,
            shape=list(parameter.local.shape),
            dtype=DATA_TYPES[parameter.local.dtype],
            gradient_dtype=DATA_TYPES[gradient_dtype or parameter.gradient_dtype],
            group=parameter.group,
            unit=unit,
            global_shape=global_shape,
            global_offset=global_offset,
            state_in_float32=wide,
        )
        for parameter, wide, unit in zip(hosted, in_float32, units, strict=True)
        for global_shape, global_offset in [parameter.place()]
    ]


def _units(hosted: list[HostedParameter], joins_small_blocks: bool) -> list[int]:
    sizes = [parameter.local.nbytes for parameter in hosted]
    units = blocks.units([parameter.name for parameter in hosted], sizes)
    bytes_of: collections.Counter[int] = collections.Counter()
    for unit, size in zip(units, sizes, strict=True):
        bytes_of[unit] += size
    in_blocks = [size for unit, size in bytes_of.items() if 0 < unit < max(units)] or [0]
    return units if min(in_blocks) >= _LEAST_BLOCK_BYTES or not joins_small_blocks else [0] * len(units)


def check_same(
    hosted: list[HostedParameter],
    in_float32: list[bool],
    optimizer: optimizer_pb2.Optimizer,
    any_gradient_dtype: bool = False,
) -> None:
    """Raises Error unless the hosted optimizer was made for these very parameters.

    ``any_gradient_dtype``: gradients are cast on their way, so theirs may be another.
    """
    ours = specification(hosted, in_float32)
    if any_gradient_dtype:
        for mine, other in zip(ours, optimizer.parameters, strict=False):
            mine.gradient_dtype = other.gradient_dtype
    optimizers.check_same(ours, optimizer)


def checksums(values: Iterable[torch.Tensor]) -> list[int]:
    """CRC-32 of each parameter's bytes, row-major."""
    result = []
    for value in values:
        tensor = value.detach().cpu().contiguous()
        data = (ctypes.c_byte * (tensor.numel() * tensor.element_size())).from_address(tensor.data_ptr())
        result.append(zlib.crc32(data))
    return result


def buckets_of(placement: optimizer_pb2.Placement) -> range:
    """The buckets that hold a parameter's elements."""
    return range(placement.first_bucket, placement.first_bucket + placement.bucket_count)


def check_unfrozen(
    param_groups: list[dict[str, Any]], trained: Iterable[torch.nn.Parameter], built_of: Iterable[int]
) -> None:
    """Raises Error when another parameter has a gradient. ``built_of``: ids of those that were in the groups."""
    known = set(map(id, trained))
    for group in param_groups:
        for tensor in group["params"]:
            if tensor.grad is not None and shards.local(tensor).numel() > 0 and id(tensor) not in known:
                if id(tensor) not in built_of:
                    raise has_grown()
                raise Error(
                    grpc.StatusCode.FAILED_PRECONDITION,
                    "a parameter that was frozen when the optimizer was built has a gradient; "
                    "build the optimizer after unfreezing",
                )


def has_grown() -> Error:
    return Error(
        grpc.StatusCode.FAILED_PRECONDITION,
        "a parameter was put into the list of a parameter group after the optimizer was built, which nobody trains; "
        "pass it to add_param_group(), or build a new optimizer",
    )
