"""DeepSpeed's data loader: of each data-parallel rank, in the order of torch's DistributedSampler."""

from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset


def make(
    dataset: Any,
    batch_size: int,
    *,
    rank: int,
    ranks: int,
    drop_last: bool,
    shuffle: bool,
    on_gpu: bool,
    sampler: Any = None,
    collate_fn: Any = None,
    workers: int = 0,
) -> DataLoader[Any]:
    """``rank`` of ``ranks``: among those that have different data."""
    if sampler is None and not isinstance(dataset, IterableDataset):
        if not hasattr(dataset, "__len__"):
            raise ValueError("training data must be a torch dataset, with a length or iterable")
        sampler = DistributedSampler(dataset, num_replicas=ranks, rank=rank, shuffle=shuffle)
    return DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=sampler,
        collate_fn=collate_fn,
        drop_last=drop_last,
        pin_memory=on_gpu,
        num_workers=workers,
    )
