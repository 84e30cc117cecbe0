"""Moments in 8 bits: bits are those of the formula, they are handed out as numbers, and numbers become them again."""

import copy
import re

import pytest
import torch
from tests import conftest
from tests.support.narrow_moments import Formula, in_8_bits, model, whole
from tests.support.optimizer_bits import bits, same
from tests.support.rank_processes import Run
from tests.support.small_training import backward, same_as_formula, same_in_jax, same_whether_speculated, steps

import superoffload
import superoffload.torch

HIDDEN = 128  # so that rows of the first layer are not in whole blocks, and halves of the layer are
IN_FLOAT32 = ("0.bias", "2.weight", "2.bias")  # of the model: vectors, and what is small


@pytest.fixture(scope="module")
def ranks():
    yield from conftest.several(2)


@pytest.fixture
def make(ranks):
    built = []

    def build(module, kind="AdamW8bit", **options):
        parameters = module.named_parameters() if isinstance(module, torch.nn.Module) else module
        optimizer = getattr(superoffload.torch, kind)(parameters, lr=1e-2, endpoint=ranks[0].endpoint, **options)
        built.append(optimizer)
        return optimizer

    yield build
    for optimizer in built:
        optimizer.close()


@pytest.mark.parametrize("kind", ["AdamW", "Lion"])
def test_steps_are_those_of_the_formula(make, kind):
    theirs, ours = model(HIDDEN), model(HIDDEN)
    formula = Formula(theirs.named_parameters(), kind, "8bit", in_float32=IN_FLOAT32)
    optimizer = make(ours, f"{kind}8bit", speculation="always")
    same_as_formula(optimizer, ours, formula, theirs, resting="0.weight")


def codes_of(optimizer):
    """The parameters whose moments are codes."""
    saved = copy.deepcopy(optimizer.state_dict())["superoffload"]["state"]
    return {name for name, arrays in saved.items() if arrays["exp_avg"].dtype == torch.uint8}


def test_small_ones_vectors_and_embeddings_stay_in_32_bits_unless_told(make):
    module = torch.nn.ModuleDict(
        {
            "embed_tokens": torch.nn.Embedding(100, 64),
            "wte": torch.nn.Embedding(100, 64),
            "up": torch.nn.Linear(64, 64),
            "small": torch.nn.Linear(64, 63),
            "norm": torch.nn.LayerNorm(8192),
        }
    )
    optimizer = make(module)
    assert codes_of(optimizer) == {"up.weight"}
    optimizer.close()
    groups = [
        {"params": list(module["wte"].named_parameters(prefix="wte")), "optim_bits": 8},
        {"params": list(module["norm"].named_parameters(prefix="norm")), "optim_bits": 8},
        {"params": list(module["up"].named_parameters(prefix="up")), "optim_bits": 32},
    ]
    assert codes_of(make(groups)) == {"wte.weight", "norm.weight", "norm.bias"}


def test_a_group_of_bfloat16_moments_may_be_in_32_bits(make):
    module = model()
    groups = [
        {"params": list(module[0].named_parameters(prefix="0")), "optim_bits": 32},
        {"params": list(module[2].named_parameters(prefix="2"))},
    ]
    optimizer = make(groups, "AdamW", state_dtype=torch.bfloat16)
    formula = model()
    plain = torch.optim.AdamW(formula.parameters(), lr=1e-2)
    steps(module, optimizer, 0)
    steps(formula, plain, 0)
    dtypes = [optimizer.state[p]["exp_avg"].dtype for p in module.parameters()]
    assert dtypes == [torch.float32] * 2 + [torch.bfloat16] * 2
    torch.testing.assert_close(optimizer.state[module[0].weight]["exp_avg"], plain.state[formula[0].weight]["exp_avg"])


def test_clips_and_skips_are_the_same_whether_speculated_or_not(make):
    same_whether_speculated(make, lambda: model(HIDDEN), "0.bias")


@pytest.mark.parametrize("shards", [True, False])
def test_ranks_whose_shards_are_whole_blocks_have_the_bits_of_one(ranks, make, tmp_path, shards):
    module = model(HIDDEN)
    optimizer = make(module)
    steps(module, optimizer, *range(6))
    expected = whole(optimizer, module)
    saved = str(tmp_path / "saved")
    common = {"hidden": HIDDEN, "eight_bits": True, "shards": shards}
    scenarios = (
        {"name": f"eight-{shards}-a", "steps": 4, "save": saved, **common},
        {"name": f"eight-{shards}-b", "first": 4, "steps": 6, "restore": saved, **common},
    )
    for rank in Run(ranks, tmp_path / "run", *scenarios, trainer="narrow_moments").results():
        assert rank[1].keys() == expected.keys()
        for key, tensor in expected.items():
            assert torch.equal(rank[1][key], tensor), key
    alone = model(HIDDEN)
    heir = make(alone, name=f"eight-{shards}-heir", restore=saved)
    steps(alone, heir, 4, 5)
    same(bits(heir, alone), bits(optimizer, module))


