"""Which block of a model a parameter is of."""

import pytest
import torch

from superoffload._core import blocks
from superoffload.torch import parameters

LLAMA = [
    "model.embed_tokens.weight",
    *(f"model.layers.{i}.{part}.weight" for i in range(11) for part in ("self_attn.q_proj", "mlp.experts.3.w1")),
    "model.norm.weight",
    "lm_head.weight",
]


def test_blocks_are_the_entries_of_the_largest_list():
    assert blocks.units(LLAMA, [100] * len(LLAMA)) == [0, *(1 + i for i in range(11) for _ in range(2)), 12, 12]


def test_a_smaller_list_is_what_lies_around_it():
    names = ["vision.blocks.0.weight", "vision.blocks.1.weight", "text.layers.4.weight", "text.layers.7.weight", "head"]
    assert blocks.units(names, [1, 1, 10, 10, 100]) == [0, 0, 1, 2, 3]


@pytest.mark.parametrize("names", [[], ["weight", "bias"], ["group0.param0", "group0.param1"]])
def test_without_a_list_all_are_of_one_unit(names):
    assert blocks.units(names, [1] * len(names)) == [0] * len(names)


def specified(width):
    model = torch.nn.Sequential(*(torch.nn.Linear(width, 1 << 10, bias=False, dtype=torch.bfloat16) for _ in range(3)))
    hosted = parameters.collect([{"params": list(model.parameters()), "param_names": ["0.w", "1.w", "2.w"]}])
    return [parameter.unit for parameter in parameters.specification(hosted, [False] * len(hosted))]


def test_small_blocks_share_buckets():
    assert specified(2 << 10) == [1, 2, 3]
    assert specified((2 << 10) - 1) == [0, 0, 0]


@pytest.mark.parametrize(
    ("count", "of", "expected"),
    [(0, 4, []), (1, 4, [1]), (2, 6, [1, 4]), (3, 4, [1, 2, 3]), (4, 4, [1, 2, 3, 4]), (3, 7, [1, 3, 5])],
)
def test_some_blocks_are_far_from_each_other(count, of, expected):
    assert blocks.evenly(count, of) == expected


def test_as_many_blocks_are_taken_as_are_asked_for():
    for of in range(1, 60):
        for count in range(of + 1):
            taken = blocks.evenly(count, of)
            assert len(taken) == len(set(taken)) == count
            gaps = {after - before for before, after in zip(taken, taken[1:], strict=False)}
            assert not gaps or max(gaps) - min(gaps) <= 1
