"""At the limit of processes and threads a call fails, and nothing else."""

import os
import pathlib

import grpc
import pytest
import torch
from tests.conftest import Daemon
from tests.support.users import request

import superoffload.torch
from superoffload._core.control import Connection
from superoffload._core.error import Error
from superoffload.v1 import optimizer_pb2 as pb

FAKE = pathlib.Path(os.environ["SUPEROFFLOAD_BUILD"]) / "tests" / "support" / "libsuperoffload_fake_threads.so"


@pytest.fixture
def limit(tmp_path, monkeypatch):
    """Reached as long as this file exists."""
    control = tmp_path / "limit"
    monkeypatch.setenv("FAKE_THREADS", str(control))
    preload = os.environ.get("LD_PRELOAD")
    monkeypatch.setenv("LD_PRELOAD", f"{preload}:{FAKE}" if preload else str(FAKE))
    return control


def exhausted(call):
    with pytest.raises(Error) as raised:
        call()
    assert raised.value.code == grpc.StatusCode.RESOURCE_EXHAUSTED, raised.value


def test_at_the_limit_calls_fail_and_names_stay_free(limit, tmp_path):
    daemon = Daemon("--metrics_address=off")
    connection = Connection(daemon.endpoint)
    weight = torch.nn.Parameter(torch.ones(64))
    optimizer = superoffload.torch.AdamW([weight], endpoint=daemon.endpoint, name="before")
    connection.call("CreateOptimizer", request("idle"))
    limit.touch()
    for attempt in range(3):
        exhausted(lambda: connection.attach(pb.AttachOptimizerRequest(name="idle", sync=pb.SYNC_PUSH)))
        exhausted(
            lambda: connection.stream(
                "CheckpointOptimizer",
                pb.CheckpointOptimizerRequest(name="before", directory=str(tmp_path / "checkpoint")),
            )
        )
        exhausted(
            lambda: connection.call(
                "RestoreOptimizer", pb.RestoreOptimizerRequest(name="idle", directories=[str(tmp_path)])
            )
        )
        try:
            connection.call("CreateOptimizer", request(f"large-{attempt}", 10_000_000))
            connection.call("DeleteOptimizer", pb.DeleteOptimizerRequest(name=f"large-{attempt}"))
        except Error as error:  # gRPC may have no thread for the call
            assert error.code == grpc.StatusCode.RESOURCE_EXHAUSTED
    limit.unlink()
    assert not connection.call("GetOptimizer", pb.GetOptimizerRequest(name="idle")).attached
    stream, _ = connection.attach(pb.AttachOptimizerRequest(name="idle", sync=pb.SYNC_PUSH))
    stream.cancel()
    weight.sum().backward()
    optimizer.step()
    optimizer.save_checkpoint(str(tmp_path / "checkpoint"))
    optimizer.close()
    connection.close()
    assert daemon.stop() == 0


def test_a_daemon_that_cannot_start_its_threads_says_so(limit):
    limit.touch()
    with pytest.raises(AssertionError, match="limit of processes"):
        Daemon("--metrics_address=off")
