"""What a daemon's death leaves: nothing half filled is trained, nothing in use is deleted, nothing vanishes."""

import os
import pathlib
import signal
import subprocess
import sys

import grpc
import pytest
import torch
from tests.conftest import BINARY, Daemon
from tests.fault.test_keeper import OFF, children, create, names, reconnected, wait_until
from tests.support.open_files import open_files

import superoffload.torch
from superoffload._core.control import Connection
from superoffload._core.error import Error
from superoffload.v1 import optimizer_pb2 as pb

CTL = pathlib.Path(os.environ["SUPEROFFLOAD_BUILD"]) / "client" / "superoffloadctl"


@pytest.fixture
def kept():
    started = Daemon("--keeper", OFF)
    yield started
    assert started.stop() == 0, started.log


def ctl(daemon, *words):
    return subprocess.run([CTL, f"--endpoint={daemon.endpoint}", *words], capture_output=True, text=True)


def kill_daemon(daemon):
    (victim,) = children(daemon.process.pid)
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: children(daemon.process.pid) not in ([], [victim]))
    reconnected(daemon).close()


def model(value=1.0):
    return torch.nn.ParameterDict({"weight": torch.nn.Parameter(torch.full((300,), value))})


def optimizer_of(daemon, trained, name="run", **arguments):
    return superoffload.torch.AdamW(trained.named_parameters(), 1e-2, endpoint=daemon.endpoint, name=name, **arguments)


def step(trained, optimizer):
    trained["weight"].square().sum().backward()
    optimizer.step()


def leave_unfilled(daemon, name="run"):
    """As a trainer that was killed in its constructor does."""
    connection = Connection(daemon.endpoint)
    request = pb.CreateOptimizerRequest(name=name, algorithm="adamw", groups=[pb.ParameterGroup()])
    request.parameters.add(name="weight", shape=[300], dtype=pb.DATA_TYPE_FLOAT32)
    connection.call("CreateOptimizer", request)
    connection.close()


@pytest.mark.parametrize("sync", ["check", "pull_params"])
def test_an_optimizer_that_was_never_filled_is_refused_with_the_remedies(kept, sync):
    leave_unfilled(kept)
    kill_daemon(kept)
    with pytest.raises(Error, match='"run".*push_params.*restore.*delete') as raised:
        optimizer_of(kept, model(), sync=sync)
    assert raised.value.code == grpc.StatusCode.DATA_LOSS
    assert "incomplete" in ctl(kept, "list").stdout


def test_an_optimizer_that_was_never_filled_takes_a_push_or_a_restore(kept, tmp_path):
    leave_unfilled(kept)
    trained = model(3.0)
    pushed = optimizer_of(kept, trained, sync="push_params")
    step(trained, pushed)
    pushed.save_checkpoint(tmp_path / "saved")
    expected = pushed.state_tensors()["weight"]["master"]
    leave_unfilled(kept, "other")
    restored = optimizer_of(kept, model(), "other", restore=tmp_path / "saved")
    assert torch.equal(restored.state_tensors()["weight"]["master"], expected)


def test_every_call_comes_back_after_a_death_between_steps(kept, tmp_path):
    trained = model()
    optimizer = optimizer_of(kept, trained)
    step(trained, optimizer)
    expected = trained["weight"].detach().clone()
    kill_daemon(kept)
    assert torch.equal(optimizer.state_tensors()["weight"]["master"], expected)
    kill_daemon(kept)
    assert optimizer.save_checkpoint(tmp_path / "saved") == 1
    kill_daemon(kept)
    optimizer.pull_params()
    assert torch.equal(trained["weight"].detach(), expected)
    kill_daemon(kept)
    optimizer.restore_checkpoint(tmp_path / "saved")
    assert torch.equal(trained["weight"].detach(), expected)
    step(trained, optimizer)
    assert optimizer.last_result.committed_steps == 2


