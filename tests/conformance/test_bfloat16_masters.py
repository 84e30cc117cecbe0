"""Masters in bf16: bits are those of the formula, whatever moments are kept in, is sharded, restarted or speculated."""

import copy

import pytest
import torch
from tests import conftest
from tests.support.narrow_moments import Formula, model, whole
from tests.support.optimizer_bits import bits, same
from tests.support.rank_processes import Run
from tests.support.small_training import converted, same_as_formula, same_in_jax, same_whether_speculated, steps

import superoffload
import superoffload.torch

HIDDEN = 128
MOMENTS = ("float32", "stochastic", "8bit")
IN_FLOAT32 = ("0.bias", "2.weight", "2.bias")  # where moments are in 8 bits: vectors, and what is small


@pytest.fixture(scope="module")
def ranks():
    yield from conftest.several(2)


@pytest.fixture
def make(ranks):
    built = []

    def build(module, kind="AdamW", moments="float32", **options):
        cls = getattr(superoffload.torch, kind + ("8bit" if moments == "8bit" else ""))
        if moments == "stochastic":
            options["state_dtype"] = torch.bfloat16
        parameters = module.named_parameters() if isinstance(module, torch.nn.Module) else module
        options = {"master_dtype": torch.bfloat16, **options}
        built.append(cls(parameters, lr=1e-2, endpoint=ranks[0].endpoint, **options))
        return built[-1]

    yield build
    for optimizer in built:
        optimizer.close()


def narrow():
    return model(HIDDEN, torch.bfloat16)


@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("kind", ["AdamW", "Lion"])
def test_steps_are_those_of_the_formula(make, kind, moments):
    theirs, ours = narrow(), narrow()
    in_float32 = IN_FLOAT32 if moments == "8bit" else ()
    formula = Formula(
        theirs.named_parameters(), kind, moments, narrow_masters=True, seed=1 << 40 | 7, in_float32=in_float32
    )
    optimizer = make(ours, kind, moments, seed=1 << 40 | 7, speculation="always")
    same_as_formula(optimizer, ours, formula, theirs, resting="0.weight")
    for name, arrays in optimizer.state_tensors().items():
        assert arrays["master"].dtype == (torch.float32 if name in in_float32 else torch.bfloat16)
        if name not in in_float32:
            assert torch.equal(arrays["master"], ours.get_parameter(name))


@pytest.mark.parametrize("moments", MOMENTS)
def test_clips_and_skips_are_the_same_whether_speculated_or_not(make, moments):
    def build(module, **options):
        return make(module, "AdamW", moments, **options)

    same_whether_speculated(build, narrow, "0.bias")


@pytest.mark.parametrize("eight_bits", [False, True])
@pytest.mark.parametrize("shards", [True, False])
def test_ranks_have_the_bits_of_one(ranks, make, tmp_path, shards, eight_bits):
    module = narrow()
    moments = "8bit" if eight_bits else "stochastic"
    optimizer = make(module, "AdamW", moments, seed=5)
    steps(module, optimizer, *range(6))
    expected = whole(optimizer, module)
    common = {"hidden": HIDDEN, "narrow_masters": True, "eight_bits": eight_bits, "shards": shards}
    name, saved = f"masters-{shards}-{eight_bits}", str(tmp_path / "saved")
    scenarios = (
        {"name": f"{name}-a", "steps": 4, "seed": 5, "save": saved, **common},
        {"name": f"{name}-b", "first": 4, "steps": 6, "restore": saved, **common},
    )
    for rank in Run(ranks, tmp_path / "run", *scenarios, trainer="narrow_moments").results():
        assert rank[1].keys() == expected.keys()
        for key, tensor in expected.items():
            assert torch.equal(rank[1][key], tensor), key
    alone = narrow()
    heir = make(alone, "AdamW", moments, name=f"{name}-heir", restore=saved)
    steps(alone, heir, 4, 5)
    same(bits(heir, alone), bits(optimizer, module))


