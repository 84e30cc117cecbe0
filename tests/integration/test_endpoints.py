"""Daemon, C++ and Python agree on where a daemon is that nobody has named."""

import os
import pathlib
import re
import signal
import subprocess
import threading

import pytest

from superoffload._core import control
from superoffload._core import daemon as endpoints
from superoffload._core.error import Error

CTL = pathlib.Path(os.environ["SUPEROFFLOAD_BUILD"]) / "client" / "superoffloadctl"


def environment(**variables: str) -> dict[str, str]:
    unset = ("XDG_RUNTIME_DIR", "RUNTIME_DIRECTORY", "SUPEROFFLOAD_ENDPOINT")
    return {**{name: value for name, value in os.environ.items() if name not in unset}, **variables}


def ctl(*words: str, **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run([CTL, *words], env=environment(**variables), capture_output=True, text=True, timeout=60)


def python_directories(monkeypatch, **variables: str) -> list[str]:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return [os.path.dirname(endpoint.removeprefix("unix:")) for endpoint in endpoints.default_endpoints()]


@pytest.mark.parametrize("with_user_directory", [True, False])
def test_clients_look_in_the_same_places(monkeypatch, tmp_path, with_user_directory):
    variables = {"XDG_RUNTIME_DIR": str(tmp_path)} if with_user_directory else {}
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    looked = re.search("no superoffloadd listens in (.*?);", ctl("info", **variables).stderr)
    if looked is None:
        pytest.skip("a daemon runs at one of the usual places")
    assert looked.group(1).split(", ") == python_directories(monkeypatch, **variables)


@pytest.fixture
def standing(daemon, monkeypatch, tmp_path):
    """A daemon at a usual place that accepts connections and answers nothing."""
    monkeypatch.delenv("SUPEROFFLOAD_ENDPOINT", raising=False)
    os.symlink(daemon.directory.name, tmp_path / "superoffloadd")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    daemon.process.send_signal(signal.SIGSTOP)
    yield daemon
    daemon.process.send_signal(signal.SIGCONT)


def test_a_daemon_that_stands_still_for_a_while_is_waited_for(standing):
    later = threading.Timer(22, standing.process.send_signal, [signal.SIGCONT])  # gRPC by itself gives up after 20
    later.start()
    with subprocess.Popen([CTL, "info"], env=environment(XDG_RUNTIME_DIR=os.environ["XDG_RUNTIME_DIR"])) as info:
        endpoint = endpoints.resolve_endpoint(None)
        later.join()
        assert endpoint == endpoints.default_endpoints()[0]
        assert info.wait(60) == 0


def test_a_client_in_cpp_waits_no_longer_than_the_environment_says(standing):
    """For longer, gRPC would say after 20 seconds that the daemon is unavailable."""
    place = os.environ["XDG_RUNTIME_DIR"]
    info = ctl("info", XDG_RUNTIME_DIR=place, SUPEROFFLOAD_CONNECT_SECONDS="0.5")
    assert info.returncode != 0
    assert "DEADLINE_EXCEEDED" in info.stderr


def test_no_other_daemon_is_started_beside_one_that_stands_still(standing, monkeypatch):
    monkeypatch.setenv("SUPEROFFLOAD_CONNECT_SECONDS", "0.5")
    endpoint = endpoints.default_endpoints()[0]
    for look in (endpoints.resolve_endpoint, control.Connection):
        with pytest.raises(Error, match=r"SUPEROFFLOAD_CONNECT_SECONDS.*DEADLINE_EXCEEDED") as raised:
            look(None if look is endpoints.resolve_endpoint else endpoint)
        assert endpoint in str(raised.value)


def test_a_daemon_that_was_told_nothing_is_found(monkeypatch, tmp_path):
    monkeypatch.delenv("SUPEROFFLOAD_ENDPOINT", raising=False)
    directories = python_directories(monkeypatch, XDG_RUNTIME_DIR=str(tmp_path))
    process = subprocess.Popen(
        [os.environ["SUPEROFFLOAD_DAEMON"], "--metrics_address=off"],
        env=environment(XDG_RUNTIME_DIR=str(tmp_path)),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        log = ""
        while "control.sock" not in log:
            line = process.stderr.readline()
            assert line, log
            log += line
        assert ctl("info", XDG_RUNTIME_DIR=str(tmp_path)).returncode == 0
        assert endpoints.resolve_endpoint(None) == f"unix:{directories[0]}/control.sock"
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("/a:b/control.sock", "unix:/a:b/control.sock"),
        ("here/control.sock", "unix:here/control.sock"),
        ("unix:/a/control.sock", "unix:/a/control.sock"),
        ("host.example:7461", "host.example:7461"),
    ],
)
def test_a_path_is_taken_as_one_by_both(given, used):
    assert endpoints.resolve_endpoint(given) == used
    shown = ctl("kept", f"--endpoint={given}").stderr
    if used.startswith("unix:"):
        assert os.path.dirname(used.removeprefix("unix:")) + "/keeper.sock" in shown
    else:
        assert f"not at {used}" in shown
