"""State of any dtype is handed out, written, saved and loaded as it is; codes as the numbers that they stand for."""

import copy

import grpc
import pytest
import torch
from tests import conftest
from tests.support import momentum
from tests.support.momentum import Formula, model
from tests.support.optimizer_bits import bits, same
from tests.support.rank_processes import Run
from tests.support.small_training import same_as_formula, same_in_jax, same_whether_speculated, steps

import superoffload

KINDS = ("Momentum16", "Momentum8", "MomentumMatrix")
DTYPES = {
    "Momentum16": {"momentum_buffer": torch.bfloat16},
    "Momentum8": {"momentum_buffer": torch.float32},
    "MomentumMatrix": {"momentum_buffer": torch.float32},
}


@pytest.fixture(scope="module")
def ranks():
    yield from conftest.several(2, binary=momentum.BINARY)


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def make(ranks, kind):
    """Builds optimizers of one kind."""
    built = []

    def build(module, **options):
        optimizer = getattr(momentum, kind)(module.named_parameters(), endpoint=ranks[0].endpoint, **options)
        built.append(optimizer)
        return optimizer

    yield build
    for optimizer in built:
        optimizer.close()


def test_steps_are_those_of_the_formula(make, kind):
    theirs, ours = model(), model()
    formula = Formula(theirs.parameters(), kind)
    optimizer = make(ours, speculation="always")
    same_as_formula(optimizer, ours, formula, theirs)
    for p in ours.parameters():
        assert {key: optimizer.state[p][key].dtype for key in optimizer.algorithm.moments} == DTYPES[kind]


def test_clips_and_skips_are_the_same_whether_speculated_or_not(make):
    same_whether_speculated(make, model, "bias")


def test_a_deep_copy_of_the_state_dict_is_the_moment(make):
    module = model()
    optimizer = make(module)
    steps(module, optimizer, 0, 1)
    kept = copy.deepcopy(optimizer.state_dict())
    steps(module, optimizer, 2, 3)
    expected = bits(optimizer, module)
    optimizer.load_state_dict(kept)
    assert optimizer.committed_steps == 2
    steps(module, optimizer, 2, 3)
    same(bits(optimizer, module), expected)


def test_a_state_dict_as_torch_has_them_goes_into_another_optimizer(make, kind):
    module = model()
    optimizer = make(module)
    steps(module, optimizer, 0, 1, 2)
    saved = optimizer.torch_state_dict()
    other = model()
    other.load_state_dict(module.state_dict())
    heir = make(other)
    heir.load_state_dict(saved)
    for trained, by in ((module, optimizer), (other, heir)):
        steps(trained, by, 3, 4)
    same(bits(heir, other), bits(optimizer, module))
    saved["state"][0]["momentum_buffer"] = torch.zeros(30, 40, dtype=torch.uint8)
    with pytest.raises(superoffload.Error, match=r"is uint8 \[30, 40\] .*float.* \[30, 40\]") as refused:
        heir.load_state_dict(saved)
    assert refused.value.code == grpc.StatusCode.INVALID_ARGUMENT


def test_a_loop_writes_the_state(make, kind):
    found = []
    for way in ("zeroed", "cleared", "of torch"):
        module = model()
        torchs = way == "of torch"
        optimizer = Formula(module.parameters(), kind) if torchs else make(module)
        steps(module, optimizer, 0, 1)
        for p in module.parameters():
            if torchs:
                optimizer.state[p]["moment"].zero_()
            elif way == "cleared":
                optimizer.state[p].clear()
            else:
                for key in DTYPES[kind]:
                    optimizer.state[p][key].zero_()
        steps(module, optimizer, 2, 3)
        found.append([p.detach().clone() for p in module.parameters()])
    same(found[0], found[2])
    same(found[1], found[2])


def leaves(tree):
    return [leaf for value in tree.values() for leaf in leaves(value)] if isinstance(tree, dict) else [tree]


@pytest.mark.parametrize("kind", ["Momentum16", "Momentum8"], indirect=True)
def test_ranks_save_and_any_number_of_them_restores(ranks, make, kind, tmp_path, recwarn):
    saved = str(tmp_path / "saved")
    first = {"kind": kind, "steps": 3, "save": saved}
    through = Run(ranks, tmp_path / "a", first, trainer="momentum").results()
    again = Run(ranks, tmp_path / "b", {"kind": kind, "steps": 3, "restore": saved}, trainer="momentum").results()
    for rank in range(2):
        for what in ("weights", "state"):
            same(leaves(through[rank][0][what]), leaves(again[rank][0][what]))
    module = model()
    optimizer = make(module, restore=saved)
    assert optimizer.committed_steps == 3
    steps(module, optimizer, 3, 4)
    notes = [str(warning.message) for warning in recwarn if "quantized" in str(warning.message)]
    if kind == "Momentum16":
        assert not notes
    else:
        assert len(notes) == 1
        assert "rounded once more" in notes[0]
    rounding = {"Momentum16": 1e-6, "Momentum8": 1e-3}[kind]  # FSDP averages; codes are rounded twice
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.detach(), through[0][0]["weights"][name], rtol=0, atol=rounding)


@pytest.mark.parametrize("kind", ["MomentumMatrix"], indirect=True)
def test_each_rank_hosts_some_of_the_matrices(ranks, make, kind, tmp_path):
    saved = str(tmp_path / "saved")
    first = {"kind": kind, "steps": 3, "save": saved, "shards": False}
    through = Run(ranks, tmp_path / "a", first, trainer="momentum").results()
    assert [sorted(result[0]["state"]) for result in through] == [["weight"], ["bias"]]
    module = model()
    optimizer = make(module)
    steps(module, optimizer, 0, 1, 2, 3, 4)
    for result in through:
        same([p.detach() for p in module.parameters()], list(result[0]["weights"].values()))
    restored = model()
    heir = make(restored, restore=saved)
    steps(restored, heir, 3, 4)
    same(bits(heir, restored), bits(optimizer, module))
    again = {"kind": kind, "steps": 3, "restore": saved, "shards": False}
    for result in Run(ranks, tmp_path / "b", again, trainer="momentum").results():
        same([p.detach() for p in module.parameters()], list(result[0]["weights"].values()))


def test_jax_hands_out_the_same(ranks, make, kind):

    from superoffload.jax.algorithm import Algorithm
    from superoffload.jax.optimizer import Optimizer

    scalars = {"lr": "learning_rate", "momentum": "momentum"}
    algorithm = Algorithm(getattr(momentum, kind).algorithm.daemon_name, scalars, decay="")
    values = {"learning_rate": 1e-2, "momentum": 0.9}
    in_jax = Optimizer(algorithm, values, endpoint=ranks[0].endpoint)
    module = model()
    in_torch = make(module)
    same_in_jax(in_torch, module, in_jax)
    expected = in_torch.state_tensors()
    for name, arrays in in_jax.state_tensors().items():
        for key, array in arrays.items():
            theirs = expected[name.strip("[']")][key]
            assert array.dtype.name == str(theirs.dtype).removeprefix("torch.")
            assert array.tobytes() == theirs.contiguous().view(torch.uint8).numpy().tobytes()
    in_jax.close()
