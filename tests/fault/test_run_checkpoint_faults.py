"""A checkpoint of a run has its name once all ranks' parts are whole, whoever is killed at which stage."""

import os
import pathlib
import signal
import subprocess
import threading
import time

import grpc
import pytest
from tests.conftest import Daemon

from superoffload._core.attachment import Attachment
from superoffload._core.control import Connection
from superoffload._core.error import Error
from superoffload.v1 import optimizer_pb2 as pb

BUILD = pathlib.Path(os.environ["SUPEROFFLOAD_BUILD"])
ROWS, COLUMNS = 6, 4096


@pytest.fixture
def ranks(disk):
    """Two daemons, each with a rank's half of a parameter."""
    started = [Daemon("--keeper", "--metrics_address=off") for _ in range(2)]
    for rank, daemon in enumerate(started):
        _create(daemon, f"run.{rank}-of-2", rank, ROWS // 2, lineage=7)
    yield started
    for daemon in started:
        assert daemon.stop() == 0, daemon.log


def _create(daemon, name, rank, rows, lineage):
    connection = Connection(daemon.endpoint)
    request = pb.CreateOptimizerRequest(name=name, algorithm="adamw", groups=[pb.ParameterGroup()], lineage=lineage)
    shard = {} if rank is None else {"global_shape": [ROWS, COLUMNS], "global_offset": [rank * rows, 0]}
    request.parameters.add(name="w", shape=[rows, COLUMNS], dtype=pb.DATA_TYPE_FLOAT32, **shard)
    if rank is not None:
        request.member.run, request.member.rank, request.member.ranks = "run", rank, 2
    connection.call("CreateOptimizer", request)
    attachment = Attachment(connection, pb.AttachOptimizerRequest(name=name, sync=pb.SYNC_PUSH))
    attachment.call("PushParameters", pb.PushParametersRequest(name=name))
    attachment.end()
    connection.close()


def write(daemon, rank, directory, step=0):
    connection = Connection(daemon.endpoint)
    request = pb.CheckpointOptimizerRequest(name=f"run.{rank}-of-2", directory=str(directory), run_step=step)
    try:
        return connection.stream("CheckpointOptimizer", request)
    finally:
        connection.close()


def ctl(*words):
    return subprocess.run([BUILD / "client" / "superoffloadctl", *map(str, words)], capture_output=True, text=True)


def refused_as_half(daemon, directory):
    """Nothing takes it for a checkpoint."""
    assert not directory.exists()
    assert "NOT WHOLE" in ctl("inspect", directory).stdout
    assert "NOT_FOUND" in ctl(f"--endpoint={daemon.endpoint}", "restore", "run.0-of-2", directory).stderr


def whole(directory):
    said = ctl("inspect", directory, "--verify")
    assert said.returncode == 0 and "whole" in said.stdout, said.stdout + said.stderr
    assert sorted(os.listdir(directory)) == ["rank-00000-of-00002", "rank-00001-of-00002", "run.index.json"]


def test_a_daemon_killed_while_it_writes_its_part_leaves_no_checkpoint_and_it_is_written_again(ranks, disk, tmp_path):
    target, growing = tmp_path / "ckpt", tmp_path / ".ckpt.ranks"
    assert not write(ranks[0], 0, target).run_whole
    refused_as_half(ranks[0], target)
    disk.write_text("slow")
    keeper = ranks[1].process.pid
    victims = pathlib.Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()
    errors = []

    def write_second():
        try:
            write(ranks[1], 1, target)
        except Error as error:
            errors.append(error.code)

    writer = threading.Thread(target=write_second)
    writer.start()
    while not any(growing.glob(".rank-00001-of-00002.partial/*.safetensors")):
        time.sleep(0.001)
    for victim in victims:
        os.kill(int(victim), signal.SIGKILL)
    writer.join()
    disk.write_text("ok")
    assert errors == [grpc.StatusCode.UNAVAILABLE]
    refused_as_half(ranks[0], target)
    assert write(ranks[1], 1, target).run_whole
    whole(target)
    assert not growing.exists()


def test_parts_that_nobody_has_sealed_are_no_checkpoint_until_a_rank_seals_them(ranks, tmp_path):
    """As of a daemon that was killed after the last part."""
    target = tmp_path / "ckpt"
    for rank in range(2):
        write(ranks[rank], rank, target)
    whole(target)
    for left in ("run.index.json", None):  # killed before it had its name; or before the index was there
        target.rename(tmp_path / ".ckpt.ranks")
        if left is None:
            (tmp_path / ".ckpt.ranks" / "run.index.json").unlink()
        refused_as_half(ranks[0], target)
        again = write(ranks[0], 0, target)
        assert again.run_whole and again.bytes_written == 0
        whole(target)


def test_parts_of_another_step_or_training_are_never_put_together(ranks, disk, tmp_path):
    target = tmp_path / "ckpt"
    _create(ranks[1], "other", 1, ROWS // 2, lineage=8)  # of the same run's name, after another restore
    connection = Connection(ranks[1].endpoint)
    request = pb.CheckpointOptimizerRequest(name="other", directory=str(target), run_step=0)
    assert not connection.stream("CheckpointOptimizer", request).run_whole
    assert not write(ranks[0], 0, target).run_whole
    refused_as_half(ranks[0], target)
    assert write(ranks[1], 1, target).run_whole  # replaces the other's part
    whole(target)
    with pytest.raises(Error, match="choose another") as raised:
        connection.stream("CheckpointOptimizer", request)
    assert raised.value.code == grpc.StatusCode.ALREADY_EXISTS
    _create(ranks[0], "single", None, ROWS, lineage=0)
    request = pb.CheckpointOptimizerRequest(name="single", directory=str(tmp_path / "x"), run_step=0)
    with pytest.raises(Error, match="trains alone") as raised:
        Connection(ranks[0].endpoint).stream("CheckpointOptimizer", request)
    assert raised.value.code == grpc.StatusCode.INVALID_ARGUMENT
    said = ctl(f"--endpoint={ranks[0].endpoint}", "checkpoint", "run.0-of-2", tmp_path / "y")
    assert said.returncode == 1 and "--step=N" in said.stderr
    restored = ctl(f"--endpoint={ranks[0].endpoint}", "restore", "single", target)
    assert restored.returncode == 0, restored.stderr


def test_a_part_is_damaged_or_gone(ranks, tmp_path):
    target = tmp_path / "ckpt"
    for rank in range(2):
        write(ranks[rank], rank, target)
    index = target / "rank-00001-of-00002" / "model.safetensors.index.json"
    text = index.read_text()
    for broken in (text.replace('"lr"', '"lR"'), None):
        index.unlink()
        if broken is not None:
            index.write_text(broken)
        said = ctl(f"--endpoint={ranks[0].endpoint}", "restore", "run.0-of-2", target)
        assert "DATA_LOSS" in said.stderr and "rank" in said.stderr
        assert ctl("inspect", target).returncode == 1
        if broken is None:
            break
