"""FSDP2 over two ranks, each with its own daemon: one verdict, the same bits, and nothing lost when a rank dies."""

import pytest
import torch
from tests.support.rank_processes import Run, equal


@pytest.fixture(scope="module")
def trained(daemons, tmp_path_factory):
    """Of each scenario, what both ranks had at the end."""
    scenarios = [
        {"speculation": "always"},
        {"speculation": "never", "threads": 1},
        {"speculation": "adaptive", "reshard": False, "overlap": False},
        {"clip": "call"},
        {"nan_at": 2},
        {"accumulate": 2, "speculation": "always"},
        {"accumulate": 2, "speculation": "never"},
        {"dtype": "float32", "clip": "call"},
        {"dtype": "float32", "plain": True},
        {"spoils_at": 3},
        {"spoils_at": 0, "clip": "call"},
        {"writes_state_at": 3},
        {"dtype": "float32", "clip": "call", "zeroes": False},
        {"dtype": "float32", "plain": True, "zeroes": False},
    ]
    return Run(daemons, tmp_path_factory.mktemp("runs") / "run", *scenarios).results()


def test_ranks_reach_one_verdict_and_the_same_bits(trained):
    first, second = (of_rank[:-2] for of_rank in trained)
    for here, there in zip(first, second, strict=True):
        equal(here, there)
        assert here["norms"] == there["norms"]
        assert here["skips"] == there["skips"]
    for other in [*first[1:5], *first[9:]]:
        equal(first[0], other)
    assert first[4]["skips"] == 1
    equal(first[5], first[6])
    close(first[7], first[8])


def close(ours, torchs):
    assert ours["norms"] == pytest.approx(torchs["norms"], rel=1e-5)
    for name, weight in ours["weights"].items():
        torch.testing.assert_close(weight, torchs["weights"][name], atol=2e-6, rtol=1e-5, msg=f"{name}: {{}}".format)


def test_what_one_rank_refuses_is_refused_by_all_and_can_be_taken_back(trained):
    for asked, told in zip(trained[1][9:11], trained[0][9:11], strict=True):
        (why,) = asked["refusals"]
        assert "changed by somebody else than the optimizer" in why
        assert told["refusals"] == [f"rank 1 refuses the step, and so do all ranks: {why}"]


def test_gradients_that_go_on_after_they_were_clipped(trained):
    for ours, torchs in (of_rank[-2:] for of_rank in trained):
        close(ours, torchs)


def test_what_one_rank_writes_to_its_state_is_refused_by_all(trained):
    told, asked = (of_rank[11]["refusals"] for of_rank in trained)
    (why,) = asked
    assert "was written, which reaches no other rank" in why
    assert told == [f"rank 1 refuses the step, and so do all ranks: {why}"]


@pytest.mark.parametrize("where", ["prepared", "gathered"])
def test_a_rank_that_is_killed_goes_on_at_its_step(daemons, trained, tmp_path, where):
    options = {"name": f"run-{where}", "sync": "pull_params"}
    Run(daemons, tmp_path / "killed", {**options, "die_at": [1, 4, where]}).kill_rest(1)
    results = Run(daemons, tmp_path / "again", options).results()
    for (result,) in results:
        assert result["begun"] in (4, 5)
        assert result["begun"] == results[0][0]["begun"]
        equal(result, trained[0][0])
