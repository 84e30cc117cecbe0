"""What two optimizers that must agree have, bit by bit."""

import torch


def bits(optimizer, module: torch.nn.Module) -> list[torch.Tensor]:
    """Weights, and copies of the state."""
    state = optimizer.state_tensors()
    return [p.detach().clone() for p in module.parameters()] + [t for arrays in state.values() for t in arrays.values()]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> None:
    assert len(a) == len(b)
    for one, other in zip(a, b, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