def test_who_comes_back_goes_on(make):
    alone, again = narrow(), narrow()
    through, first = make(alone, seed=9), make(again, seed=9, name="masters-again")
    steps(alone, through, *range(4))
    steps(again, first, 0, 1)
    first.close()
    with pytest.raises(superoffload.Error, match=r"is AdamW with master_dtype=torch.bfloat16, but this is AdamW;"):
        make(narrow(), name="masters-again", master_dtype=torch.float32, sync="pull_params")
    second = make(again, name="masters-again")
    steps(again, second, 2, 3)
    same(bits(second, again), bits(through, alone))


def test_what_the_trainer_writes_becomes_the_masters(make):
    module = narrow()
    optimizer = make(module)
    steps(module, optimizer, 0)
    with torch.no_grad():
        module[0].weight.mul_(0.5)
    expected = module[0].weight.detach().clone()
    optimizer.push_params()
    assert torch.equal(optimizer.state_tensors()["0.weight"]["master"], expected)
    steps(module, optimizer, 1)
    with torch.no_grad():
        module[0].weight.zero_()
    optimizer.pull_params()
    assert torch.equal(optimizer.state_tensors()["0.weight"]["master"], module[0].weight)
    assert module[0].weight.any()


@pytest.mark.parametrize(("before", "after"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_a_checkpoint_of_other_masters_is_converted(make, tmp_path, before, after):
    saved, heir = converted(make, narrow, tmp_path / "saved", "master_dtype", before, after, tensors=4)
    for name, arrays in saved.items():
        for key, tensor in heir[name].items():
            assert torch.equal(tensor, arrays[key].to(after) if key == "master" else arrays[key])


def test_parameters_of_other_dtypes_and_groups_that_ask_for_it_stay_in_32_bits(make):
    module = narrow()
    module[0].float()
    groups = [
        {"params": list(module[0].named_parameters(prefix="0"))},
        {"params": [("2.weight", module[2].weight)]},
        {"params": [("2.bias", module[2].bias)], "optim_bits": 32},
    ]
    kept = make(groups).state_tensors()
    masters = {name: arrays["master"].dtype for name, arrays in kept.items()}
    wide = {"0.weight", "0.bias", "2.bias"}
    assert masters == {name: torch.float32 if name in wide else torch.bfloat16 for name in masters}


def test_the_state_dict_goes_in_and_out(make):
    module = narrow()
    optimizer = make(module, seed=3)
    steps(module, optimizer, 0, 1)
    kept = copy.deepcopy(optimizer.state_dict())
    steps(module, optimizer, 2, 3)
    expected = bits(optimizer, module)
    optimizer.load_state_dict(kept)
    steps(module, optimizer, 2, 3)
    same(bits(optimizer, module), expected)
    theirs = torch.optim.AdamW(copy.deepcopy(module).parameters(), lr=1e-2)
    theirs.load_state_dict(optimizer.torch_state_dict())
    heir = make(copy.deepcopy(module))
    heir.load_state_dict(theirs.state_dict())


def test_jax_has_the_bits_of_torch(make, ranks):
    import jax.numpy as jnp  # only here: it takes a second

    import superoffload.jax

    module = narrow()
    optimizer = make(module, seed=6)
    theirs = superoffload.jax.adamw(
        1e-2, weight_decay=1e-2, master_dtype=jnp.bfloat16, seed=6, endpoint=ranks[0].endpoint
    )
    same_in_jax(optimizer, module, theirs)
    theirs.close()


def test_what_is_wrong_is_said(make):
    with pytest.raises(ValueError, match="master_dtype is float16 but must be float32 or bfloat16"):
        make(narrow(), master_dtype=torch.float16)
    with pytest.raises(ValueError, match="to nearest they would not see small updates; leave rounding='nearest'"):
        make(narrow(), rounding="nearest")
