"""Scheduled checkpoints: age is the order of writing within a run, and nobody removes or overwrites another's."""

import os
import shutil
import time

import grpc
import pytest
import torch
from tests.conftest import Daemon

import superoffload.torch
from superoffload._core.control import Connection
from superoffload._core.error import Error
from superoffload.v1 import optimizer_pb2 as pb


def optimizer_of(daemon, model, name, directory=None, every=5, keep=1, **arguments):
    schedule = directory and superoffload.torch.CheckpointSchedule(every, str(directory), keep)
    return superoffload.torch.AdamW(
        model.named_parameters(), 1e-2, endpoint=daemon.endpoint, name=name, checkpoint=schedule, **arguments
    )


def train(model, optimizer, steps):
    for _ in range(steps):
        model(torch.ones(2, 8)).square().sum().backward()
        optimizer.step()


def wait_for(directory, *names):
    deadline = time.monotonic() + 60
    while {name for name in os.listdir(directory) if not name.startswith(".")} != set(names):
        assert time.monotonic() < deadline, os.listdir(directory)
        time.sleep(0.01)


def test_a_new_run_removes_its_own_checkpoints_only(daemon, tmp_path):
    old = torch.nn.Linear(8, 8)
    optimizer = optimizer_of(daemon, old, "run", tmp_path)
    for step in (5, 10):  # one that falls due while another is being written is left out
        train(old, optimizer, 5)
        wait_for(tmp_path, f"step-{step:08d}")
    optimizer.close()
    Connection(daemon.endpoint).call("DeleteOptimizer", pb.DeleteOptimizerRequest(name="run"))
    new = torch.nn.Linear(8, 8)
    optimizer = optimizer_of(daemon, new, "run", tmp_path)
    train(new, optimizer, 5)
    wait_for(tmp_path, "step-00000010", "step-00000005")
    train(new, optimizer, 5)
    wait_for(tmp_path, "step-00000010", "step-00000010-2")


def test_a_copy_under_another_name_stays(daemon, tmp_path):
    model = torch.nn.Linear(8, 8)
    optimizer = optimizer_of(daemon, model, "copied", tmp_path)
    train(model, optimizer, 5)
    wait_for(tmp_path, "step-00000005")
    shutil.copytree(tmp_path / "step-00000005", tmp_path / "step-00000005-best")
    train(model, optimizer, 5)
    wait_for(tmp_path, "step-00000010", "step-00000005-best")


def test_a_link_into_an_archive_stays_and_so_does_the_archive(daemon, tmp_path):
    model = torch.nn.Linear(8, 8)
    scheduled, archive = tmp_path / "scheduled", tmp_path / "archive"
    scheduled.mkdir()
    optimizer = optimizer_of(daemon, model, "archived", scheduled)
    train(model, optimizer, 5)
    wait_for(scheduled, "step-00000005")
    shutil.move(scheduled / "step-00000005", archive)
    (scheduled / "step-00000005").symlink_to(archive)
    files = sorted(os.listdir(archive))
    for step in (10, 15):
        train(model, optimizer, 5)
        wait_for(scheduled, f"step-{step:08d}", "step-00000005")
    assert sorted(os.listdir(archive)) == files


def test_nobody_else_can_open_what_a_schedule_has_locked(daemon, tmp_path):
    lock = tmp_path / ".superoffload-schedule"
    lock.touch(0o644)
    optimizer = optimizer_of(daemon, torch.nn.Linear(8, 8), "locked", tmp_path)
    assert lock.stat().st_mode & 0o777 == 0o600
    optimizer.close()


def test_what_a_killed_daemon_left_half_written_goes_with_the_next_checkpoint(daemon, tmp_path):
    half, notes = tmp_path / ".step-00000003.partial", tmp_path / ".notes.partial"
    for left in (half, notes):
        left.mkdir()
        (left / "optimizer.safetensors").write_bytes(bytes(100))
    model = torch.nn.Linear(8, 8)
    optimizer = optimizer_of(daemon, model, "left", tmp_path)
    train(model, optimizer, 5)
    wait_for(tmp_path, "step-00000005")
    deadline = time.monotonic() + 60
    while half.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert os.listdir(notes) == ["optimizer.safetensors"]


