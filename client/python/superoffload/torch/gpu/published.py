"""Parameters in the memory where the daemon publishes them, on the host."""

import torch

from superoffload._core.gpu_attachment import GpuAttachment


def published_of(attachment: GpuAttachment, index: int, like: torch.Tensor) -> torch.Tensor:
    """A parameter there, of the dtype and shape of ``like``."""
    offset = attachment.optimizer.layout.placements[index].parameters_offset
    return torch.frombuffer(attachment.parameters(offset, like.nbytes), dtype=like.dtype).view(like.shape)


def publish(attachment: GpuAttachment, index: int, like: torch.Tensor, value: torch.Tensor) -> None:
    """Copies a value there, and waits for it."""
    published = published_of(attachment, index, like)
    published.view(-1).view(torch.uint8).copy_(value.to(like.dtype).contiguous().view(-1).view(torch.uint8))