@pytest.mark.parametrize("there", ["published by the daemon that died", "somebody's", "of another moment"])
def test_a_checkpoint_that_a_daemon_published_before_it_died_is_the_answer_of_the_call(
    kept, tmp_path, monkeypatch, there
):
    trained = model()
    optimizer = optimizer_of(kept, trained)
    directory = tmp_path / "saved"
    if there == "somebody's":
        directory.mkdir()
    if there == "of another moment":
        step(trained, optimizer)
        optimizer.save_checkpoint(directory)
    step(trained, optimizer)
    write, died = Connection.stream, []

    def die_unanswered(connection, method, request):
        if not died:
            died.append(method)
            if there.startswith("published"):
                write(connection, method, request)
            kill_daemon(kept)
            raise Error(grpc.StatusCode.UNAVAILABLE, "the answer was lost")
        return write(connection, method, request)

    monkeypatch.setattr(Connection, "stream", die_unanswered)
    if not there.startswith("published"):
        with pytest.raises(Error) as raised:
            optimizer.save_checkpoint(directory)
        assert raised.value.code == grpc.StatusCode.ALREADY_EXISTS
        return
    assert optimizer.save_checkpoint(directory) == 1
    assert died == ["CheckpointOptimizer"]
    expected = optimizer.state_tensors()["weight"]["master"]
    with pytest.raises(Error) as raised:  # who asks anew gets no older one
        optimizer.save_checkpoint(directory)
    assert raised.value.code == grpc.StatusCode.ALREADY_EXISTS
    other = optimizer_of(kept, model(), "other", restore=directory)
    assert torch.equal(other.state_tensors()["weight"]["master"], expected)


def test_an_id_outlives_the_daemon_but_not_the_optimizer(kept):
    def the_id():
        connection = reconnected(kept)
        (hosted,) = connection.call("ListOptimizers", pb.ListOptimizersRequest()).optimizers
        return hosted.id

    create(Connection(kept.endpoint), "run")
    first = the_id()
    kill_daemon(kept)
    assert the_id() == first
    Connection(kept.endpoint).call("DeleteOptimizer", pb.DeleteOptimizerRequest(name="run"))
    create(Connection(kept.endpoint), "run")
    assert the_id() != first


LOST = "lost with the daemon.*step 1.*checkpoint"


@pytest.mark.parametrize("taken", [False, True], ids=["unknown", "taken"])
def test_a_trainer_is_told_when_keeper_and_daemon_died_at_once(taken, tmp_path):
    kept = Daemon("--keeper", OFF)
    trained = [model() for _ in range(5)]
    optimizers = [optimizer_of(kept, each, f"run-{i}") for i, each in enumerate(trained)]
    for each, optimizer in zip(trained, optimizers, strict=True):
        step(each, optimizer)
    (daemon,) = children(kept.process.pid)
    os.kill(kept.process.pid, signal.SIGSTOP)  # neither has the other's memory any more
    os.kill(daemon, signal.SIGKILL)
    kept.process.kill()
    kept.process.wait()
    flags = [BINARY, f"--runtime_directory={kept.directory.name}", OFF]
    successor = subprocess.Popen(flags)
    reconnected(kept).close()
    if taken:  # by a trainer that began anew
        for i in range(len(trained)):
            optimizer_of(kept, model(), f"run-{i}").close()
    calls = [
        lambda each, optimizer: step(each, optimizer),
        lambda _, optimizer: optimizer.state_tensors(),
        lambda _, optimizer: optimizer.save_checkpoint(tmp_path / "saved"),
        lambda _, optimizer: optimizer.push_params(),
        lambda _, optimizer: optimizer.pull_params(),
    ]
    for call, each, optimizer in zip(calls, trained, optimizers, strict=True):
        before = each["weight"].detach().clone()
        with pytest.raises(Error, match=LOST) as raised:
            call(each, optimizer)
        assert raised.value.code == grpc.StatusCode.DATA_LOSS
        assert torch.equal(each["weight"].detach(), before)
        optimizer.close()
    assert not (tmp_path / "saved").exists()
    successor.terminate()
    assert successor.wait(60) == 0


def test_an_edit_outlives_the_daemon_and_can_be_pushed(kept):
    trained = model()
    optimizer = optimizer_of(kept, trained)
    step(trained, optimizer)
    with torch.no_grad():
        trained["weight"].fill_(7.0)
    kill_daemon(kept)
    optimizer.state_tensors()  # comes back, and leaves the edit alone
    assert torch.equal(trained["weight"].detach(), torch.full((300,), 7.0))
    kill_daemon(kept)
    optimizer.push_params()
    assert torch.equal(optimizer.state_tensors()["weight"]["master"], torch.full((300,), 7.0))


