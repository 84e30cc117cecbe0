"""What the adapter asks of torch's GPU support, and nothing else does."""

from typing import Any

import torch


def is_on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cuda"


def ordinal(tensor: torch.Tensor) -> int:
    """Of the tensor's GPU, as this process counts them."""
    return tensor.get_device()


def current_stream(tensor: torch.Tensor) -> int:
    """The stream on which this thread works with the tensor's GPU."""
    return torch.cuda.current_stream(tensor.device).cuda_stream


def view(pointer: int, like: torch.Tensor, owner: Any) -> torch.Tensor:
    """GPU memory at `pointer` as a tensor of the dtype, shape and device of `like`; `owner` lives as long as it."""

    class Region:
        # The interface has no bfloat16, and torch looks at the bytes anyway.
        __cuda_array_interface__ = {
            "shape": (like.numel() * like.element_size(),),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 3,
        }

    region = Region()
    region.owner = owner
    return torch.as_tensor(region, device=like.device).view(like.dtype).view(like.shape)


def keep_for_stream(tensor: torch.Tensor, stream: int) -> None:
    """The tensor's memory is not reused before `stream` has done what is on it now."""
    tensor.record_stream(torch.cuda.ExternalStream(stream, device=tensor.device))
