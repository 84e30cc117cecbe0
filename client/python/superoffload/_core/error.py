"""The one exception of this package."""

import grpc


class Error(RuntimeError):
    """A call that the daemon, the client library or the adapter refused.

    ``code`` is the canonical status code; the text says what to do.
    """

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(f"{message} [{code.name}]")
        self.code = code
        self.message = message


def from_rpc(error: grpc.RpcError) -> Error:
    return Error(error.code(), error.details() or "the call failed")


def from_number(code: int, message: str) -> Error:
    for status in grpc.StatusCode:
        if status.value[0] == code:
            return Error(status, message)
    return Error(grpc.StatusCode.UNKNOWN, f"{message} (code {code})")
