"""Training a small model of 40 inputs, step by step, and what holds of it whatever its optimizer is."""

import functools

import pytest
import torch
from tests.support.optimizer_bits import bits, same


def backward(module: torch.nn.Module, step: int) -> None:
    x = torch.randn(8, 40, generator=torch.Generator().manual_seed(step)).to(next(module.parameters()).dtype)
    module(x).float().square().mean().backward()


def steps(module: torch.nn.Module, optimizer, *numbers: int) -> None:
    for number in numbers:
        backward(module, number)
        optimizer.step()
        optimizer.zero_grad()


def same_as_formula(optimizer, ours, formula, theirs, resting: str | None = None) -> None:
    """Trains both for eight steps; in each third, the parameter ``resting`` has no gradient."""
    for step in range(8):
        for module in (theirs, ours):
            backward(module, step)
            if resting is not None and step % 3 == 1:
                module.get_parameter(resting).grad = None  # its own step count, and its own bits, stand still
        for each in (formula, optimizer):
            each.step()
            each.zero_grad()
        same(list(ours.parameters()), list(theirs.parameters()))
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        for key in optimizer.algorithm.moments:
            same([optimizer.state[p][key]], [formula.state[q][key]])


def same_whether_speculated(make, model, bias: str) -> None:
    """``make`` builds an optimizer of what ``model`` builds; steps are clipped, and one that ``bias`` spoils is not."""
    found = []
    for speculation in ("always", "never"):
        module = model()
        optimizer = make(module, max_grad_norm=0.05, speculation=speculation)
        for step in range(6):
            backward(module, step)
            if step == 3:
                module.get_parameter(bias).grad[5] = torch.inf
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.committed_steps == 5
        found.append(bits(optimizer, module))
    same(*found)


def same_in_jax(optimizer, module: torch.nn.Module, in_jax) -> None:
    """Trains both from the module's weights for four steps, under the gradients of torch."""
    import jax  # only here: it takes a second

    def pytree(value) -> dict:
        tree = {}
        for name, p in module.named_parameters():
            *path, key = name.split(".")
            functools.reduce(lambda node, part: node.setdefault(part, {}), path, tree)[key] = value(p)
        return tree

    def in_torch(tree) -> list[torch.Tensor]:
        return [torch.from_dlpack(leaf) for leaf in jax.tree.leaves(tree)]

    params = in_jax.init(pytree(lambda p: jax.dlpack.from_dlpack(p.detach().clone())))
    for step in range(4):
        backward(module, step)
        params, _ = in_jax.step(pytree(lambda p: jax.dlpack.from_dlpack(p.grad)), params=params)
        optimizer.step()
        optimizer.zero_grad()
        same(in_torch(params), jax.tree.leaves(pytree(lambda p: p.detach())))


def converted(make, build, saved, option: str, before: torch.dtype, after: torch.dtype, *, tensors: int) -> tuple:
    """The state of an optimizer, and of one that is restored from its checkpoint with another dtype, and says so."""
    module, other = build(), build()
    optimizer = make(module, **{option: before})
    steps(module, optimizer, 0, 1)
    optimizer.save_checkpoint(saved)
    with pytest.warns(RuntimeWarning, match=f"restored from state of another dtype: {tensors} tensors are converted"):
        heir = make(other, name=f"{option}-to-{after}", restore=saved, **{option: after})
    same(list(other.parameters()), list(module.parameters()))
    return optimizer.state_tensors(), heir.state_tensors()
