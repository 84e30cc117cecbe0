"""What an operator sees of a run over several daemons, and how they end a step to which no trainer comes back."""

import ctypes
import json
import os
import pathlib
import re
import subprocess

import pytest
from tests.conftest import Daemon

from superoffload._core import optimizers
from superoffload._core.attachment import Attachment
from superoffload._core.control import Connection
from superoffload.v1 import optimizer_pb2

CTL = pathlib.Path(os.environ["SUPEROFFLOAD_BUILD"]) / "client" / "superoffloadctl"


def ctl(*words: str, status: int = 0) -> str:
    run = subprocess.run([CTL, *words], capture_output=True, text=True, timeout=60)
    assert run.returncode == status, run.stdout + run.stderr
    return run.stdout if status == 0 else run.stderr


class Rank:
    """A trainer that prepares a step of the run, and goes."""

    def __init__(self, daemon: Daemon, run: str, rank: int) -> None:
        self.name, self.endpoint = f"{run}.{rank}-of-2", f"--endpoint={daemon.endpoint}"
        self.connection = Connection(daemon.endpoint)
        member = optimizer_pb2.RunMember(run=run, rank=rank, ranks=2)
        parameter = optimizer_pb2.Parameter(name="w", shape=[64], dtype=optimizer_pb2.DATA_TYPE_FLOAT32)
        group = optimizer_pb2.ParameterGroup()
        optimizers.create(
            self.connection,
            optimizer_pb2.CreateOptimizerRequest(
                name=self.name, algorithm="adamw", parameters=[parameter], groups=[group], member=member, lineage=7
            ),
        )
        request = optimizer_pb2.AttachOptimizerRequest(name=self.name, sync=optimizer_pb2.SYNC_PUSH)
        self.attachment = Attachment(self.connection, request)
        self.connection.call("PushParameters", optimizer_pb2.PushParametersRequest(name=self.name))

    def prepare(self) -> float:
        gradient = (ctypes.c_float * 64)()
        piece = ctypes.addressof(gradient), 0, 64, 0, optimizer_pb2.DATA_TYPE_FLOAT32
        self.attachment.hand_over([piece])
        return self.attachment.wait_prepared(1.0, 0.5)

    def go(self) -> None:
        self.attachment.end()

    def ctl(self, *words: str, status: int = 0) -> str:
        return ctl(self.endpoint, *words, status=status)

    def close(self) -> None:
        self.connection.close()


@pytest.fixture
def ranks(daemons, request):
    ranks = [Rank(daemon, re.sub(r"\W", "-", request.node.name)[:60], rank) for rank, daemon in enumerate(daemons)]
    yield ranks
    for rank in ranks:
        rank.ctl("delete", rank.name)
        rank.close()


def test_a_step_that_one_rank_has_committed_is_committed_by_hand_on_the_other(daemons, ranks):
    total = sum(rank.prepare() for rank in ranks)
    ranks[0].attachment.end_prepared_step(1.0, 0.5, total)
    ranks[0].attachment.wait_step()
    for rank in ranks:
        rank.go()

    everywhere = ctl("list", "--all", "--endpoint=" + ",".join(daemon.endpoint for daemon in daemons))
    rows = [line.split() for line in everywhere.splitlines() if ranks[0].name.rsplit(".", 1)[0] in line]
    assert [(row[1], row[2], row[5], row[-1]) for row in rows] == [
        ("0/2", ranks[0].name, "ready", daemons[0].endpoint),
        ("1/2", ranks[1].name, "prepared", daemons[1].endpoint),
    ]
    assert "rank 1 of 2; step 1 is prepared" in ranks[1].ctl("describe", ranks[1].name)
    assert "step 1 is prepared" in ranks[1].ctl("delete", ranks[1].name, status=1)

    assert "no step is prepared" in ranks[0].ctl("report", ranks[0].name)
    (command,) = re.findall("superoffloadctl resolve NAME (.*)", ranks[0].ctl("report", ranks[0].name))
    assert "step 1 is committed" in ranks[1].ctl("resolve", ranks[1].name, *command.split())
    states = [rank.connection.get_whole(rank.name) for rank in ranks]
    assert [state.committed_steps for state in states] == [1, 1]
    assert [state.statistics.commits for state in states] == [1, 1]
    assert "no step" in ranks[1].ctl("resolve", ranks[1].name, "abandon", status=1)


def test_a_step_that_no_rank_has_committed_is_abandoned_by_hand(ranks):
    for rank in ranks:
        rank.prepare()
        rank.go()
    for rank in ranks:
        (command,) = re.findall("superoffloadctl (resolve .*)", rank.ctl("report", rank.name))
        assert "is abandoned" in rank.ctl(*command.split())
        optimizer = json.loads(rank.ctl("describe", rank.name, "--json"))
        assert optimizer["committed_steps"] == "0" and optimizer["statistics"]["skips_abandoned"] == "1"


def test_terms_that_the_step_was_not_prepared_with_are_refused(ranks):
    for rank in ranks:
        rank.prepare()
        rank.go()
        assert "prepared with" in rank.ctl("resolve", rank.name, "commit", "1", "1", "0.25", status=1)
        assert "no number" in rank.ctl("resolve", rank.name, "commit", "1", "x", "0.5", status=1)
        assert "takes NAME abandon" in rank.ctl("resolve", rank.name, "forget", status=1)
        rank.ctl("resolve", rank.name, "abandon")
