"""Whole matrices that FSDP2 shards: an owner gathers their gradients and scatters what its daemon makes of them."""

import pytest
import torch
from tests import conftest
from tests.support import momentum
from tests.support.matrix_trainer import CLIP, Model, backward
from tests.support.momentum import Formula, MomentumMatrix
from tests.support.rank_processes import Run

STEPS = 6


@pytest.fixture(scope="module")
def ranks():
    yield from conftest.several(4, binary=momentum.BINARY)


@pytest.fixture
def run(ranks, tmp_path):
    """Trains on so many ranks; returns what each rank has of each scenario, by scenario."""
    runs = []

    def go(count, *scenarios, daemons=None):
        directory = tmp_path / f"run{len(runs)}"
        runs.append(Run((daemons or ranks)[:count], directory, *scenarios, trainer="matrix_trainer"))
        return list(zip(*runs[-1].results(), strict=True))

    return go


def alone(ranks, steps=STEPS, clip=None, halves_at=None, bad_at=None, doubles_at=None, dtype=torch.float32, **options):
    """The weights that one process comes to with the same data."""
    module = Model().to(dtype)
    clips = {"max_grad_norm": CLIP} if clip == "option" else {}
    optimizer = MomentumMatrix(module.named_parameters(), endpoint=ranks[0].endpoint, **clips, **options)
    norms = []
    for step in range(optimizer.committed_steps, steps + (bad_at is not None)):
        if step == doubles_at:
            for parameter in module.parameters():
                parameter.data.mul_(2)
            optimizer.push_params()
        backward(module, step)
        if step == bad_at:
            module.first.bias.grad[0] = torch.inf
        if clip == "call":
            norms.append(float(torch.nn.utils.clip_grad_norm_(module.parameters(), CLIP)))
        if step == halves_at:
            for parameter in module.parameters():
                parameter.grad.mul_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    return {name: parameter.detach() for name, parameter in module.named_parameters()}, norms


def same(results, weights, rounds=False):
    """``rounds``: ranks add up in another order, the norm for one, so that last digits differ."""
    for result in results:
        assert result["weights"].keys() == weights.keys()
        for name, weight in weights.items():
            assert torch.equal(result["weights"][name], results[0]["weights"][name]), name
            torch.testing.assert_close(result["weights"][name], weight, rtol=0, atol=1e-6 if rounds else 0, msg=name)


@pytest.fixture(scope="module", params=[2, 3])
def plain(request, ranks, tmp_path_factory):
    """What ranks come to in all steps, in one, and in all where their state leaves between."""
    scenarios = {"steps": STEPS}, {"steps": 1}, {"steps": STEPS, "reloads_at": 3}
    directory = tmp_path_factory.mktemp("plain") / "run"
    results = Run(ranks[: request.param], directory, *scenarios, trainer="matrix_trainer").results()
    return list(zip(*results, strict=True))


def test_ranks_come_to_the_weights_of_one_process(plain):
    """Rows are not divisible, and some ranks have no row."""
    results = plain[0]
    module = Model()
    formula = Formula(module.parameters(), "MomentumMatrix")
    for step in range(STEPS):
        backward(module, step)
        formula.step()
        formula.zero_grad()
    same(results, dict(module.named_parameters()))
    hosted = [name for result in results for name in result["hosted"]]
    assert sorted(hosted) == sorted(dict(module.named_parameters()))  # each by one rank
    owned = {name: rank for rank, result in enumerate(results) for name in result["hosted"]}
    for name, parameter in module.named_parameters():
        state = results[owned[name]]["state"][name]
        assert torch.equal(state["momentum_buffer"], formula.state[parameter]["momentum_buffer"])


