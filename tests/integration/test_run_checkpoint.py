"""Checkpoints of runs: saved by four ranks, restored by any other number of them and by one machine, bit for bit."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch

ROOT = pathlib.Path(__file__).parents[2]
TOLERANCE = 2e-5  # of losses that ranks of another number sum in another order


def run(daemons, directory, *phases):
    """What rank 0 of each phase returned."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.run_trainer", directory, ",".join(d.endpoint for d in daemons)]
        + [json.dumps(phase) for phase in phases],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    return {phase["name"]: torch.load(directory / f"{phase['name']}.pt") for phase in phases}


@pytest.fixture(scope="module")
def results(daemons, tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs")
    run_4, single = str(directory / "run-4"), str(directory / "single")
    scheduled, tensors = directory / "scheduled", str(directory / "dcp")
    scheduled.mkdir()
    schedule = {"every_steps": 2, "directory": str(scheduled), "keep": 2}
    phases = [
        {"name": "four", "ranks": 4, "steps": 6, "save": {"3": run_4}, "schedule": schedule, "skip_bias_at": 1},
        {"name": "three", "ranks": 3, "steps": 6, "restore": run_4},
        {
            "name": "two",
            "ranks": 2,
            "steps": 6,
            "restore": run_4,
            "columns": True,
            "dcp_save": tensors,
            "back_to": run_4,
        },
        {"name": "one", "ranks": 1, "steps": 6, "restore": run_4, "sharded": False, "save": {"6": single}},
        {"name": "replicated", "ranks": 2, "steps": 3, "restore": run_4, "sharded": False, "replicas": True},
        {"name": "spread", "ranks": 3, "steps": 6, "restore": single},
        {"name": "loaded", "ranks": 4, "steps": 6, "dcp_load": tensors},
        {"name": "lacking", "ranks": 2, "steps": 6, "restore": f"{run_4}/rank-00000-of-00004", "expect_error": True},
    ]
    return directory, run(daemons, directory, *phases)


def assert_equal(a, b):
    assert a.keys() == b.keys()
    for key in a:
        assert torch.equal(a[key], b[key]), key


@pytest.mark.parametrize("other", ["three", "two", "one"])
def test_any_number_of_ranks_has_the_bits_that_four_saved_and_goes_on(results, other):
    _, by_name = results
    saved, restored = by_name["four"], by_name[other]
    assert restored["begun"] == 3
    assert_equal(saved["states"][3], restored["states"][3])
    assert saved["states"][3]["blocks.0.bias.step"] == 2  # one step without a gradient
    for step in range(3, 6):
        assert restored["losses"][step] == pytest.approx(saved["losses"][step], abs=TOLERANCE)


def test_ranks_go_back_together_while_they_are_attached(results):
    _, by_name = results
    assert_equal(by_name["four"]["states"][3], by_name["two"]["states"]["back"])


def test_ranks_that_divide_whole_parameters_restore_what_shards_were(results):
    _, by_name = results
    assert_equal(by_name["four"]["states"][3], by_name["replicated"]["states"][3])


def test_several_ranks_restore_what_one_machine_saved(results):
    _, by_name = results
    assert_equal(by_name["one"]["states"][6], by_name["spread"]["states"][6])


def test_torch_distributed_checkpoint_saves_and_loads_in_torch_s_keys(results):
    _, by_name = results
    assert by_name["loaded"]["begun"] == 6
    assert_equal(by_name["two"]["states"][6], by_name["loaded"]["states"][6])


def test_a_part_alone_is_refused_on_all_ranks(results):
    _, by_name = results
    assert "FAILED_PRECONDITION" in by_name["lacking"]["error"]
    assert "lacks" in by_name["lacking"]["error"] or "has no tensor" in by_name["lacking"]["error"]


def test_a_schedule_takes_the_same_step_on_all_ranks_and_keeps_the_newest(results):
    directory, _ = results
    left = sorted(name for name in os.listdir(directory / "scheduled") if not name.startswith(".superoffload"))
    steps = {name.split("-")[1] for name in left}
    assert steps <= {"00000004", "00000006"} and "00000004" in steps, left
    for name in left:
        index = json.loads((directory / "scheduled" / name / "run.index.json").read_text())
        assert index["metadata"]["committed_steps"] == int(name.split("-")[1])
        assert len(index["parts"]) == 4
