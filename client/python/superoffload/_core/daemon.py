"""Finding a daemon, or using a private one that lives as long as this process."""

import glob
import os
import socket
import struct
import warnings
from collections.abc import Callable

import grpc

from superoffload._core import patience, superchips
from superoffload._core.private_daemon import CONTROL_SOCKET, PrivateDaemon
from superoffload.v1 import optimizer_pb2, optimizer_pb2_grpc

_ENDPOINT_ENVIRONMENT = "SUPEROFFLOAD_ENDPOINT"
_ROOTS_DIRECTORY = "/run"  # directories there were given to their owners by root


def default_endpoints() -> list[str]:
    """Where a daemon listens by default, in the order of proto/superoffload/v1/runtime_directory.h."""
    directories = [
        os.path.join(os.environ["XDG_RUNTIME_DIR"], "superoffloadd") if os.environ.get("XDG_RUNTIME_DIR") else None,
        "/run/superoffloadd",
        f"/tmp/superoffloadd-{os.geteuid()}",
    ]
    return [f"unix:{directory}/{CONTROL_SOCKET}" for directory in directories if directory]


def resolve_endpoint(endpoint: str | None, gpu: Callable[[], str | None] = lambda: None) -> str:
    """The endpoint given, else $SUPEROFFLOAD_ENDPOINT, else a running daemon's, else a private daemon's.

    ``{local_rank}`` in what is given is this process's. Where a machine has a daemon for each of its Superchips, it is
    that of the process's own. ``gpu``: PCI address of the one that it trains on.
    """
    endpoint = endpoint or os.environ.get(_ENDPOINT_ENVIRONMENT)
    if endpoint:
        endpoint = superchips.fill(endpoint)
        return f"unix:{endpoint}" if endpoint.startswith("/") or ":" not in endpoint else endpoint
    for candidate in default_endpoints():
        answering = [endpoint for endpoint in [candidate, *_siblings(candidate)] if _is_ours(endpoint)]
        if len(answering) > 1:
            daemons = [(endpoint, superchips.topology(endpoint)) for endpoint in answering]
            return superchips.choose(daemons, gpu(), os.sched_getaffinity(0), os.environ)
        if answering:
            return answering[0]
    return _private_daemon()


def _siblings(endpoint: str) -> list[str]:
    """Of the other Superchips' daemons, whose directories have a number behind the name."""
    directory = os.path.dirname(endpoint.removeprefix("unix:"))
    found = glob.glob(f"{glob.escape(directory)}-[0-9]*/{CONTROL_SOCKET}")
    own = os.path.realpath(f"{directory}/{CONTROL_SOCKET}")
    return [f"unix:{path}" for path in sorted(found) if os.path.realpath(path) != own]


def _is_ours(endpoint: str) -> bool:
    """Whether a daemon answers there that this process may trust without having been told to."""
    path = endpoint.removeprefix("unix:")
    if not os.path.exists(path):
        return False
    if (stranger := _stranger(path)) is not None:
        warnings.warn(
            f"{path} is that of uid {stranger}, who is neither you nor root, and is not used; "
            f"if you trust it, name it in ${_ENDPOINT_ENVIRONMENT}",
            stacklevel=4,
        )
        return False
    return _answers(endpoint)


def _stranger(path: str) -> int | None:
    """Who, beside this user and root, could receive the trainer's weights at a socket that was not named."""
    trusted = (os.geteuid(), 0)
    directory = os.lstat(os.path.dirname(path))
    if directory.st_uid not in trusted and os.path.dirname(os.path.dirname(path)) != _ROOTS_DIRECTORY:
        return directory.st_uid
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        try:
            peer.connect(path)
        except OSError:
            return None  # nobody
        _, uid, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return None if uid in trusted else uid


def _answers(endpoint: str) -> bool:
    """Raises Error where one accepts connections and does not answer: it may have this process's optimizers."""
    seconds = patience.seconds(*patience.CONNECT)
    with patience.open_channel(endpoint) as channel:
        stub = optimizer_pb2_grpc.ServerServiceStub(channel)
        try:
            stub.GetServerInfo(optimizer_pb2.GetServerInfoRequest(), timeout=seconds)
        except grpc.RpcError as error:
            patience.check_answered(error, endpoint, seconds)
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


def uses_private() -> bool:
    """Whether this process has a private daemon."""
    return _private is not None


def is_private(endpoint: str) -> bool:
    """Whether a daemon ends with this process."""
    return _private is not None and _private.endpoint == endpoint


def death_of(endpoint: str) -> str | None:
    """How this process's private daemon ended; None for one that runs, and for those of others."""
    return _private.death() if _private is not None and _private.endpoint == endpoint else None
