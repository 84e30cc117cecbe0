"""Moments in bf16: bits are those of the formula, whatever is sharded, restarted, speculated or restored."""

import copy
import warnings

import pytest
import torch
from tests import conftest
from tests.support.narrow_moments import Formula, model, whole
from tests.support.optimizer_bits import bits, same
from tests.support.rank_processes import Run
from tests.support.small_training import converted, same_as_formula, same_in_jax, same_whether_speculated, steps

import superoffload
import superoffload.torch

ROUNDINGS = ("stochastic", "nearest")


@pytest.fixture(scope="module")
def ranks():
    yield from conftest.several(2)


@pytest.fixture
def make(ranks):
    built = []

    def build(module, kind="AdamW", state_dtype=torch.bfloat16, **options):
        parameters = module.named_parameters() if isinstance(module, torch.nn.Module) else module
        optimizer = getattr(superoffload.torch, kind)(
            parameters, lr=1e-2, endpoint=ranks[0].endpoint, state_dtype=state_dtype, **options
        )
        built.append(optimizer)
        return optimizer

    yield build
    for optimizer in built:
        optimizer.close()


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("kind", ["AdamW", "Lion"])
def test_steps_are_those_of_the_formula(make, kind, rounding):
    theirs, ours = model(), model()
    formula = Formula(theirs.named_parameters(), kind, rounding, seed=1 << 40 | 7)
    optimizer = make(ours, kind, rounding=rounding, seed=1 << 40 | 7, speculation="always")
    same_as_formula(optimizer, ours, formula, theirs, resting="0.bias")
    for p in ours.parameters():
        for key in optimizer.algorithm.moments:
            assert optimizer.state[p][key].dtype == torch.bfloat16


def test_another_seed_has_other_bits(make):
    found = []
    for seed in (None, 0, 1):
        module = model()
        optimizer = make(module, seed=seed)
        steps(module, optimizer, *range(5))
        found.append(bits(optimizer, module))
    same(found[0], found[1])
    assert not torch.equal(found[0][0], found[2][0])


def test_clips_and_skips_are_the_same_whether_speculated_or_not(make):
    same_whether_speculated(make, model, "0.bias")


@pytest.mark.parametrize("shards", [True, False])
def test_ranks_have_the_bits_of_one(ranks, make, tmp_path, shards):
    module = model()
    optimizer = make(module, seed=5)
    steps(module, optimizer, *range(6))
    expected = whole(optimizer, module)
    saved = str(tmp_path / "saved")
    scenarios = (
        {"name": f"bf16-{shards}-a", "steps": 4, "shards": shards, "seed": 5, "save": saved},
        {"name": f"bf16-{shards}-b", "first": 4, "steps": 6, "shards": shards, "restore": saved},
    )
    for rank in Run(ranks, tmp_path / "run", *scenarios, trainer="narrow_moments").results():
        assert rank[1].keys() == expected.keys()
        for key, tensor in expected.items():
            assert torch.equal(rank[1][key], tensor), key
    # What two ranks saved goes into one.
    alone = model()
    heir = make(alone, name=f"bf16-{shards}-heir", restore=saved)
    steps(alone, heir, 4, 5)
    same(bits(heir, alone), bits(optimizer, module))


def test_ranks_with_different_seeds_are_refused(ranks, tmp_path):
    scenario = {"name": "bf16-seeds", "steps": 1, "seeds_differ": True}
    for rank in Run(ranks, tmp_path / "run", scenario, trainer="narrow_moments").results():
        assert "rank 1 is built with seed=1 but rank 0 with seed=0" in rank[0]


def test_who_comes_back_goes_on_under_the_seed_that_is_there(make):
    alone, again = model(), model()
    through, first = make(alone, seed=9), make(again, seed=9, name="bf16-again")
    steps(alone, through, *range(4))
    steps(again, first, 0, 1)
    first.close()
    with pytest.raises(superoffload.Error, match="rounds under seed 9, but this is built with seed=4"):
        make(model(), name="bf16-again", seed=4, sync="pull_params")
    with pytest.raises(superoffload.Error, match=r"is AdamW with state_dtype=torch.bfloat16.* but this is AdamW;"):
        make(model(), name="bf16-again", state_dtype=torch.float32, sync="pull_params")
    second = make(again, name="bf16-again")
    steps(again, second, 2, 3)
    same(bits(second, again), bits(through, alone))


