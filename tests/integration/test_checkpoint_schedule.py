"""Scheduled checkpoints: age is the order of writing within a run, and nobody removes or overwrites another's."""

import os
import time

import grpc
import pytest
import torch

import superoffload.torch
from superoffload._control import Connection
from superoffload._error import Error
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
    with pytest.raises(Error, match='rank0.*directory of its own') as raised:
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