AS_THEY_ARE = {
    "float32": {"kind": "AdamW"},
    "bfloat16": {"kind": "AdamW", "state_dtype": torch.bfloat16, "rounding": "nearest"},
    "8bit": {"kind": "AdamW8bit"},
}


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ("float32", "8bit", "40 blocks of quantized state"),
        ("8bit", "float32", "2 tensors are converted"),
        ("bfloat16", "8bit", "40 blocks of quantized state"),
        ("8bit", "bfloat16", "8 tensors are converted"),
    ],
)
def test_a_checkpoint_of_other_moments_is_converted(make, tmp_path, before, after, told):
    module, other = model(HIDDEN), model(HIDDEN)
    optimizer = make(module, **AS_THEY_ARE[before])
    steps(module, optimizer, 0, 1)
    optimizer.save_checkpoint(tmp_path / "saved")
    with pytest.warns(RuntimeWarning, match=told):
        heir = make(other, name=f"{before}-to-{after}", restore=tmp_path / "saved", **AS_THEY_ARE[after])
    same(list(other.parameters()), list(module.parameters()))
    for name, arrays in optimizer.state_tensors().items():
        for key, tensor in heir.state_tensors()[name].items():
            expected = arrays[key]
            if key != "master" and after == "8bit" and name not in IN_FLOAT32:
                expected = in_8_bits(expected.float(), signed=key == "exp_avg")
            assert torch.equal(tensor, expected.to(tensor.dtype)), (name, key)


def test_the_state_of_torch_goes_in_and_out(make):
    theirs = model(HIDDEN)
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    steps(theirs, optimizer, 0, 1, 2)
    ours = copy.deepcopy(theirs)
    heir = make(ours)
    with pytest.warns(RuntimeWarning, match="40 blocks of quantized state"):
        heir.load_state_dict(optimizer.state_dict())
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            expected = optimizer.state[q][key]
            if name not in IN_FLOAT32:
                expected = in_8_bits(expected, signed=key == "exp_avg")
            assert torch.equal(heir.state[p][key], expected)
    back = torch.optim.AdamW(copy.deepcopy(ours).parameters(), lr=1e-2)
    back.load_state_dict(heir.torch_state_dict())
    for state, arrays in zip(back.state.values(), heir.state_tensors().values(), strict=True):
        assert torch.equal(state["exp_avg"], arrays["exp_avg"])


def check_loaded(make, module, state_dict, expected):
    """``expected``: moments by the parameter's name and key."""
    heir = make(module)
    heir.load_state_dict(state_dict)
    assert heir.committed_steps == 3
    for name, arrays in heir.state_tensors().items():
        for key in ("exp_avg", "exp_avg_sq"):
            ours = expected[name][key]
            if name not in IN_FLOAT32:
                ours = in_8_bits(ours, signed=key == "exp_avg")
            assert torch.equal(arrays[key], ours), (name, key)
    steps(module, heir, 3)


def test_the_state_of_bitsandbytes_goes_in(make):
    import bitsandbytes  # only here: it takes a second

    module = model(HIDDEN)
    theirs = bitsandbytes.optim.AdamW8bit(module.parameters(), lr=1e-2)
    steps(module, theirs, 0, 1, 2)

    def numbers(state, number):
        codes, block = state[f"state{number}"], 256
        if codes.dtype == torch.float32:
            return codes
        scales, values = state[f"absmax{number}"], state[f"qmap{number}"]
        return bitsandbytes.functional.dequantize_blockwise(codes, absmax=scales, code=values, blocksize=block)

    assert theirs.state[module[0].weight]["state1"].dtype == torch.uint8
    expected = {
        name: {"exp_avg": numbers(theirs.state[p], 1), "exp_avg_sq": numbers(theirs.state[p], 2)}
        for name, p in module.named_parameters()
    }
    check_loaded(make, module, theirs.state_dict(), expected)


def test_the_state_of_torchao_goes_in(make):
    torchao = pytest.importorskip("torchao.optim.subclass_8bit", reason="transformers imports it wherever it is")

    def kept(tensor, signed):
        return torchao.OptimState8bit.zeros(tensor.shape, signed).copy_(tensor)  # as its step does, once compiled

    module = model(HIDDEN)
    theirs = torch.optim.AdamW(module.parameters(), lr=1e-2)
    steps(module, theirs, 0, 1, 2)
    state = theirs.state[module[0].weight]
    state["exp_avg"], state["exp_avg_sq"] = kept(state["exp_avg"], True), kept(state["exp_avg_sq"], False)
    expected = {
        name: {
            key: value.dequantize() if isinstance(value, torchao.OptimState8bit) else value.clone()
            for key, value in theirs.state[p].items()
        }
        for name, p in module.named_parameters()
    }
    check_loaded(make, module, theirs.state_dict(), expected)