def test_a_restored_optimizer_goes_on_under_the_seed_of_the_checkpoint(make, tmp_path):
    module = model()
    optimizer = make(module, seed=9)
    steps(module, optimizer, 0, 1)
    optimizer.save_checkpoint(tmp_path / "saved")
    steps(module, optimizer, 2, 3)
    other = model()
    heir = make(other, name="bf16-restored", restore=tmp_path / "saved", seed=4)
    steps(other, heir, 2, 3)
    same(bits(heir, other), bits(optimizer, module))


@pytest.mark.parametrize(("before", "after"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_a_checkpoint_of_another_dtype_is_converted(make, tmp_path, before, after):
    saved, heir = converted(make, model, tmp_path / "saved", "state_dtype", before, after, tensors=8)
    for name, arrays in saved.items():
        for key, tensor in heir[name].items():
            assert torch.equal(tensor, arrays[key] if key == "master" else arrays[key].to(after))


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_the_state_of_torch_goes_in_and_out(make, state_dtype):
    theirs = model()
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    steps(theirs, optimizer, 0, 1, 2)
    ours = copy.deepcopy(theirs)
    heir = make(ours, state_dtype=state_dtype)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        heir.load_state_dict(optimizer.state_dict())
    assert any("rounded to bfloat16" in str(w.message) for w in told) is (state_dtype == torch.bfloat16)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(heir.state[p][key], optimizer.state[q][key].to(state_dtype))
    back = torch.optim.AdamW(copy.deepcopy(ours).parameters(), lr=1e-2)
    back.load_state_dict(heir.torch_state_dict())
    for state, arrays in zip(back.state.values(), heir.state_tensors().values(), strict=True):
        assert torch.equal(state["exp_avg"], arrays["exp_avg"].float())


def test_a_deep_copy_of_the_state_dict_is_the_moment(make):
    module = model()
    optimizer = make(module, seed=3)
    steps(module, optimizer, 0, 1)
    kept = copy.deepcopy(optimizer.state_dict())
    steps(module, optimizer, 2, 3)
    expected = bits(optimizer, module)
    optimizer.load_state_dict(kept)
    steps(module, optimizer, 2, 3)
    same(bits(optimizer, module), expected)


def test_jax_has_the_bits_of_torch(make, ranks):
    import jax.numpy as jnp  # only here: it takes a second

    import superoffload.jax

    module = model()
    optimizer = make(module, seed=6)

    theirs = superoffload.jax.adamw(
        1e-2, weight_decay=1e-2, state_dtype=jnp.bfloat16, seed=6, endpoint=ranks[0].endpoint
    )
    same_in_jax(optimizer, module, theirs)
    theirs.close()
    with pytest.raises(ValueError, match="state_dtype is float16 but must be float32 or bfloat16"):
        superoffload.jax.adamw(1e-2, state_dtype=jnp.float16)


def test_an_added_group_begins_in_bfloat16(make):
    module = model()
    optimizer = make([("weight", module[0].weight)])
    steps(module, optimizer, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.add_param_group({"params": [("bias", module[0].bias)]})
    steps(module, optimizer, 1)
    assert optimizer.state[module[0].bias]["exp_avg"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"state_dtype": torch.float16}, "state_dtype is float16 but must be float32 or bfloat16"),
        ({"rounding": "up"}, "rounding is 'up' but must be one of 'stochastic', 'nearest'"),
        ({"seed": -1}, "seed is -1 but must be a whole number"),
        ({"seed": 1 << 64}, "but must be a whole number"),
        ({"seed": True}, "seed is True but must be a whole number"),
    ],
)
def test_what_is_wrong_is_said(make, options, why):
    with pytest.raises(ValueError, match=why):
        make(model(), **options)
