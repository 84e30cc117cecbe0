"""Attention in parts is attention with the mask of all pairs of tokens, in fp64."""

import itertools

import pytest
import torch

from superoffload.torch.ranks.attention import Attention

LENGTHS = [[5, 1, 7, 11], [24]]


def with_a_mask(attention, query, key, value, lengths):
    rows, heads, length, _ = query.shape
    sequence = torch.stack(
        [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in lengths or [[length]] * rows]
    )
    places = torch.arange(length)
    distance = places[:, None] - places[None, :]
    seen = (sequence[:, None, :, None] == sequence[:, None, None, :]).expand(rows, heads, length, length)
    if attention.causal:
        seen = seen & (distance >= 0)
    if attention.window is not None:
        seen = seen & (distance < attention.window)
    key, value = (each.repeat_interleave(heads // each.shape[1], dim=1) for each in (key, value))
    logits = (attention.scale * query @ key.transpose(2, 3)).masked_fill(~seen, -torch.inf)
    if attention.sinks is not None:
        logits = torch.cat([logits, attention.sinks[:, None, None].expand(rows, heads, length, 1)], dim=3)
    return logits.softmax(dim=3)[..., :length] @ value


@pytest.mark.parametrize("lengths", [None, LENGTHS])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("causal", "window"), [(False, None), *itertools.product([True], [None, 1, 3, 8, 24, 30])])
def test_output_and_gradients(lengths, sinks, causal, window):
    generator = torch.Generator().manual_seed(1)

    def make(*shape):
        return torch.randn(shape, dtype=torch.float64, generator=generator, requires_grad=True)

    inputs = make(2, 4, 24, 6), make(2, 2, 24, 6), make(2, 2, 24, 6)
    of_heads = make(4) if sinks else None
    attention = Attention(0.7, causal, window, of_heads)
    weights = torch.randn(2, 4, 24, 6, dtype=torch.float64, generator=generator)
    outputs = attention(*inputs, lengths), with_a_mask(attention, *inputs, lengths)
    torch.testing.assert_close(*outputs, atol=1e-12, rtol=1e-12)
    sought = inputs + ((of_heads,) if sinks else ())
    gradients = [torch.autograd.grad((output * weights).sum(), sought) for output in outputs]
    for ours, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize(("window", "packed"), [(8, False), (None, True), (8, True)])
def test_memory_grows_with_the_length(window, packed):
    def saved_bytes(length):
        inputs = [torch.randn(1, 2, length, 8, requires_grad=True) for _ in range(3)]
        saved = {}

        def keep(tensor):
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            Attention(1.0, window=window)(*inputs, [[16] * (length // 16)] if packed else None)
        return sum(storage.nbytes() for storage in saved.values())

    assert saved_bytes(1024) < 4.1 * saved_bytes(256)
