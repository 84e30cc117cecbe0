"""What this process and a daemon share: one gRPC channel and one descriptor connection for all optimizers.

A daemon limits the connections of each user, and ends every attachment of a connection together with it. So a session
is shared by all that talk to the same daemon, and ends with the last of them.
"""

import ctypes
import os
import threading

import grpc

from superoffload._core import library, owner, patience
from superoffload._core.error import from_rpc
from superoffload.v1 import optimizer_pb2, optimizer_pb2_grpc

_TOKEN_KEY = "superoffload-token"

_current: dict[str, "Session"] = {}  # by endpoint
# Re-entrant: the garbage collector may end an optimizer inside of a block that holds it. Nobody waits inside of one.
_lock = threading.RLock()


class Session:
    """Thread-safe. Attributes do not change."""

    def __init__(self, endpoint: str, timeout_seconds: float) -> None:
        """Raises Error: UNAVAILABLE when nobody listens, DEADLINE_EXCEEDED when who listens does not answer."""
        self.endpoint = endpoint
        self._users: set[object] = set()
        self._over = False
        self._pid = os.getpid()
        channel = patience.open_channel(endpoint)
        handle, token = ctypes.c_void_p(), ctypes.create_string_buffer(65)
        try:
            self.server_info = optimizer_pb2_grpc.ServerServiceStub(channel).GetServerInfo(
                optimizer_pb2.GetServerInfoRequest(), timeout=timeout_seconds
            )
            library.call("connect", self.server_info.descriptor_socket.encode(), ctypes.byref(handle), token)
        except grpc.RpcError as error:
            channel.close()
            patience.check_answered(error, endpoint, timeout_seconds)
            raise from_rpc(error) from None
        except BaseException:
            channel.close()
            raise
        self._channel: grpc.Channel = channel
        self.handle = handle
        self.stub = optimizer_pb2_grpc.OptimizerServiceStub(channel)
        self.metadata = ((_TOKEN_KEY, token.value.decode()),)
        owner.own(self)

    def _answers(self, timeout_seconds: float) -> bool:
        """Whether the daemon that it was opened with is still there. Raises Error when that does not answer."""
        try:
            request = optimizer_pb2.ListOptimizersRequest(page_size=1)
            self.stub.ListOptimizers(request, metadata=self.metadata, timeout=timeout_seconds)
        except grpc.RpcError as error:
            patience.check_answered(error, self.endpoint, timeout_seconds)
            return error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED  # too many calls at once
        return True

    def _join(self, user: object) -> bool:
        """False when it is over. Somebody holds the lock."""
        self._users.add(user)  # first: from here on nobody ends it
        return not self._over

    def leave(self, user: object) -> None:
        """Ends the session, and every attachment made through it, with its last user."""
        if os.getpid() != self._pid:
            return
        with _lock:
            self._users.discard(user)
            if self._users or self._over:
                return
            self._over = True
            if _current.get(self.endpoint) is self:
                del _current[self.endpoint]
        library.function("disconnect")(self.handle)
        self._channel.close()

    def disown(self) -> None:
        """In a forked child: the session stays the parent's."""
        global _lock
        _lock = threading.RLock()  # a thread of the parent may have held it
        _current.pop(self.endpoint, None)


def join(endpoint: str, user: object, timeout_seconds: float, dead: Session | None = None) -> Session:
    """The session with the daemon at an endpoint, of which ``user`` is a user until it leaves; raises Error.

    ``dead``: one that no longer answers.
    """
    with _lock:
        present = _current.get(endpoint)
        joined = present is not None and present is not dead and present._join(user)
    if joined:
        assert present is not None
        try:
            if present._answers(timeout_seconds):
                return present
        except BaseException:
            present.leave(user)
            raise
        present.leave(user)
        dead = present
    opened = Session(endpoint, timeout_seconds)
    with _lock:
        present = _current.get(endpoint)
        faster = present is not None and present is not dead and present._join(user)
        if not faster:
            _current[endpoint] = opened
            opened._join(user)
    if not faster:
        return opened
    assert present is not None
    opened.leave(user)  # of which it was none: ends it
    return present
