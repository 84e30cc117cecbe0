"""A real daemon for the tests that need their own; others start a private one through the client."""

import os
import subprocess
import tempfile
import time

import grpc
import pytest

from superoffload.v1 import optimizer_pb2, optimizer_pb2_grpc

BINARY = os.environ.get("SUPEROFFLOAD_DAEMON", "superoffloadd")


class Daemon:
    def __init__(self, *flags: str, binary: str | os.PathLike[str] | None = None) -> None:
        self.directory = tempfile.TemporaryDirectory(prefix="so-test-")
        self.endpoint = f"unix:{self.directory.name}/control.sock"
        self.process = subprocess.Popen(
            [
                binary or BINARY,
                f"--runtime_directory={self.directory.name}",
                *flags,
            ],
            stderr=subprocess.PIPE,
            text=True,
        )
        self.channel = grpc.insecure_channel(self.endpoint)
        self.info = self._wait_ready()

    def _wait_ready(self) -> optimizer_pb2.ServerInfo:
        stub = optimizer_pb2_grpc.ServerServiceStub(self.channel)
        while True:
            if self.process.poll() is not None:
                raise AssertionError(self.process.stderr.read())
            if os.path.exists(f"{self.directory.name}/control.sock"):
                return stub.GetServerInfo(
                    optimizer_pb2.GetServerInfoRequest(),
                    wait_for_ready=True,
                    timeout=30,
                )
            time.sleep(0.01)

    def stop(self) -> int:
        self.channel.close()
        self.process.terminate()
        code = self.process.wait(60)
        self.log = self.process.stderr.read()
        self.directory.cleanup()
        return code


def _run(started: Daemon):
    yield started
    if started.process.poll() is None:
        assert started.stop() == 0, started.log


def several(count: int, binary: str | os.PathLike[str] | None = None):
    """Daemons that stop without an error at the end."""
    started = [Daemon("--metrics_address=off", binary=binary) for _ in range(count)]
    yield started
    for each in started:
        assert each.stop() == 0, each.log


@pytest.fixture(scope="module")
def daemons():
    """Of two Superchips."""
    yield from several(2)


@pytest.fixture
def daemon():
    """Without metrics: its HTTP server takes two seconds to stop."""
    yield from _run(Daemon("--metrics_address=off"))


@pytest.fixture
def metered_daemon():
    yield from _run(Daemon("--metrics_address=127.0.0.1:0"))
