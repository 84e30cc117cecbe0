"""How long a client waits for a daemon, as the environment wants it."""

import os

import grpc

from superoffload._core import owner
from superoffload._core.error import Error

CONNECT = ("SUPEROFFLOAD_CONNECT_SECONDS", 30)
SOCKET = ("SUPEROFFLOAD_SOCKET_SECONDS", 10)
RECONNECT = ("SUPEROFFLOAD_RECONNECT_SECONDS", 300)

_LONGEST_SECONDS = 86400


def seconds(variable: str, default: float) -> float:
    text = os.environ.get(variable) or str(default)
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found <= _LONGEST_SECONDS:
        raise ValueError(f"${variable} is {text!r}, but must be seconds, 0 to {_LONGEST_SECONDS}")
    return found


def check_answered(error: grpc.RpcError, endpoint: str, waited_seconds: float) -> None:
    """Raises Error where a daemon accepts connections and says nothing."""
    if error.code() != grpc.StatusCode.DEADLINE_EXCEEDED:
        return
    raise Error(
        grpc.StatusCode.DEADLINE_EXCEEDED,
        f"the superoffloadd at {endpoint} did not answer for {waited_seconds:g} seconds: it is stopped, or the machine "
        f"is overloaded; continue it or end it, wait longer with ${CONNECT[0]}, or name another in "
        "$SUPEROFFLOAD_ENDPOINT",
    ) from None


def open_channel(endpoint: str) -> grpc.Channel:
    """A connection of its own, tried at once.

    gRPC gives up a connection that stays silent for 20 seconds, whatever a call's time is. It shares connections among
    channels, and lets all of them wait for a second or more once an attempt has failed.
    """
    owner.check_may_talk()
    milliseconds = max(1, int(1000 * seconds(*CONNECT)))
    options = [("grpc.min_reconnect_backoff_ms", milliseconds), ("grpc.use_local_subchannel_pool", 1)]
    return grpc.insecure_channel(endpoint, options=options)
