"""However a model is distributed, each element is hosted and counted once, and replicas stay equal bit by bit."""

import pytest
import torch
from tests.conftest import several
from tests.support.rank_processes import Run, equal

FP32 = {"dtype": "float32", "clip": "call"}


@pytest.fixture(scope="module")
def daemons():
    yield from several(4)


@pytest.fixture(scope="module")
def trained(daemons, tmp_path_factory):
    """Of each scenario, what the ranks had at the end: first of two ranks, then of four."""
    directory = tmp_path_factory.mktemp("runs")
    two = {
        "one rank": {"layout": "whole", "same": True},
        "fsdp2": {"alone": True},
        "hsdp": {"layout": "hsdp", "alone": True, "speculation": "always"},
        "ignored": {"layout": "ignored", "alone": True},
        "ddp": {"layout": "ddp", "replicas": True, "alone": True},
        "sharded by accelerate": {"switches": True, "alone": True},
        "ddp, hosted whole": {"layout": "ddp", "alone": True},
        "ddp, parts accumulated": {"layout": "ddp", "replicas": True, "accumulate": 2, "steps": 8},
        "ddp, early": {"layout": "ddp", "replicas": True, "accumulate": 2, "steps": 8, "hooked": True},
        "tensors": {"layout": "tensors", "same": True, **FP32},
        "tensors, of torch": {"layout": "whole", "same": True, "plain": True, **FP32},
        "batches": {"layout": "batches", **FP32},
        "batches, of torch": {"layout": "batches", "plain": True, **FP32},
        "unreduced": {"layout": "ignored", "reduces": False},
        "different": {"layout": "whole", "replicas": True, "spread": 0.1},
        "swapped": {"layout": "ddp", "replicas": True, "swaps": True},
        "written": {"layout": "ddp", "replicas": True, "writes": True},
        "strays": {"layout": "whole", "replicas": True, "strays": True},
        "written on one rank": {"layout": "ddp", "replicas": True, "alone": True, "spoils_at": 3},
        "named": {"layout": "whole", "name": "run", "same": True},
    }
    four = {
        "fsdp2": {"alone": True},
        "hsdp": {"layout": "hsdp", "alone": True},
        "ddp": {"layout": "ddp", "replicas": True, "alone": True, "threads": 1},
    }
    results = {}
    for ranks, scenarios in ((2, two), (4, four)):
        of_ranks = Run(daemons[:ranks], directory / str(ranks), *scenarios.values()).results()
        results[ranks] = {name: [of_rank[i] for of_rank in of_ranks] for i, name in enumerate(scenarios)}
    return results


def test_any_number_of_ranks_gives_the_bits_of_one(trained):
    one = trained[2]["one rank"][0]
    hosted = "ddp", "ddp, hosted whole", "sharded by accelerate", "written on one rank"
    for layout in ("fsdp2", "hsdp", "ignored", *hosted):
        for result in trained[2][layout]:
            equal(result, one)
    for results in trained[4].values():
        for result in results:
            equal(result, one)


def test_replicas_stay_equal(trained):
    for layout in ("ddp, parts accumulated", "tensors", "batches"):
        first, second = trained[2][layout]
        equal(first, second)
        assert first["norms"] == second["norms"]


def test_averaged_buckets_leave_during_backward(trained):
    for early, late in zip(trained[2]["ddp, early"], trained[2]["ddp, parts accumulated"], strict=True):
        assert early["early"] > 0 == late["early"]
        equal(early, late)


@pytest.mark.parametrize("layout", ["tensors", "batches"])
def test_norms_and_weights_are_those_of_torch(trained, layout):
    ours, torchs = trained[2][layout][0], trained[2][f"{layout}, of torch"][0]
    assert ours["norms"] == pytest.approx(torchs["norms"], rel=1e-5)
    for name, weight in ours["weights"].items():
        torch.testing.assert_close(weight, torchs["weights"][name], atol=1e-5, rtol=1e-5, msg=f"{name}: {{}}".format)


@pytest.mark.parametrize(
    ("scenario", "words"),
    [
        ("unreduced", "nobody has averaged them over the ranks"),
        ("different", "its values there differ; broadcast it"),
        ("written", "changed by somebody else than the optimizer"),
        ("swapped", "each rank loads what it has saved itself"),
        ("strays", "unix:/nowhere/control.sock"),
        ("named", "replicas=True where all ranks train the same parameters"),
    ],
)
def test_replicas_that_differ_are_refused_on_all_ranks(trained, scenario, words):
    for result in trained[2][scenario]:
        assert words in result["error"]
