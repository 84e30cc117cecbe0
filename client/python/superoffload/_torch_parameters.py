"""Which parameters a daemon hosts, and where the published ones and their gradients lie in its memory."""

import ctypes
import dataclasses
import zlib
from typing import Any

import grpc
import torch

from superoffload._attachment import Attachment
from superoffload._error import Error
from superoffload.v1 import optimizer_pb2

DATA_TYPES = {
    torch.bfloat16: optimizer_pb2.DATA_TYPE_BFLOAT16,
    torch.float16: optimizer_pb2.DATA_TYPE_FLOAT16,
    torch.float32: optimizer_pb2.DATA_TYPE_FLOAT32,
}


@dataclasses.dataclass
class HostedParameter:
    """One trainable parameter and its views of the daemon's memory."""

    tensor: torch.nn.Parameter
    name: str
    group: int
    buckets: range = range(0)
    theta: torch.Tensor | None = None  # the published parameter
    slots: tuple[torch.Tensor, ...] = ()  # the gradient in each of the two slots; on the CPU only


def collect(param_groups: list[dict[str, Any]]) -> list[HostedParameter]:
    """The trainable parameters of all groups, tied ones once, in order; raises Error for what cannot be hosted."""
    hosted: dict[int, HostedParameter] = {}
    for group_index, group in enumerate(param_groups):
        names = group.get("param_names") or [f"group{group_index}.param{i}" for i in range(len(group["params"]))]
        for name, tensor in zip(names, group["params"], strict=True):
            if not tensor.requires_grad or tensor.numel() == 0 or id(tensor) in hosted:
                continue
            supported = tensor.device.type in ("cpu", "cuda") and tensor.dtype in DATA_TYPES
            if not supported or tensor.layout != torch.strided:
                raise Error(
                    grpc.StatusCode.INVALID_ARGUMENT,
                    f"parameter {name} is {tensor.layout} {tensor.dtype} on {tensor.device}, but the daemon serves "
                    "dense bfloat16, float16 and float32 parameters on the CPU or a GPU; move or cast the model first",
                )
            hosted[id(tensor)] = HostedParameter(tensor, name, group_index)
    if not hosted:
        raise Error(grpc.StatusCode.INVALID_ARGUMENT, "no parameter requires gradients; there is nothing to optimize")
    if len(devices := {str(parameter.tensor.device) for parameter in hosted.values()}) > 1:
        raise Error(
            grpc.StatusCode.INVALID_ARGUMENT,
            f"parameters are on {', '.join(sorted(devices))}; build one optimizer per device",
        )
    _check_own_memory(list(hosted.values()))
    return list(hosted.values())


def _check_own_memory(hosted: list[HostedParameter]) -> None:
    """Raises Error when two of the parameters have elements in common, or one has some twice."""
    spans = []
    for parameter in hosted:
        tensor = parameter.tensor
        if torch._debug_has_internal_overlap(tensor) == 1:
            raise _shares_memory(parameter)
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        spans.append((tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size(), parameter))
    end, neighbours = 0, []
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
    used = torch.zeros(end - begin, dtype=torch.uint8)
    for address, _, parameter in spans:
        tensor = parameter.tensor
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
    hosted: list[HostedParameter], gradient_dtype: torch.dtype | None = None
) -> list[optimizer_pb2.Parameter]:
    """As CreateOptimizer takes it; gradients have the dtype of their parameter, or `gradient_dtype`."""
    return [
        optimizer_pb2.Parameter(
            name=parameter.name,
            shape=list(parameter.tensor.shape),
            dtype=DATA_TYPES[parameter.tensor.dtype],
            gradient_dtype=DATA_TYPES[gradient_dtype or parameter.tensor.dtype],
            group=parameter.group,
        )
        for parameter in hosted
    ]


def check_same(
    hosted: list[HostedParameter], optimizer: optimizer_pb2.Optimizer, any_gradient_dtype: bool = False
) -> None:
    """Raises Error unless the hosted optimizer was made for these very parameters.

    ``any_gradient_dtype``: gradients are cast on their way, so theirs may be another.
    """

    def words(parameter: optimizer_pb2.Parameter) -> str:
        dtype = optimizer_pb2.DataType.Name(parameter.dtype).removeprefix("DATA_TYPE_").lower()
        return f'"{parameter.name}" {list(parameter.shape)} {dtype} in group {parameter.group}'

    ours, theirs = specification(hosted), optimizer.parameters
    for mine, other in zip(ours, theirs, strict=False):
        if any_gradient_dtype:
            mine.gradient_dtype = other.gradient_dtype
        if mine != other:
            difference = f"the model's parameter {words(mine)} is {words(other)} there"
            break
    else:
        if len(ours) == len(theirs):
            return
        difference = f"the model has {len(ours)} parameters, it has {len(theirs)}"
    raise Error(
        grpc.StatusCode.FAILED_PRECONDITION,
        f'optimizer "{optimizer.name}" was made for another model: {difference}; '
        "choose another name or delete that optimizer",
    )


def checksums(hosted: list[HostedParameter]) -> list[int]:
    """CRC-32 of each parameter's bytes, row-major."""
    result = []
    for parameter in hosted:
        tensor = parameter.tensor.detach().cpu().contiguous()
        data = (ctypes.c_byte * (tensor.numel() * tensor.element_size())).from_address(tensor.data_ptr())
        result.append(zlib.crc32(data))
    return result


def _view(buffer: Any, tensor: torch.Tensor) -> torch.Tensor:
    return torch.frombuffer(buffer, dtype=tensor.dtype, count=tensor.numel()).view(tensor.shape)


def buckets_of(placement: optimizer_pb2.Placement) -> range:
    """The buckets that hold a parameter's elements."""
    return range(placement.first_bucket, placement.first_bucket + placement.bucket_count)


def map_views(hosted: list[HostedParameter], attachment: Attachment) -> None:
    """Fills in where each parameter and its gradients lie."""
    for parameter, placement in zip(hosted, attachment.optimizer.layout.placements, strict=True):
        tensor = parameter.tensor
        size = tensor.numel() * tensor.element_size()
        parameter.buckets = buckets_of(placement)
        parameter.theta = _view(attachment.parameters(placement.parameters_offset, size), tensor)
        parameter.slots = tuple(
            _view(attachment.gradients(offset, size), tensor) for offset in placement.gradient_offsets
        )