TRAINER = """
import sys, torch, superoffload.torch
parameter = torch.nn.Parameter(torch.ones(300))
optimizer = superoffload.torch.AdamW([("weight", parameter)], endpoint=sys.argv[1], name="run")
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_recovered_optimizer_belongs_to_its_trainer_as_long_as_that_lives(kept):
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, kept.endpoint], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert trainer.stdout.readline() == "ready\n"
    kill_daemon(kept)
    refused = ctl(kept, "delete", "run")
    assert refused.returncode == 1
    assert f"process {trainer.pid}" in refused.stderr
    with pytest.raises(Error, match=f"process {trainer.pid}"):
        optimizer_of(kept, model(), sync="pull_params")
    trainer.kill()
    trainer.wait()
    assert ctl(kept, "delete", "run").returncode == 0


def start_trainer(daemon, arguments):
    code = TRAINER.replace('name="run"', arguments)
    trainer = subprocess.Popen(
        [sys.executable, "-c", code, daemon.endpoint], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert trainer.stdout.readline() == "ready\n"
    return trainer


def test_a_lease_does_not_run_out_while_the_trainer_of_a_recovered_optimizer_lives(kept):
    trainer = start_trainer(kept, 'name="run", lease_seconds=0.2')
    kill_daemon(kept)
    connection = reconnected(kept)
    for sentinel in ("first", "second"):  # whose leases began later, and were as long
        create(connection, sentinel)
        update = pb.UpdatePoliciesRequest(name=sentinel)
        update.policies.lease.nanos = 200_000_000
        connection.call("UpdatePolicies", update)
        wait_until(lambda gone=sentinel: gone not in names(connection))
    assert names(connection) == {"run"}
    trainer.kill()
    trainer.wait()
    wait_until(lambda: not names(connection))


def test_an_anonymous_optimizer_of_a_killed_trainer_goes_after_five_minutes(kept):
    connection = Connection(kept.endpoint)
    trainer = start_trainer(kept, "")
    (hosted,) = connection.call("ListOptimizers", pb.ListOptimizersRequest()).optimizers
    assert hosted.policies.lease.seconds == 300
    trainer.kill()
    trainer.wait()
    wait_until(lambda: ctl(kept, "delete", hosted.name).returncode == 0)  # once the daemon knows of the death

    trainer = start_trainer(kept, "")
    (hosted,) = connection.call("ListOptimizers", pb.ListOptimizersRequest()).optimizers
    update = pb.UpdatePoliciesRequest(name=hosted.name)
    update.policies.lease.nanos = 200_000_000  # for five minutes
    connection.call("UpdatePolicies", update)
    trainer.kill()
    trainer.wait()
    wait_until(lambda: not names(connection))


def test_memory_that_cannot_be_hosted_keeps_its_name_and_comes_back(tmp_path):
    config = tmp_path / "superoffloadd.textproto"
    config.write_text('metrics_address: "off"')
    kept = Daemon("--keeper", f"--config={config}")
    trained = model()
    optimizer = optimizer_of(kept, trained)
    step(trained, optimizer)
    expected = trained["weight"].detach().clone()
    optimizer.close()
    config.write_text('metrics_address: "off" per_user_memory_bytes: 5000')
    kill_daemon(kept)
    assert "damaged" in ctl(kept, "list").stdout
    with pytest.raises(Error, match='"run".*per_user_memory_bytes.*delete') as raised:
        optimizer_of(kept, model())
    assert raised.value.code == grpc.StatusCode.DATA_LOSS
    config.write_text('metrics_address: "off"')
    kill_daemon(kept)
    again = optimizer_of(kept, model(), sync="pull_params")
    assert torch.equal(again.hosted_parameters()[0].detach(), expected)
    assert kept.stop() == 0, kept.log


@pytest.mark.skipif(os.geteuid() != 0, reason="only root writes to a daemon's memory")
def test_a_damaged_record_is_listed_and_can_be_deleted(kept):
    connection = Connection(kept.endpoint)
    create(connection, "run", "whole")
    (daemon,) = children(kept.process.pid)
    for fd, file in open_files(daemon).items():
        if "superoffload-record" in file:
            with open(fd, "r+b") as record:
                record.seek(8)
                record.write(b"\x63")  # the format's version
            break
    kill_daemon(kept)
    assert "damaged" in ctl(kept, "list").stdout
    connection = Connection(kept.endpoint)
    assert names(connection) == {"run", "whole"}
    (bad,) = [o for o in connection.call("ListOptimizers", pb.ListOptimizersRequest()).optimizers if o.state == 3]
    assert "version 99" in bad.state_reason
    with pytest.raises(Error, match="exists"):
        create(connection, bad.name)
    assert ctl(kept, "delete", bad.name).returncode == 0
    create(connection, bad.name)
    kill_daemon(kept)
    assert names(Connection(kept.endpoint)) == {"run", "whole"}
