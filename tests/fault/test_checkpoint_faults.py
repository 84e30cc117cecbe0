"""What has a checkpoint's name is a whole checkpoint, whatever disk and daemon do meanwhile."""

import errno
import os
import pathlib
import pickle
import signal
import threading
import time

import grpc
import pytest
import torch
from tests.conftest import Daemon
from tests.support.users import STRANGER, ctl

import superoffload.torch
from superoffload._core.control import Connection
from superoffload._core.error import Error
from superoffload.v1 import optimizer_pb2


@pytest.fixture
def failing_daemon(disk):
    daemon = Daemon("--keeper", "--metrics_address=off")
    yield daemon
    assert daemon.stop() == 0, daemon.log


def trained(daemon, name="run"):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 300), torch.nn.GELU(), torch.nn.Linear(300, 64)).to(torch.bfloat16)
    optimizer = superoffload.torch.AdamW(
        model.named_parameters(), lr=1e-2, endpoint=daemon.endpoint, name=name, bucket_bytes=4096
    )
    train(model, optimizer, 0, 4)
    return model, optimizer


def train(model, optimizer, first, last):
    for step in range(first, last):
        batch = torch.randn(8, 64, generator=torch.Generator().manual_seed(step)).to(torch.bfloat16)
        model(batch).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def states_equal(a, b):
    return all(torch.equal(a[name][key], b[name][key]) for name in a for key in a[name])


@pytest.mark.parametrize(
    ("call", "error", "code", "words"),
    [
        ("write", errno.ENOSPC, grpc.StatusCode.RESOURCE_EXHAUSTED, "free disk space"),
        ("write", errno.EIO, grpc.StatusCode.UNKNOWN, "Input/output error"),
        ("sync", errno.EIO, grpc.StatusCode.UNKNOWN, "Input/output error"),
        ("sync", errno.EDQUOT, grpc.StatusCode.RESOURCE_EXHAUSTED, "free disk space"),
    ],
)
def test_a_failing_disk_costs_a_checkpoint_and_nothing_else(failing_daemon, disk, tmp_path, call, error, code, words):
    model, optimizer = trained(failing_daemon)
    optimizer.save_checkpoint(tmp_path / "first")
    before = optimizer.state_tensors()
    train(model, optimizer, 4, 6)
    disk.write_text(f"{call} {error}")
    with pytest.raises(Error) as raised:
        optimizer.save_checkpoint(tmp_path / "second")
    assert raised.value.code == code
    assert words in str(raised.value)
    assert sorted(os.listdir(tmp_path)) == ["disk", "first"]
    train(model, optimizer, 6, 8)  # nothing waits for what was not saved
    disk.write_text("ok")
    optimizer.save_checkpoint(tmp_path / "second")
    optimizer.restore_checkpoint(tmp_path / "first")
    assert states_equal(optimizer.state_tensors(), before)


def test_a_daemon_killed_while_it_writes_leaves_the_checkpoints_before(failing_daemon, disk, tmp_path):
    model, optimizer = trained(failing_daemon)
    optimizer.save_checkpoint(tmp_path / "first")
    before = optimizer.state_tensors()
    train(model, optimizer, 4, 6)
    disk.write_text("slow")
    keeper = failing_daemon.process.pid
    children = pathlib.Path(f"/proc/{keeper}/task/{keeper}/children")
    control = Connection(failing_daemon.endpoint)
    request = optimizer_pb2.CheckpointOptimizerRequest(name="run", directory=str(tmp_path / "second"))

    def kill_in_the_middle():
        while not any((tmp_path / ".second.partial").glob("*.safetensors")):
            time.sleep(0.001)
        time.sleep(0.05)
        for child in children.read_text().split():
            os.kill(int(child), signal.SIGKILL)

    killer = threading.Thread(target=kill_in_the_middle)
    killer.start()
    with pytest.raises(Error) as raised:
        control.stream("CheckpointOptimizer", request)
    assert raised.value.code == grpc.StatusCode.UNAVAILABLE
    killer.join()
    disk.write_text("ok")
    train(model, optimizer, 6, 8)  # attaches anew
    assert not (tmp_path / "second").exists()
    reference_model, reference = trained(failing_daemon, "reference")
    train(reference_model, reference, 4, 8)
    control = Connection(failing_daemon.endpoint)
    control.stream("CheckpointOptimizer", request)  # the leftover is in nobody's way
    assert not (tmp_path / ".second.partial").exists()
    reference.close()
    other = superoffload.torch.AdamW(
        reference_model.named_parameters(), endpoint=failing_daemon.endpoint, name="other", restore=tmp_path / "first"
    )
    assert states_equal(other.state_tensors(), before)


