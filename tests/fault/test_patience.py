"""How long a client waits for the successor of its daemon."""

import signal
import subprocess

import grpc
import pytest
from tests.conftest import BINARY, Daemon

from superoffload._core import control
from superoffload._core.control import Connection
from superoffload._core.error import Error


class FakeTime:
    """Passes only while somebody sleeps; calls `event` once when `at` seconds have passed."""

    def __init__(self, at, event):
        self._now, self._at, self._event = 0.0, at, event

    def monotonic(self):
        return self._now

    def sleep(self, seconds):
        self._now += seconds
        if self._event and self._now >= self._at:
            self._event()
            self._event = None


@pytest.fixture
def dead(monkeypatch):
    """A connection whose daemon is dead and whose socket is gone; a successor is started after five seconds."""
    first = Daemon("--metrics_address=off")
    connection = Connection(first.endpoint)
    first.process.send_signal(signal.SIGTERM)
    first.process.wait(60)
    successors = []

    def start():
        successor = subprocess.Popen([BINARY, f"--runtime_directory={first.directory.name}", "--metrics_address=off"])
        successors.append(successor)
        while not connection.alive():
            assert successor.poll() is None

    monkeypatch.setattr(control, "time", FakeTime(5, start))
    yield connection
    connection.close()
    for successor in successors:
        successor.terminate()
        assert successor.wait(60) == 0
    first.channel.close()
    first.directory.cleanup()


def test_a_successor_that_takes_seconds_to_listen_is_found(dead):
    dead.wait_reopened()
    assert dead.call("ListOptimizers", control.optimizer_pb2.ListOptimizersRequest()) is not None


def test_the_environment_says_how_long_a_client_waits_without_a_socket(dead, monkeypatch):
    monkeypatch.setenv("SUPEROFFLOAD_SOCKET_SECONDS", "0.5")
    with pytest.raises(Error) as error:
        dead.wait_reopened()
    assert error.value.code == grpc.StatusCode.UNAVAILABLE
    assert "has stopped, and no other has come" in str(error.value)


@pytest.mark.parametrize("text", ["soon", "-1", "inf", "nan"])
def test_a_wait_that_is_no_number_of_seconds_is_refused(dead, monkeypatch, text):
    monkeypatch.setenv("SUPEROFFLOAD_SOCKET_SECONDS", text)
    with pytest.raises(ValueError, match="SUPEROFFLOAD_SOCKET_SECONDS"):
        dead.wait_reopened()
