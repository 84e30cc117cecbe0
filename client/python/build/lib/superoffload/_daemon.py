"""Finding a daemon, or starting a private one that lives as long as this process."""

import atexit
import functools
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

import grpc

from superoffload._error import Error
from superoffload.v1 import optimizer_pb2, optimizer_pb2_grpc

_BINARY_ENVIRONMENT = "SUPEROFFLOAD_DAEMON"
_ENDPOINT_ENVIRONMENT = "SUPEROFFLOAD_ENDPOINT"
_START_TIMEOUT_SECONDS = 60
_STOP_TIMEOUT_SECONDS = 30


def default_endpoints() -> list[str]:
    """Where a daemon listens by default, the most specific place first."""
    directories = [
        os.path.join(os.environ["XDG_RUNTIME_DIR"], "superoffloadd") if os.environ.get("XDG_RUNTIME_DIR") else None,
        "/run/superoffloadd",
        f"/tmp/superoffloadd-{os.geteuid()}",
    ]
    return [f"unix:{directory}/control.sock" for directory in directories if directory]


def resolve_endpoint(endpoint: str | None) -> str:
    """The endpoint given, else $SUPEROFFLOAD_ENDPOINT, else a running daemon's, else a private daemon's."""
    endpoint = endpoint or os.environ.get(_ENDPOINT_ENVIRONMENT)
    if endpoint:
        return endpoint if ":" in endpoint else f"unix:{endpoint}"
    for candidate in default_endpoints():
        if os.path.exists(candidate.removeprefix("unix:")) and _answers(candidate):
            return candidate
    return _private_daemon()


def _answers(endpoint: str) -> bool:
    with grpc.insecure_channel(endpoint) as channel:
        stub = optimizer_pb2_grpc.ServerServiceStub(channel)
        try:
            stub.GetServerInfo(optimizer_pb2.GetServerInfoRequest(), timeout=5)
        except grpc.RpcError:
            return False
    return True


def _binary() -> str:
    installed = pathlib.Path(sys.prefix) / "bin" / "superoffloadd"
    path = os.environ.get(_BINARY_ENVIRONMENT) or (
        str(installed) if installed.exists() else shutil.which("superoffloadd")
    )
    if path:
        return path
    raise Error(
        grpc.StatusCode.UNAVAILABLE,
        "no superoffloadd is running and none is installed; start one, pass endpoint=, or point "
        f"${_BINARY_ENVIRONMENT} at the binary",
    )


@functools.cache
def _private_daemon() -> str:
    directory = tempfile.mkdtemp(prefix="superoffloadd-")
    log_path = os.path.join(directory, "log")
    with open(log_path, "wb") as log:
        process = subprocess.Popen(
            [
                _binary(),
                f"--runtime_directory={directory}",
                "--metrics_address=127.0.0.1:0",
                "--exit_on_stdin_eof",  # it ends with this process, however that ends
            ],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,  # a terminal's ^C is for the trainer, which then stops its daemon
        )
    atexit.register(_stop, process, directory)
    endpoint = f"unix:{directory}/control.sock"
    deadline = time.monotonic() + _START_TIMEOUT_SECONDS
    while not (os.path.exists(endpoint.removeprefix("unix:")) and _answers(endpoint)):
        if process.poll() is not None or time.monotonic() > deadline:
            text = pathlib.Path(log_path).read_text(errors="replace").strip()
            raise Error(grpc.StatusCode.UNAVAILABLE, f"the private superoffloadd did not start: {text}")
        time.sleep(0.02)
    return endpoint


def _stop(process: subprocess.Popen, directory: str) -> None:
    process.stdin.close()
    try:
        process.wait(_STOP_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    shutil.rmtree(directory, ignore_errors=True)