def test_numbers_that_codes_stand_for_become_them_again(make, recwarn):
    module = model(HIDDEN)
    optimizer = make(module)
    steps(module, optimizer, 0, 1)
    kept = copy.deepcopy(optimizer.state_dict())
    again = optimizer.torch_state_dict()
    optimizer.load_state_dict(again)
    optimizer.state[module[0].weight]["exp_avg"].mul_(1)  # written or not, it is what it was
    found = copy.deepcopy(optimizer.state_dict())
    for name, arrays in kept["superoffload"]["state"].items():
        for key, tensor in found["superoffload"]["state"][name].items():
            assert torch.equal(tensor, arrays[key]), (name, key)
    assert not [w for w in recwarn if "quantized" in str(w.message)]


def test_a_deep_copy_of_the_state_dict_is_the_moment(make):
    module = model(HIDDEN)
    optimizer = make(module)
    steps(module, optimizer, 0, 1)
    kept = copy.deepcopy(optimizer.state_dict())
    steps(module, optimizer, 2, 3)
    expected = bits(optimizer, module)
    optimizer.load_state_dict(kept)
    steps(module, optimizer, 2, 3)
    same(bits(optimizer, module), expected)


def test_a_loop_writes_the_state(make):
    module, other = model(HIDDEN), model(HIDDEN)
    optimizer, formula = make(module), Formula(other.named_parameters(), "AdamW", "8bit", in_float32=IN_FLOAT32)
    for each, by in ((module, optimizer), (other, formula)):
        steps(each, by, 0, 1)
        by.state[each[0].weight]["exp_avg"].zero_()
        by.state[each[0].weight]["exp_avg_sq"][:64] = 0
        steps(each, by, 2, 3)
    same(list(module.parameters()), list(other.parameters()))


def test_jax_has_the_bits_of_torch(make, ranks):

    import superoffload.jax

    module = model(HIDDEN)
    optimizer = make(module)

    theirs = superoffload.jax.adamw8bit(1e-2, weight_decay=1e-2, endpoint=ranks[0].endpoint)
    same_in_jax(optimizer, module, theirs)
    ours = optimizer.state_tensors()
    for name, arrays in theirs.state_tensors().items():
        for key, array in arrays.items():
            assert array.dtype.name == "float32"
            assert array.tobytes() == ours[name][key].numpy().tobytes()
    theirs.close()
    with pytest.raises(ValueError, match="optim_bits is 8 but must be 32;"):
        labels = {"labels": lambda tree: "a", "groups": {"a": {"optim_bits": 8}}}
        superoffload.jax.adamw(1e-2, **labels)


def test_an_added_group_has_its_own_bits(make):
    module = model(HIDDEN)
    optimizer = make([("0.weight", module[0].weight)])
    steps(module, optimizer, 0)
    before = optimizer.state_tensors()["0.weight"]
    optimizer.add_param_group({"params": [("2.weight", module[2].weight)], "optim_bits": 8})
    after = optimizer.state_tensors()["0.weight"]
    assert all(torch.equal(after[key], tensor) for key, tensor in before.items())
    steps(module, optimizer, 1)
    assert codes_of(optimizer) == {"0.weight", "2.weight"}


def test_bits_are_those_of_the_beginning(make):
    module = model(HIDDEN)
    optimizer = make(module, name="eight-again")
    steps(module, optimizer, 0)
    optimizer.param_groups[0]["optim_bits"] = 32
    backward(module, 1)
    with pytest.raises(superoffload.Error, match="parameter group 0 has optim_bits=32, but"):
        optimizer.step()
    assert optimizer.committed_steps == 1
    loaded = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(loaded)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.close()
    groups = [{"params": list(module.named_parameters()), "optim_bits": 32}]
    with pytest.raises(superoffload.Error, match=re.escape('"0.weight" [128, 40] float32, its state in float32,')):
        make(groups, name="eight-again", sync="pull_params")
    with pytest.raises(superoffload.Error, match="is AdamW8bit, but this is AdamW;"):
        make(model(HIDDEN), "AdamW", name="eight-again", sync="pull_params")


@pytest.mark.parametrize(
    ("kind", "options", "why"),
    [
        ("AdamW8bit", {"state_dtype": torch.bfloat16}, "AdamW8bit keeps its state as it does; leave state_dtype out"),
        ("AdamW8bit", {"optim_bits": 16}, "optim_bits is 16 but must be 32 or 8"),
        ("AdamW", {"optim_bits": 8}, "optim_bits is 8 but must be 32; moments in 8 bits are those of the optimizers"),
    ],
)
def test_what_is_wrong_is_said(make, kind, options, why):
    module = model()
    bits_of = {key: options.pop(key) for key in list(options) if key == "optim_bits"}
    with pytest.raises(ValueError, match=why):
        make([{"params": list(module.named_parameters()), **bits_of}], kind, **options)