def test_a_run_that_went_back_takes_checkpoints_at_once_and_removes_the_older(daemon, tmp_path):
    model = torch.nn.Linear(8, 8)
    scheduled = tmp_path / "scheduled"
    scheduled.mkdir()
    optimizer = optimizer_of(daemon, model, "run", scheduled)
    train(model, optimizer, 3)
    optimizer.save_checkpoint(tmp_path / "third")  # by hand, beside a schedule that waits
    train(model, optimizer, 2)
    wait_for(scheduled, "step-00000005")
    train(model, optimizer, 5)
    wait_for(scheduled, "step-00000010")
    optimizer.restore_checkpoint(tmp_path / "third")
    train(model, optimizer, 2)
    wait_for(scheduled, "step-00000005")  # newer than that of step 10
    train(model, optimizer, 5)
    wait_for(scheduled, "step-00000010")
    optimizer.restore_checkpoint(tmp_path / "third")
    train(model, optimizer, 2)
    wait_for(scheduled, "step-00000005")


def test_two_optimizers_with_one_directory_are_refused(daemon, tmp_path):
    first, second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    optimizer_of(daemon, first, "rank0", tmp_path)
    with pytest.raises(Error, match="rank0.*directory of its own") as raised:
        optimizer_of(daemon, second, "rank1", f"{tmp_path}/")
    assert raised.value.code == grpc.StatusCode.INVALID_ARGUMENT
    kept = optimizer_of(daemon, second, "rank1")
    with pytest.raises(Error, match="rank0"):
        policies = pb.Policies(checkpoint=pb.CheckpointSchedule(every_steps=1, directory=str(tmp_path)))
        Connection(daemon.endpoint).call("UpdatePolicies", pb.UpdatePoliciesRequest(name="rank1", policies=policies))
    kept.close()


def test_policies_given_at_attach_replace_those_of_the_optimizer(daemon, tmp_path):
    model = torch.nn.Linear(8, 8)
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()

    def policies():
        return Connection(daemon.endpoint).call("GetOptimizer", pb.GetOptimizerRequest(name="run")).policies

    optimizer_of(daemon, model, "run", first, lease_seconds=1000).close()
    optimizer_of(daemon, model, "run", second, every=7).close()
    assert (policies().checkpoint.directory, policies().checkpoint.every_steps) == (str(second), 7)
    assert policies().lease.seconds == 1000  # was not given
    optimizer_of(daemon, model, "run", lease_seconds=2000).close()
    assert policies().checkpoint.directory == str(second)
    assert policies().lease.seconds == 2000


@pytest.fixture
def other_daemon():
    started = Daemon("--metrics_address=off")
    yield started
    assert started.stop() == 0, started.log


def test_two_daemons_do_not_share_the_directory_of_a_schedule(daemon, other_daemon, tmp_path):
    first, second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    optimizer = optimizer_of(daemon, first, "rank-0", tmp_path)
    with pytest.raises(Error, match='"rank-0" in superoffloadd [0-9]+.*directory of its own') as raised:
        optimizer_of(other_daemon, second, "rank-1", tmp_path)
    assert raised.value.code == grpc.StatusCode.FAILED_PRECONDITION
    connection = Connection(other_daemon.endpoint)
    assert not connection.call("ListOptimizers", pb.ListOptimizersRequest()).optimizers  # its name is free

    theirs = optimizer_of(other_daemon, second, "rank-1")
    update = pb.UpdatePoliciesRequest(name="rank-1")
    update.policies.checkpoint.every_steps = 5
    update.policies.checkpoint.directory = str(tmp_path)
    with pytest.raises(Error, match="rank-0"):
        connection.call("UpdatePolicies", update)
    train(first, optimizer, 5)
    wait_for(tmp_path, "step-00000005")
    optimizer.close()
    theirs.close()


def test_a_directory_is_free_again_with_the_end_of_its_schedule(daemon, other_daemon, tmp_path):
    optimizer = optimizer_of(daemon, torch.nn.Linear(8, 8), "run", tmp_path)
    optimizer.close()
    update = pb.UpdatePoliciesRequest(name="run")
    update.policies.checkpoint.every_steps = 7
    update.policies.checkpoint.directory = str(tmp_path)
    Connection(daemon.endpoint).call("UpdatePolicies", update)  # its own
    Connection(daemon.endpoint).call("DeleteOptimizer", pb.DeleteOptimizerRequest(name="run"))
    model = torch.nn.Linear(8, 8)
    other = optimizer_of(other_daemon, model, "run", tmp_path)
    train(model, other, 5)
    wait_for(tmp_path, "step-00000005")
    other.close()
