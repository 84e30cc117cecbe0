"""Reads the files of torch.save: where each tensor lies, and later its numbers, in pieces, without torch.

A file is a ZIP archive whose members are not compressed:

    ARCHIVE/data.pkl      a pickle; a storage is a persistent ID ("storage", class, KEY, device, elements)
    ARCHIVE/data/KEY      the bytes of a storage
    ARCHIVE/byteorder     "little"; files of older versions lack it

So a file of any size takes the memory of its pickle, and a rank's moments are read a few MiB at a time. The pickle
calls nothing that it names, see inert_pickle.py.
"""

import array
import math
import os
import struct
import zipfile
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, NamedTuple

import grpc

from superoffload._core.error import Error
from superoffload.import_checkpoint.inert_pickle import Inert, Unpickler

_READ_BYTES = 4 << 20
_LOCAL_HEADER_BYTES = 30  # of a ZIP member, before its name

_BYTES = {
    **{"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2},
    **{"int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1},
}
_STORAGES = {
    **{"Double": "float64", "Float": "float32", "Half": "float16", "BFloat16": "bfloat16"},
    **{"Long": "int64", "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool"},
    "Untyped": "uint8",
}
_VALUES = {
    **{f"torch.{name}Storage": dtype for name, dtype in _STORAGES.items()},
    "torch.storage.UntypedStorage": "uint8",
    **{f"torch.{dtype}": dtype for dtype in _BYTES},
}
_NUMBERS = {"float64": "d", "float32": "f", "float16": "e", "int64": "q", "int32": "i"}  # as struct calls them


class StoredTensor(NamedTuple):
    """Where a tensor lies in a file."""

    path: str
    dtype: str  # a key of _BYTES
    shape: tuple[int, ...]
    offset: int  # of its first byte in the file
    contiguous: bool  # row by row, without gaps

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def floats(self, first: int, count: int) -> Iterator[bytes]:
        """Elements [first, first + count) in fp32, in the machine's byte order; exact, whatever the dtype was.

        The tensor must be contiguous and in fp32, bf16 or fp16. Raises Error: DATA_LOSS when the file is shorter now.
        """
        size = _BYTES[self.dtype]
        per_read = _READ_BYTES // size
        try:
            with open(self.path, "rb") as file:
                file.seek(self.offset + first * size)
                for done in range(0, count, per_read):
                    wanted = min(per_read, count - done) * size
                    data = file.read(wanted)
                    if len(data) != wanted:
                        raise _damaged(self.path, "it has become shorter")
                    yield _widened(data, self.dtype)
        except OSError as error:
            raise _unreadable(self.path, error) from error

    def number(self) -> float | int | None:
        """That of its one element; None where it has several, or none in a dtype of numbers."""
        if self.elements != 1 or self.dtype not in _NUMBERS:
            return None
        try:
            with open(self.path, "rb") as file:
                file.seek(self.offset)
                value: float | int = struct.unpack(f"<{_NUMBERS[self.dtype]}", file.read(_BYTES[self.dtype]))[0]
                return value
        except OSError as error:
            raise _unreadable(self.path, error) from error


class _Storage(NamedTuple):
    dtype: str
    offset: int
    bytes: int


def load(path: str) -> Any:
    """What was saved; tensors are `StoredTensor`, and objects of other classes `Inert`.

    Raises Error: DATA_LOSS when the file is damaged or none of torch.save; NOT_FOUND, or PERMISSION_DENIED, when it
    cannot be opened.
    """
    try:
        with open(path, "rb") as file:
            return _Reader(path, file).load()
    except OSError as error:
        raise _unreadable(path, error) from error


class _Reader:
    def __init__(self, path: str, file: BinaryIO) -> None:
        self._path = path
        self._file = file
        self._file_bytes = os.fstat(file.fileno()).st_size

    def load(self) -> Any:
        try:
            self._members = {member.filename: member for member in zipfile.ZipFile(self._file).infolist()}
        except Exception as error:  # zipfile raises half a dozen kinds for what is no archive
            raise _damaged(self._path, "it is no ZIP archive, as torch.save writes since PyTorch 1.6") from error
        pickles = [name for name in self._members if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise _damaged(self._path, f"it has {len(pickles)} members data.pkl and must have one")
        self._archive = pickles[0].removesuffix("data.pkl")
        order = f"{self._archive}byteorder"
        if order in self._members and self._bytes(order) != b"little":
            raise Error(
                grpc.StatusCode.UNIMPLEMENTED,
                f"{self._path} was written on a big-endian machine; load and save it with torch on a little-endian one",
            )
        functions: dict[str, Callable[..., Any]] = {
            "torch.Size": self._size,
            "torch._utils._rebuild_tensor": self._tensor,
            "torch._utils._rebuild_tensor_v2": self._tensor,
            "torch._utils._rebuild_tensor_v3": self._typed_tensor,
            "torch._utils._rebuild_parameter": self._parameter,
            "torch._utils._rebuild_parameter_with_state": self._parameter,
            "torch._tensor._rebuild_from_type_v2": self._of_subclass,
        }
        try:
            return Unpickler(self._bytes(pickles[0]), functions, _VALUES, self._storage).load()
        except Error:
            raise
        except Exception as error:  # whatever a damaged pickle makes of these calls
            raise _damaged(self._path, "its pickle does not say what tensors it has") from error

    def _place(self, name: str) -> tuple[int, int]:
        """Offset and bytes of a member."""
        member = self._members.get(name)
        if member is None:
            raise _damaged(self._path, f"it lacks {name}")
        at = member.header_offset
        self._file.seek(at if 0 <= at < self._file_bytes else self._file_bytes)
        header = self._file.read(_LOCAL_HEADER_BYTES)
        if header[:4] != b"PK\3\4" or len(header) < _LOCAL_HEADER_BYTES or member.compress_type != zipfile.ZIP_STORED:
            raise _damaged(self._path, f"{name} is not where the archive says, or is compressed")
        name_bytes, extra_bytes = struct.unpack_from("<HH", header, 26)
        offset = at + _LOCAL_HEADER_BYTES + name_bytes + extra_bytes
        if offset + member.file_size > self._file_bytes:
            raise _damaged(self._path, f"it ends before {name} does")
        return offset, member.file_size

    def _bytes(self, name: str) -> bytes:
        offset, size = self._place(name)
        self._file.seek(offset)
        return self._file.read(size)

    def _storage(self, pid: Any) -> Any:
        kind, dtype, key, _, _ = pid
        if kind != "storage" or not isinstance(key, str):
            raise ValueError(f"a persistent ID is of {kind!r}")
        if not isinstance(dtype, str):
            return Inert()  # of quantized or complex numbers
        return _Storage(dtype, *self._place(f"{self._archive}data/{key}"))

    def _size(self, extents: Any = ()) -> tuple[int, ...]:
        return tuple(extents)

    def _tensor(self, storage: Any, first: int, shape: Any, strides: Any, *_: Any) -> Any:
        return self._typed_tensor(storage, first, shape, strides, None, None, getattr(storage, "dtype", None))

    def _typed_tensor(
        self, storage: Any, first: int, shape: Any, strides: Any, _: Any, __: Any, dtype: Any, *___: Any
    ) -> Any:
        if not isinstance(storage, _Storage) or not isinstance(dtype, str):
            return Inert()
        shape, strides, size = tuple(shape), tuple(strides), _BYTES[dtype]
        extents = (first, *shape, *strides)
        if len(shape) != len(strides) or not all(type(n) is int and n >= 0 for n in extents):
            raise _damaged(self._path, "a tensor has a shape or strides that are no numbers")
        last = first + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        if math.prod(shape) > 0 and (last + 1) * size > storage.bytes:
            raise _damaged(self._path, f"a tensor of shape {list(shape)} does not lie in its {storage.bytes} bytes")
        dense, contiguous = 1, True
        for n, stride in zip(reversed(shape), reversed(strides), strict=True):
            contiguous = contiguous and (n == 1 or stride == dense)
            dense *= n
        return StoredTensor(self._path, dtype, shape, storage.offset + first * size, contiguous or dense == 0)

    def _parameter(self, tensor: Any, *_: Any) -> Any:
        return tensor

    def _of_subclass(self, function: Any, _: Any, arguments: Any, __: Any) -> Any:
        ours = (self._tensor, self._typed_tensor, self._parameter)
        return function(*arguments) if function in ours else Inert()


def _widened(data: bytes, dtype: str) -> bytes:
    """In fp32."""
    if dtype == "float32":
        return data
    if dtype == "bfloat16":  # the upper half
        wide = bytearray(2 * len(data))
        wide[2::4], wide[3::4] = data[0::2], data[1::2]
        return bytes(wide)
    return array.array("f", struct.unpack(f"<{len(data) // 2}e", data)).tobytes()


def _damaged(path: str, why: str) -> Error:
    return Error(
        grpc.StatusCode.DATA_LOSS, f"{path} cannot be read: {why}; copy it once more, or take an earlier checkpoint"
    )


def _unreadable(path: str, error: OSError) -> Error:
    codes = {
        FileNotFoundError: grpc.StatusCode.NOT_FOUND,
        PermissionError: grpc.StatusCode.PERMISSION_DENIED,
    }
    code = codes.get(type(error), grpc.StatusCode.UNAVAILABLE)
    return Error(code, f"cannot read {path}: {error.strerror}; name a checkpoint that this user can read")