def test_steps_wait_for_a_slow_disk_and_keep_their_bits(failing_daemon, disk, tmp_path):
    model, optimizer = trained(failing_daemon)
    reference_model, reference = trained(failing_daemon, "reference")
    train(reference_model, reference, 4, 12)
    disk.write_text("slow")
    control = Connection(failing_daemon.endpoint)
    request = optimizer_pb2.CheckpointOptimizerRequest(name="run", directory=str(tmp_path / "slow"))
    saver = threading.Thread(target=lambda: control.stream("CheckpointOptimizer", request))
    saver.start()
    train(model, optimizer, 4, 12)
    saver.join()
    assert states_equal(optimizer.state_tensors(), reference.state_tensors())


def test_a_checkpoint_and_a_pickle_beside_another_wait_for_it(failing_daemon, disk, tmp_path):
    """As when the loop saves while the daemon takes a scheduled one."""
    model, optimizer = trained(failing_daemon)
    before = optimizer.state_tensors()
    disk.write_text("slow")
    control = Connection(failing_daemon.endpoint)
    request = optimizer_pb2.CheckpointOptimizerRequest(name="run", directory=str(tmp_path / "first"))
    first = control._session.stub.CheckpointOptimizer(request, metadata=control._session.metadata)
    while not os.path.exists(tmp_path / ".first.partial"):
        next(first)
    assert optimizer.save_checkpoint(tmp_path / "second") == 4
    assert list(first)[-1].committed_steps == 4
    again = control._session.stub.CheckpointOptimizer(
        optimizer_pb2.CheckpointOptimizerRequest(name="run", directory=str(tmp_path / "third")),
        metadata=control._session.metadata,
    )
    while not os.path.exists(tmp_path / ".third.partial"):
        next(again)
    pickled = pickle.dumps(optimizer.state_dict())
    assert list(again)[-1].committed_steps == 4
    disk.write_text("ok")
    train(model, optimizer, 4, 6)
    optimizer.load_state_dict(pickle.loads(pickled))
    assert states_equal(optimizer.state_tensors(), before)
    train(model, optimizer, 4, 6)
    optimizer.restore_checkpoint(tmp_path / "second")
    assert states_equal(optimizer.state_tensors(), before)


