"""Leaving the process group of torch.distributed."""

import gc

import torch.distributed


def leave() -> None:
    """Ends gloo's threads, too: one that is still dropping a tensor when Python ends would abort the process.

    They end with the last reference to their group, of which models and optimizers have some in cycles.
    """
    gc.collect()
    torch.distributed.destroy_process_group()
