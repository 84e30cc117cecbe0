"""The control plane: one gRPC channel and one descriptor connection to a daemon."""

import ctypes
import os
import time
from collections.abc import Callable
from typing import Any

import grpc

from superoffload._core import library, patience
from superoffload._core.daemon import death_of
from superoffload._core.error import Error, from_rpc
from superoffload._core.paging import pages
from superoffload.v1 import optimizer_pb2, optimizer_pb2_grpc

# What calls of a daemon that died meet: nobody, or a successor that does not know their token.
GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAUTHENTICATED)

_TOKEN_KEY = "superoffload-token"
_RETRY_SECONDS = 0.02


class Connection:
    """Authenticated calls of OptimizerService. Not thread-safe."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self._old_handles: list[ctypes.c_void_p | None] = []
        self._open_first(patience.seconds(*patience.CONNECT))

    def _open_first(self, timeout_seconds: float) -> None:
        """A daemon that has just died leaves its socket to its successor."""
        deadline = time.monotonic() + patience.seconds(*patience.SOCKET)
        while True:
            try:
                return self._open(timeout_seconds)
            except Error as error:
                if error.code != grpc.StatusCode.UNAVAILABLE or not self.alive() or time.monotonic() > deadline:
                    raise
            time.sleep(_RETRY_SECONDS)

    def _open(self, timeout_seconds: float) -> None:
        channel = patience.open_channel(self.endpoint)
        handle = ctypes.c_void_p()
        try:
            self.server_info = optimizer_pb2_grpc.ServerServiceStub(channel).GetServerInfo(
                optimizer_pb2.GetServerInfoRequest(), timeout=timeout_seconds
            )
            library.call("connect", self.server_info.descriptor_socket.encode(), ctypes.byref(handle))
        except grpc.RpcError as error:
            channel.close()
            if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                raise patience.no_answer(self.endpoint, timeout_seconds) from None
            raise from_rpc(error) from None
        except Error:
            channel.close()
            raise
        self._channel: grpc.Channel = channel
        self.handle: ctypes.c_void_p | None = handle
        self._stub = optimizer_pb2_grpc.OptimizerServiceStub(channel)
        self._metadata = ((_TOKEN_KEY, library.function("token")(handle).decode()),)

    def wait_reopened(self) -> None:
        """Connects anew to a daemon that died, once its successor listens; raises Error when none does.

        That takes $SUPEROFFLOAD_RECONNECT_SECONDS at most (300: the recovery of large optimizers takes its time). A
        daemon that was stopped on purpose takes its socket away; without one, the client waits for
        $SUPEROFFLOAD_SOCKET_SECONDS (10).
        """
        socket_seconds = patience.seconds(*patience.SOCKET)
        deadline = time.monotonic() + patience.seconds(*patience.RECONNECT)
        socket_deadline = time.monotonic() + socket_seconds
        old_channel, old_handle = self._channel, self.handle
        while True:
            if (death := death_of(self.endpoint)) is not None:
                raise Error(
                    grpc.StatusCode.UNAVAILABLE,
                    f"the private superoffloadd of this process is dead, and its optimizers with it: {death}; close() "
                    "this optimizer and build another, which starts another daemon, from a checkpoint or a state_dict",
                )
            try:
                self._open(max(1, deadline - time.monotonic()))
                old_channel.close()
                self._old_handles.append(old_handle)  # attachments that were made through it still have their mappings
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
            return getattr(self._stub, method)(sent, metadata=self._metadata, timeout=timeout_seconds)
        except grpc.RpcError as error:
            raise from_rpc(error) from None

    def call_again(self, method: str, request: Any) -> Any:
        """A call that needs no attachment, again on the successor of a daemon that died."""
        return self.again(lambda: self.call(method, request))

    def again(self, call: Callable[[], Any]) -> Any:
        """Makes the call, and makes it again with the successor of a daemon that died."""
        while True:
            try:
                return call()
            except Error as error:
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
            return list(getattr(self._stub, method)(request, metadata=self._metadata))[-1]
        except grpc.RpcError as error:
            raise from_rpc(error) from None

    def attach(
        self, request: optimizer_pb2.AttachOptimizerRequest
    ) -> tuple[Any, optimizer_pb2.AttachOptimizerResponse]:
        """Opens the stream that is the attachment's life; returns it with its message, the whole optimizer in it."""
        stream = self._stub.AttachOptimizer(pages(request), metadata=self._metadata)
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
        if self.handle:
            for handle in [*self._old_handles, self.handle]:
                library.function("disconnect")(handle)
            self.handle = None
            self._channel.close()
