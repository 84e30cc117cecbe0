"""The control plane: what one optimizer says to a daemon, in a session that all of the process share."""

import ctypes
import os
import time
from collections.abc import Callable
from typing import Any

import grpc

from superoffload._core import patience, session
from superoffload._core.daemon import death_of
from superoffload._core.error import Error, from_rpc
from superoffload._core.paging import pages
from superoffload.v1 import optimizer_pb2

# What calls of a daemon that died meet: nobody, or a successor that does not know their token.
GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAUTHENTICATED)

_RETRY_SECONDS = 0.02


class Connection:
    """Authenticated calls of OptimizerService. Not thread-safe."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self._streams: list[Any] = []  # of attachments that this has made
        self._session = self._first_session(patience.seconds(*patience.CONNECT))

    def _first_session(self, timeout_seconds: float) -> session.Session:
        """A daemon that has just died leaves its socket to its successor."""
        deadline = time.monotonic() + patience.seconds(*patience.SOCKET)
        while True:
            try:
                return session.join(self.endpoint, self, timeout_seconds)
            except Error as error:
                if error.code != grpc.StatusCode.UNAVAILABLE or not self.alive() or time.monotonic() > deadline:
                    raise
            time.sleep(_RETRY_SECONDS)

    @property
    def server_info(self) -> optimizer_pb2.ServerInfo:
        """What the daemon is."""
        return self._session.server_info

    @property
    def handle(self) -> ctypes.c_void_p:
        """The library's: attachments are made with it."""
        return self._session.handle

    def wait_reopened(self) -> None:
        """Connects anew to a daemon that died, once its successor listens; raises Error when none does.

        That takes $SUPEROFFLOAD_RECONNECT_SECONDS at most (300: the recovery of large optimizers takes its time). A
        daemon that was stopped on purpose takes its socket away; without one, the client waits for
        $SUPEROFFLOAD_SOCKET_SECONDS (10).
        """
        socket_seconds = patience.seconds(*patience.SOCKET)
        deadline = time.monotonic() + patience.seconds(*patience.RECONNECT)
        socket_deadline = time.monotonic() + socket_seconds
        while True:
            if (death := death_of(self.endpoint)) is not None:
                raise Error(
                    grpc.StatusCode.UNAVAILABLE,
                    f"the private superoffloadd of this process is dead, and its optimizers with it: {death}; close() "
                    "this optimizer and build another, which starts another daemon, from a checkpoint or a state_dict",
                )
            try:
                last, seconds = self._session, max(1, deadline - time.monotonic())
                self._session = session.join(self.endpoint, self, seconds, dead=last)
                self._leave(last)
                return
            except Error as error:
                now = time.monotonic()
                if self.alive():
                    socket_deadline = now + socket_seconds
                if error.code != grpc.StatusCode.UNAVAILABLE:
                    raise
                if now > min(deadline, socket_deadline):
                    raise self._stopped(error) from None
            time.sleep(_RETRY_SECONDS)

    def _stopped(self, error: Error) -> Error:
        return Error(
            grpc.StatusCode.UNAVAILABLE,
            f"superoffloadd at {self.endpoint} has stopped, and no other has come ({error.message}); start it again, "
            "and then this trainer, which finds its optimizer by name where the daemon or its keeper has kept it",
        )

    def call(self, method: str, request: Any, timeout_seconds: float | None = None) -> Any:
        """One call with one answer; raises Error."""
        sent = pages(request) if method == "CreateOptimizer" else request
        try:
            return getattr(self._session.stub, method)(sent, metadata=self._session.metadata, timeout=timeout_seconds)
        except grpc.RpcError as error:
            raise from_rpc(error) from None

    def call_again(self, method: str, request: Any) -> Any:
        """A call that needs no attachment, again on the successor of a daemon that died."""
        return self.again(lambda: self.call(method, request))

    def again(self, call: Callable[[], Any]) -> Any:
        """Makes the call, and makes it again with the successor of a daemon that died.

        Also once the daemon has made an optimizer of the name for somebody else: a trainer that was killed meanwhile.
        """
        while True:
            try:
                return call()
            except Error as error:
                if error.code == grpc.StatusCode.ABORTED:
                    time.sleep(_RETRY_SECONDS)
                    continue
                if error.code not in GONE:
                    raise
            self.wait_reopened()

    def get_whole(self, name: str) -> optimizer_pb2.Optimizer:
        """An optimizer with its parameters: waits while other trainers of the user are given theirs; raises Error."""
        return self.again(lambda: self.get_pages(name))

    def get_pages(self, name: str) -> optimizer_pb2.Optimizer:
        """The same from the daemon of now; raises Error when it dies."""
        whole = optimizer_pb2.Optimizer()
        request = optimizer_pb2.GetOptimizerRequest(name=name, view=optimizer_pb2.OPTIMIZER_VIEW_FULL)
        deadline = time.monotonic() + patience.seconds(*patience.RECONNECT)
        while True:
            try:
                page = self.call("GetOptimizer", request)
            except Error as error:
                if error.code != grpc.StatusCode.RESOURCE_EXHAUSTED or time.monotonic() > deadline:
                    raise
                time.sleep(_RETRY_SECONDS)
                continue
            request.page_token = page.next_page_token
            page.ClearField("next_page_token")
            whole.MergeFrom(page)
            if not request.page_token:
                return whole

    def stream(self, method: str, request: Any) -> Any:
        """A call that answers with a stream; returns its last message; raises Error."""
        try:
            return list(getattr(self._session.stub, method)(request, metadata=self._session.metadata))[-1]
        except grpc.RpcError as error:
            raise from_rpc(error) from None

    def attach(
        self, request: optimizer_pb2.AttachOptimizerRequest
    ) -> tuple[Any, optimizer_pb2.AttachOptimizerResponse]:
        """Opens the stream that is the attachment's life; returns it with its message, the whole optimizer in it."""
        stream = self._session.stub.AttachOptimizer(pages(request), metadata=self._session.metadata)
        self._streams = [open for open in self._streams if open.is_active()] + [stream]
        try:
            response = next(stream)
            response.optimizer.CopyFrom(self.get_pages(request.name))
        except grpc.RpcError as error:
            raise from_rpc(error) from None
        except Error:
            stream.cancel()
            raise
        return stream, response

    def alive(self) -> bool:
        """Whether a daemon may still come back: its socket is there."""
        return os.path.exists(self.endpoint.removeprefix("unix:"))

    def close(self) -> None:
        """Ends every attachment made through this connection."""
        self._leave(self._session)

    def _leave(self, last: session.Session) -> None:
        """Others of the process may go on with a session: attachments made through it end one by one."""
        for stream in self._streams:
            stream.cancel()
        self._streams.clear()
        last.leave(self)