def test_a_cancelled_checkpoint_leaves_nothing(failing_daemon, disk, tmp_path):
    model, optimizer = trained(failing_daemon)
    disk.write_text("slow")
    control = Connection(failing_daemon.endpoint)
    request = optimizer_pb2.CheckpointOptimizerRequest(name="run", directory=str(tmp_path / "cancelled"))
    call = control._session.stub.CheckpointOptimizer(request, metadata=control._session.metadata)
    next(call)
    call.cancel()
    train(model, optimizer, 4, 8)
    deadline = time.monotonic() + 30
    while os.listdir(tmp_path) != ["disk"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_disk_that_never_answers_does_not_hold_up_the_end(disk):
    """The daemon goes on without what hangs, and keeps what does not."""
    daemon = Daemon("--metrics_address=off")
    _, optimizer = trained(daemon)
    disk.write_text("hang")
    connection = Connection(daemon.endpoint)
    request = optimizer_pb2.CheckpointOptimizerRequest(name="run", directory=f"{disk.parent}/never")
    progress = connection._session.stub.CheckpointOptimizer(request, metadata=connection._session.metadata)
    while not os.path.exists(f"{disk.parent}/.never.partial"):
        next(progress)
    daemon.process.terminate()
    assert daemon.process.wait(240) == 0
    assert "stopping without" in daemon.process.stderr.read()
    optimizer.close()


def test_trainers_that_attach_while_a_disk_hangs_hold_up_nobody_else(disk):
    """What their last step left to absorb waits for the snapshot, and they wait for that in threads of their own."""
    daemon = Daemon("--metrics_address=off")
    trained(daemon, "other")[1].close()
    connection = Connection(daemon.endpoint)
    stub, metadata = connection._session.stub, connection._session.metadata
    calls = []
    for name in ["a", "b", "c", "d"]:  # more than gRPC has threads for each core
        disk.write_text("ok")
        model, optimizer = trained(daemon, name)
        disk.write_text("hang")
        request = optimizer_pb2.CheckpointOptimizerRequest(name=name, directory=f"{disk.parent}/{name}")
        calls.append(stub.CheckpointOptimizer(request, metadata=metadata))
        while not os.path.exists(f"{disk.parent}/.{name}.partial"):
            next(calls[-1])
        train(model, optimizer, 4, 5)
        optimizer.close()
    for name in ["a", "b", "c", "d"]:
        request = optimizer_pb2.AttachOptimizerRequest(name=name, sync=optimizer_pb2.SYNC_PULL)
        calls.append(stub.AttachOptimizer(iter([request]), metadata=metadata))
    time.sleep(0.5)  # for all of them to arrive
    request = optimizer_pb2.GetOptimizerRequest(name="other")
    assert connection.call("GetOptimizer", request, timeout_seconds=60).name == "other"
    for call in calls:
        call.cancel()
    daemon.process.kill()
    daemon.process.wait()


@pytest.mark.skipif(os.geteuid() != 0, reason="acting as other users needs root")
def test_calls_that_wait_for_a_hanging_disk_take_no_thread_of_another_user(disk):
    """Each of the first 31 users has a server of its own; the ninth shared that of the first."""
    daemon = Daemon("--metrics_address=off")
    model, optimizer = trained(daemon)
    connection = Connection(daemon.endpoint)
    stub, metadata = connection._session.stub, connection._session.metadata
    for user in range(STRANGER, STRANGER + 7):
        assert ctl(daemon, "list", user=user).returncode == 0
    disk.write_text("hang")
    request = optimizer_pb2.CheckpointOptimizerRequest(name="run", directory=f"{disk.parent}/never")
    progress = stub.CheckpointOptimizer(request, metadata=metadata)
    while not os.path.exists(f"{disk.parent}/.never.partial"):
        next(progress)
    train(model, optimizer, 4, 5)
    settle = optimizer_pb2.SettleOptimizerRequest(name="run")
    waiting = [stub.SettleOptimizer.future(settle, metadata=metadata) for _ in range(100)]
    time.sleep(0.5)  # for all of them to arrive
    assert ctl(daemon, "list", user=STRANGER + 7).returncode == 0
    assert not any(call.done() for call in waiting[:10])
    daemon.process.kill()
    daemon.process.wait()
    optimizer.close()


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "shard"])
def test_a_pipe_in_the_place_of_a_file_is_refused_at_once(daemon, tmp_path, name):
    _, optimizer = trained(daemon)
    optimizer.save_checkpoint(str(tmp_path / "checkpoint"))
    optimizer.close()
    path = next((tmp_path / "checkpoint").glob("*.safetensors" if name == "shard" else name))
    path.unlink()
    os.mkfifo(path)
    request = optimizer_pb2.RestoreOptimizerRequest(name="run", directories=[str(tmp_path / "checkpoint")])
    with pytest.raises(Error) as raised:
        Connection(daemon.endpoint).call("RestoreOptimizer", request, timeout_seconds=60)
    assert raised.value.code == grpc.StatusCode.INVALID_ARGUMENT and "no regular file" in raised.value.message


def test_a_file_system_that_hangs_takes_so_many_calls_of_a_user_and_no_more(failing_daemon, disk, tmp_path):
    """Each one's thread waits for the disk; further ones are refused, and other calls go on."""
    names = [f"run-{i}" for i in range(9)]
    optimizers = [trained(failing_daemon, name)[1] for name in names]
    disk.write_text("hang")

    def checkpoint(name, outcomes):
        connection = Connection(failing_daemon.endpoint)
        request = optimizer_pb2.CheckpointOptimizerRequest(name=name, directory=str(tmp_path / f"saved-{name}"))
        try:
            connection.stream("CheckpointOptimizer", request)
        except Error as error:
            outcomes.append(error)
        connection.close()

    outcomes = []
    threads = [threading.Thread(target=checkpoint, args=(name, outcomes)) for name in names]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 60
    while not outcomes:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert outcomes[0].code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "has 8 calls that read or write files" in str(outcomes[0])
    listed = Connection(failing_daemon.endpoint).call("ListOptimizers", optimizer_pb2.ListOptimizersRequest())
    assert len(listed.optimizers) == len(names)
    (victim,) = (
        pathlib.Path(f"/proc/{failing_daemon.process.pid}/task/{failing_daemon.process.pid}/children")
        .read_text()
        .split()
    )
    disk.write_text("ok")
    os.kill(int(victim), signal.SIGKILL)  # what hangs for ever ends with the daemon only
    for thread in threads:
        thread.join()
    assert len(outcomes) == len(names)
    for optimizer in optimizers:
        optimizer.state_tensors()  # with the successor
        optimizer.close()
