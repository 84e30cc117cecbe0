"""Which pieces of parameters each bucket of gradients on a GPU has."""

import torch

from superoffload._core.gpu_attachment import GpuAttachment
from superoffload.torch.parameters import HostedParameter, buckets_of
from superoffload.v1 import optimizer_pb2


def bucket_pieces(layout: optimizer_pb2.Layout, hosted: list[HostedParameter]) -> list[list[tuple[int, int, int, int]]]:
    """Per bucket, ascending: parameter, its first element that is in the bucket, where in the bucket, how many."""
    pieces: list[list[tuple[int, int, int, int]]] = [[] for _ in layout.buckets]
    for index, (parameter, placement) in enumerate(zip(hosted, layout.placements, strict=True)):
        for number in buckets_of(placement):
            bucket = layout.buckets[number]
            begin = max(placement.state_offset, bucket.state_offset)
            end = min(placement.state_offset + parameter.local.numel(), bucket.state_offset + bucket.elements)
            pieces[number].append((index, begin - placement.state_offset, begin - bucket.state_offset, end - begin))
    for bucket_list in pieces:
        bucket_list.sort(key=lambda piece: piece[2])
    return pieces


def most_pieces(layout: optimizer_pb2.Layout, hosted: list[HostedParameter]) -> int:
    """Of one bucket."""
    return max(len(pieces) for pieces in bucket_pieces(layout, hosted))


@torch.no_grad()
def map_buckets(hosted: list[HostedParameter], attachment: GpuAttachment) -> None:
    """Fills in which buckets hold each parameter."""
    for parameter, placement in zip(hosted, attachment.optimizer.layout.placements, strict=True):
        parameter.buckets = buckets_of(placement)
