"""Which daemon of a machine a rank takes."""

import pytest

from superoffload._core import daemon, superchips
from superoffload._core.error import Error
from superoffload.v1 import optimizer_pb2

# Two Superchips of four cores and two GPUs, and a daemon for each.
_MACHINE = optimizer_pb2.Topology(
    superchips=[
        optimizer_pb2.Superchip(
            cores=[optimizer_pb2.Superchip.Core(cpus=[cpu]) for cpu in range(4 * chip, 4 * chip + 4)],
            gpus=[f"000{chip}:01:00.0", f"000{chip}:02:00.0"],
        )
        for chip in range(2)
    ]
)
_ANYWHERE = set(range(8))


def daemons(*bound: int | None) -> list[tuple[str, optimizer_pb2.Topology | None]]:
    seen = []
    for chip in bound:
        machine = optimizer_pb2.Topology()
        machine.CopyFrom(_MACHINE)
        if chip is not None:
            machine.used_superchip = chip
        seen.append((f"unix:/{chip}", machine))
    return seen


@pytest.mark.parametrize(
    ("gpu", "cpus", "environment", "taken"),
    [
        ("0001:02:00.0", _ANYWHERE, {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}, 1),  # GPUs in another order
        ("0001:01:00.0", {0, 1}, {}, 1),
        ("0007:01:00.0", {5}, {}, 1),  # of no Superchip
        (None, {4, 7}, {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, 1),
        (None, _ANYWHERE, {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}, 0),
        (None, _ANYWHERE, {"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4"}, 1),
        (None, _ANYWHERE, {"LOCAL_RANK": "1"}, 1),
        (None, _ANYWHERE, {"SLURM_LOCALID": "1", "SLURM_NTASKS_PER_NODE": "2(x4)"}, 1),
        (None, _ANYWHERE, {}, 0),
    ],
)
def test_a_rank_takes_the_daemon_of_its_gpus_or_its_cpus_superchip(gpu, cpus, environment, taken):
    assert superchips.choose(daemons(1, 0), gpu, cpus, environment) == f"unix:/{taken}"


def test_a_daemon_that_is_bound_to_no_superchip_stands_behind_those_that_are():
    assert superchips.choose(daemons(None, 1), None, _ANYWHERE, {}) == "unix:/1"
    assert superchips.choose([("unix:/old", None), *daemons(None)], None, {0}, {"LOCAL_RANK": "1"}) == "unix:/old"


def test_an_endpoint_is_named_for_each_rank(monkeypatch):
    for variable in ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("SUPEROFFLOAD_ENDPOINT", "/run/superoffloadd-{local_rank}/control.sock")
    with pytest.raises(Error, match="none of \\$LOCAL_RANK"):
        daemon.resolve_endpoint(None)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert daemon.resolve_endpoint(None) == "unix:/run/superoffloadd-3/control.sock"
    assert daemon.resolve_endpoint("here-{local_rank}") == "unix:here-3"
