"""Finding a daemon, or using a private one that lives as long as this process."""

import os
import socket
import struct
import warnings

import grpc

from superoffload._private_daemon import PrivateDaemon
from superoffload.v1 import optimizer_pb2, optimizer_pb2_grpc

_ENDPOINT_ENVIRONMENT = "SUPEROFFLOAD_ENDPOINT"


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
        path = candidate.removeprefix("unix:")
        if not os.path.exists(path):
            continue
        if (stranger := _stranger(path)) is not None:
            warnings.warn(
                f"{path} is that of uid {stranger}, who is neither you nor root, and is not used; "
                f"if you trust it, name it in ${_ENDPOINT_ENVIRONMENT}",
                stacklevel=3,
            )
        elif _answers(candidate):
            return candidate
    return _private_daemon()


def _stranger(path: str) -> int | None:
    """Who, beside this user and root, could receive the trainer's weights at a socket that was not named."""
    trusted = (os.geteuid(), 0)
    directory = os.lstat(os.path.dirname(path))
    if directory.st_uid not in trusted:
        return directory.st_uid
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        try:
            peer.connect(path)
        except OSError:
            return None  # nobody
        _, uid, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return None if uid in trusted else uid


def _answers(endpoint: str) -> bool:
    with grpc.insecure_channel(endpoint) as channel:
        stub = optimizer_pb2_grpc.ServerServiceStub(channel)
        try:
            stub.GetServerInfo(optimizer_pb2.GetServerInfoRequest(), timeout=5)
        except grpc.RpcError:
            return False
    return True


_private: PrivateDaemon | None = None


def _private_daemon() -> str:
    global _private
    if _private is not None and not _private.usable:
        _private.leave()
        _private = None
    if _private is None:
        _private = PrivateDaemon(_answers)
    return _private.endpoint


def is_private(endpoint: str) -> bool:
    """Whether a daemon ends with this process."""
    return _private is not None and _private.endpoint == endpoint


def death_of(endpoint: str) -> str | None:
    """How this process's private daemon ended; None for one that runs, and for those of others."""
    return _private.death() if _private is not None and _private.endpoint == endpoint else None
