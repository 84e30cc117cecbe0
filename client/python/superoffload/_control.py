"""The control plane: one gRPC channel and one descriptor connection to a daemon."""

import ctypes
from typing import Any

import grpc

from superoffload import _library
from superoffload._error import from_rpc
from superoffload.v1 import optimizer_pb2, optimizer_pb2_grpc

_TOKEN_KEY = "superoffload-token"

# Plans of hundreds of thousands of parameters exceed gRPC's default of 4 MiB.
_CHANNEL_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


class Connection:
    """Authenticated calls of OptimizerService. Not thread-safe."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self._channel = grpc.insecure_channel(endpoint, options=_CHANNEL_OPTIONS)
        try:
            self.server_info = optimizer_pb2_grpc.ServerServiceStub(self._channel).GetServerInfo(
                optimizer_pb2.GetServerInfoRequest(), timeout=30
            )
        except grpc.RpcError as error:
            raise from_rpc(error) from None
        self._stub = optimizer_pb2_grpc.OptimizerServiceStub(self._channel)
        self.handle = ctypes.c_void_p()
        _library.call("connect", self.server_info.descriptor_socket.encode(), ctypes.byref(self.handle))
        self._metadata = [(_TOKEN_KEY, _library.function("token")(self.handle).decode())]

    def call(self, method: str, request: Any, timeout_seconds: float | None = None) -> Any:
        """One unary call; raises Error."""
        try:
            return getattr(self._stub, method)(request, metadata=self._metadata, timeout=timeout_seconds)
        except grpc.RpcError as error:
            raise from_rpc(error) from None

    def attach(
        self, request: optimizer_pb2.AttachOptimizerRequest
    ) -> tuple[Any, optimizer_pb2.AttachOptimizerResponse]:
        """Opens the stream that is the attachment's life; returns it with its first message."""
        stream = self._stub.AttachOptimizer(request, metadata=self._metadata)
        try:
            return stream, next(stream)
        except grpc.RpcError as error:
            raise from_rpc(error) from None

    def close(self) -> None:
        """Ends every attachment made through this connection."""
        if self.handle:
            _library.function("disconnect")(self.handle)
            self.handle = None
            self._channel.close()
