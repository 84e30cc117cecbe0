"""JAX over two processes, each with its own daemon: one verdict, the same bits, and nothing lost when one dies."""

import pathlib
import pickle
import socket

import numpy as np
import pytest
from tests.support.rank_processes import Run

REFUSALS = [
    "parameter w is this process's own, but there are 2 processes: make it an array of all of them",
    "there is nothing that process 1 could host: the parameters have too few elements",
    "the shards of parameter w that process 0 has make up no box of its elements: order the devices of the mesh",
    "parameter w is spread over 4 devices: inside of jit gradients are handed over from one device only",
    "parameter r is spread over 4 devices: inside of jit gradients are handed over from one device only",
    "is spread over GPUs, but there are 2 processes, which can host JAX parameters from their CPUs only",
]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


class JaxRun(Run):
    load = staticmethod(lambda path: pickle.loads(path.read_bytes()))

    def __init__(self, daemons, directory: pathlib.Path, *scenarios: dict, devices: int = 1) -> None:
        environment = {
            "JAX_COORDINATOR_ADDRESS": f"localhost:{free_port()}",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        }
        super().__init__(daemons, directory, *scenarios, trainer="jax_rank", environment=environment)


def equal(a: dict, b: dict) -> None:
    for name, weight in a["weights"].items():
        assert weight.tobytes() == b["weights"][name].tobytes(), name


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def trained(daemons, directory):
    """Of each scenario, what both processes had at the end."""
    scenarios = [
        {"way": "shard_map", "speculation": "always"},
        {"way": "shard_map", "speculation": "never", "bucket_bytes": 4096},
        {"way": "overlapped"},
        {"way": "shard_map", "nan_at": 2},
        {"way": "shard_map", "save": str(directory / "saved"), "restore_at": 2},
        {"way": "jit"},
        {"way": "jit", "replicated": True},
        {"way": "jit", "dtype": "bfloat16"},
        {"way": "shard_map", "refuses_at": 3},
        {"way": "shard_map", "steps": 2},
    ]
    return JaxRun(daemons, directory / "run", *scenarios).results()


def test_processes_reach_one_verdict_and_the_same_bits(trained):
    first, second = trained
    for here, there in zip(first, second, strict=True):
        equal(here, there)
        np.testing.assert_equal(here["norms"], there["norms"])
        assert here["kept"] and there["kept"]
    for other in [*first[1:5], first[8]]:
        equal(first[0], other)
    skips = [[result["skips"] for result in results] for results in trained]
    assert skips == [[0, 0, 0, 1, 0, 0, 0, 0, 0, 0]] * 2


def test_what_one_process_refuses_is_refused_by_all_and_the_step_can_be_ended_again(trained):
    told, asked = (results[8]["refusals"] for results in trained)
    assert len(told) == 2
    assert "no gradient of" in asked[0] and "changed by somebody else than the optimizer" in asked[1]
    assert told == [f"rank 1 refuses the step, and so do all ranks: {sentence}" for sentence in asked]


def test_each_element_is_counted_once_however_it_is_replicated(trained):
    for result in trained[0]:
        if result["whole_norms"]:
            np.testing.assert_allclose(result["norms"], result["whole_norms"], rtol=1e-5)


@pytest.mark.parametrize("where", ["prepared", "gathered"])
def test_a_process_that_is_killed_goes_on_at_its_step(daemons, trained, tmp_path, where):
    options = {"way": "shard_map", "name": f"run-{where}", "sync": "pull_params"}
    JaxRun(daemons, tmp_path / "killed", {**options, "die_at": [1, 3, where]}).kill_rest(1)
    results = JaxRun(daemons, tmp_path / "again", options).results()
    for (result,) in results:
        assert result["begun"] in (3, 4)
        assert result["begun"] == results[0][0]["begun"]
        equal(result, trained[0][0])


def test_processes_of_several_devices_host_what_all_of_theirs_have(daemons, tmp_path):
    scenarios = [{}, {"replicated": True}, "refusals"]
    (*here, sentences), (*there, same) = JaxRun(daemons, tmp_path / "run", *scenarios, devices=2).results()
    assert sentences == same  # or one would wait for the other
    for sentence, expected in zip(sentences, REFUSALS, strict=True):
        assert expected in sentence
    for ours, theirs in zip(here, there, strict=True):
        equal(ours, theirs)
        assert ours["kept"]
        np.testing.assert_allclose(ours["norms"], ours["whole_norms"], rtol=1e-5)


def test_another_number_of_processes_restores_the_bits_that_were_saved(daemons, directory, trained, tmp_path):
    restores = {"restore": str(directory / "saved"), "steps": 2}
    ((restored,),) = JaxRun(daemons[:1], tmp_path / "run", restores).results()
    assert restored["begun"] == 2
    equal(restored, trained[0][9])


def test_what_fails_in_one_process_fails_in_all(daemons, tmp_path):
    saved = str(tmp_path / "saved")
    options = {"way": "shard_map", "save": saved, "restore_at": 1, "restore_from": [saved, "/nowhere"]}
    (code, first), (other_code, second) = JaxRun(daemons, tmp_path / "run", options).end()
    assert code and other_code
    assert "rank 1 could not restore its shard: " in first
    assert "/nowhere" in second