def test_each_shard_crosses_once_as_gradient_and_once_as_parameter(plain):
    results, count = plain[1], len(plain[1])
    shapes = {name: parameter.shape for name, parameter in Model().named_parameters()}
    owned = {name: rank for rank, result in enumerate(results) for name in result["hosted"]}
    for rank, result in enumerate(results):
        given, taken = 0, 0
        for name, (rows, *others) in shapes.items():
            each, size = -(-rows // count), 4 * torch.Size(others).numel()
            shards = [min(each, max(rows - each * other, 0)) * size for other in range(count)]
            if owned[name] == rank:
                taken += sum(shards) - shards[rank]
            else:
                given += shards[rank]
        assert result["traffic"] == {"sent": given + taken, "received": taken + given}


def test_the_state_leaves_and_comes_back_in_shards(ranks, plain):
    same(plain[2], alone(ranks)[0])


@pytest.mark.filterwarnings("ignore:the gradient of", "ignore:a step was skipped")
def test_clips_skips_and_edited_gradients_are_those_of_one_process(ranks, run):
    scenarios = [
        {"steps": STEPS, "clip": "option"},
        {"steps": STEPS, "clip": "call"},
        {"steps": STEPS, "clip": "call", "edits": [-1, 3, "gradient"]},
        {"steps": STEPS, "edits": [1, 3, "inf"]},  # on one rank
        {"steps": STEPS, "dtype": "bfloat16", "clip": "option"},
        {"steps": STEPS, "pushes_at": 3},
    ]
    ours = [
        alone(ranks, clip="option"),
        alone(ranks, clip="call"),
        alone(ranks, clip="call", halves_at=3),
        alone(ranks, bad_at=3),
        alone(ranks, dtype=torch.bfloat16, clip="option"),
        alone(ranks, doubles_at=3),
    ]
    for scenario, results, (weights, norms) in zip(scenarios, run(2, *scenarios), ours, strict=True):
        same(results, weights, rounds="clip" in scenario)
        for result in results:
            assert result["norms"] == pytest.approx(norms, rel=1e-6), scenario
            assert result["skipped"] == (scenario.get("edits", [0, 0, ""])[2] == "inf")


def test_what_a_rank_has_done_to_its_shard_is_told_on_all(ranks, run):
    edited, lacking, replaced, clipped = run(
        3,
        {"steps": STEPS, "edits": [2, 3, "parameter"]},
        {"steps": STEPS, "lacks": [1, 3]},
        {"steps": STEPS, "edits": [2, 3, "dtype"]},
        {"steps": STEPS, "clip": "call", "edits": [1, 3, "gradient"]},
    )
    same(edited, alone(ranks)[0])  # after pull_params()
    for results, sentence in (
        (edited, "parameter first.weight was changed by somebody else than the optimizer, and nothing was committed"),
        (lacking, "first.weight has a gradient on rank 0 and none on rank 1, so nothing was committed"),
        (replaced, "first.weight"),
        (clipped, "Nothing was committed: call the optimizer's zero_grad()"),
    ):
        for result in results:
            (refusal,) = result["refusals"]
            assert sentence in refusal
    assert "rank 2 refuses the step, and so do all ranks" in edited[0]["refusals"][0]
    assert "is [11, 16] torch.float64 on this rank, but was [11, 16] torch.float32" in replaced[0]["refusals"][0]


def test_copies_of_shards_and_whole_parameters_beside_them(ranks, run):
    weights, _ = alone(ranks)
    ignored, tensors = run(2, {"steps": STEPS, "layout": "ignored"}, {"steps": STEPS, "layout": "tensors"})
    (copied,) = run(4, {"steps": STEPS, "layout": "hsdp"})
    same(ignored, weights)
    same(copied, weights)
    same(tensors, weights, rounds=True)  # products are summed in parts


def test_any_number_of_ranks_restores_a_checkpoint(ranks, run, tmp_path):
    of_three, of_one = str(tmp_path / "three"), str(tmp_path / "one")
    weights, _ = alone(ranks)
    (saved,) = run(3, {"steps": STEPS, "save": of_three, "save_at": 3})
    same(saved, weights)
    assert all(torch.equal(alone(ranks, restore=of_three)[0][name], weight) for name, weight in weights.items())
    module = Model()
    optimizer = MomentumMatrix(module.named_parameters(), endpoint=ranks[0].endpoint)
    for step in range(2):
        backward(module, step)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.save_checkpoint(of_one)
    optimizer.close()
    from_three, from_one = run(2, *({"steps": STEPS, "restore": source} for source in (of_three, of_one)))
    assert [from_three[0]["begun"], from_one[1]["begun"]] == [3, 2]
    same([*from_three, *from_one], weights)


def test_a_named_run_goes_on_where_it_was(ranks, run):
    first = {"steps": 3, "name": "goes-on"}
    _, results = run(2, first, {**first, "steps": STEPS, "sync": "pull_params"})
    assert [result["begun"] for result in results] == [3, 3]
    same(results, alone(ranks)[0])


@pytest.mark.parametrize("victim", [0, 1])
def test_a_daemon_that_is_killed_costs_nothing(ranks, run, victim):
    keepers = [conftest.Daemon("--metrics_address=off", "--keeper", binary=momentum.BINARY) for _ in range(2)]
    kills = {"kills": [victim, 3, keepers[victim].process.pid], "clip": "call"}
    (results,) = run(2, {"steps": STEPS, **kills}, daemons=keepers)
    (undisturbed,) = run(2, {"steps": STEPS, "clip": "call"})
    same(results, undisturbed[0]["weights"])
    for keeper in keepers:
        assert keeper.stop() == 0, keeper.log


@pytest.mark.parametrize(("where", "begun"), [("exchanged", {3}), ("gathered", {3, 4})])
def test_ranks_start_anew_after_a_death(ranks, run, tmp_path, where, begun):
    """What the others may have committed is committed by all."""
    name = f"dies-{where}"
    dying = {"steps": STEPS, "name": name, "dies": [1, 3, where]}
    Run(ranks[:2], tmp_path / "dying", dying, trainer="matrix_trainer").kill_rest(1)
    (results,) = run(2, {"steps": STEPS, "name": name, "sync": "pull_params"})
    assert results[0]["begun"] == results[1]["begun"]
    assert results[0]["begun"] in begun  # whether the other rank has committed it when it is killed is chance
    same(results, alone(ranks)[0])


def test_shards_that_move_to_a_gpu_are_refused(run):
    (results,) = run(2, {"steps": 1, "gpu": True})
    for result in results:
        (refusal,) = result["refusals"]
        assert "shards are gathered in the CPU's memory only" in refusal
