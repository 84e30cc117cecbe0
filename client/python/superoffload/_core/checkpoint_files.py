"""Writes a checkpoint as the daemon does: for state that comes from elsewhere and is in no daemon yet.

The format is that of server/checkpoint/index.h, version 3. Its numbers are written as they come, so that no more than
a piece of a tensor is in memory.
"""

import contextlib
import dataclasses
import fcntl
import json
import math
import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import grpc

from superoffload._core.error import Error

_INDEX = "model.safetensors.index.json"
_INDEX_OF_RANKS = "run.index.json"
_VERSION = 3
_SHARD_BYTES = 4 << 30
_ELEMENT_BYTES = 4  # fp32
_HEADER_ALIGNMENT = 8


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One state array of one parameter, in fp32."""

    array: str  # "model" of the masters
    parameter: str
    shape: tuple[int, ...]
    read: Callable[[], Iterable[bytes]]  # its elements row by row, little-endian, in pieces

    @property
    def name(self) -> str:
        return f"{self.array}.{self.parameter}"

    @property
    def bytes(self) -> int:
        return _ELEMENT_BYTES * math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Contents:
    optimizer: str  # a name, for who reads the index
    algorithm: str  # the daemon's name
    committed_steps: int
    groups: Sequence[Mapping[str, float]]  # the daemon's hyper-parameters; what is missing is left as it was
    parameter_groups: Mapping[str, int]
    parameter_steps: Mapping[str, int]  # of parameters that had a gradient in fewer than all committed steps
    tensors: Sequence[Tensor]  # those of an array one after the other

    @property
    def bytes(self) -> int:
        return sum(tensor.bytes for tensor in self.tensors)


def is_one(directory: str | os.PathLike[str]) -> bool:
    """Whether it is a checkpoint of the daemon's, or of the daemons of several ranks."""
    return any(os.path.exists(os.path.join(directory, name)) for name in (_INDEX, _INDEX_OF_RANKS))


def write(directory: str, contents: Contents) -> None:
    """Makes ``directory``, an absolute path; one that has the name is whole.

    Raises Error: ALREADY_EXISTS; FAILED_PRECONDITION when somebody else is writing it; RESOURCE_EXHAUSTED when the disk
    has less room. Others: OSError of the file system. Nothing is left then.
    """
    with _partial(directory) as partial:
        free = shutil.disk_usage(partial).free
        if free < contents.bytes:
            raise Error(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{directory} takes {contents.bytes} bytes, but its disk has {free} left; choose another disk",
            )
        weight_map: dict[str, str] = {}
        sums: dict[str, int] = {}
        for file, tensors in _shards(contents.tensors):
            with _created(os.path.join(partial, file)) as write_bytes:
                sums[file] = _write_shard(write_bytes, tensors, contents)
            weight_map.update({tensor.name: file for tensor in tensors})
        with _created(os.path.join(partial, _INDEX)) as write_bytes:
            write_bytes(_index(contents, weight_map, sums))
        _sync(partial)
        if os.path.lexists(directory):
            raise _exists(directory)
        os.rename(partial, directory)
        _sync(os.path.dirname(directory))


def _exists(directory: str) -> Error:
    return Error(grpc.StatusCode.ALREADY_EXISTS, f"{directory} exists; remove it or choose another directory")


@contextlib.contextmanager
def _partial(directory: str) -> Iterator[str]:
    """A hidden directory beside ``directory``, named and locked as the daemon's are; removed after an error."""
    if os.path.lexists(directory):
        raise _exists(directory)
    parent, name = os.path.split(directory)
    path = os.path.join(parent, f".{name}.partial")
    with contextlib.suppress(FileExistsError):
        os.mkdir(path)
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Error(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"another checkpoint is being written to {directory}; choose another directory",
            ) from error
        for left in os.scandir(path):  # by who was killed
            os.unlink(left.path)
        try:
            yield path
        except BaseException:
            shutil.rmtree(path, ignore_errors=True)
            raise
    finally:
        os.close(lock)


@contextlib.contextmanager
def _created(path: str) -> Iterator[Callable[[bytes], Any]]:
    with open(path, "xb") as file:
        yield file.write
        file.flush()
        os.fsync(file.fileno())


def _sync(directory: str) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _shards(tensors: Sequence[Tensor]) -> Iterator[tuple[str, list[Tensor]]]:
    """Files, each with tensors of one array, as many as fit _SHARD_BYTES, at least one."""
    for array in dict.fromkeys(tensor.array for tensor in tensors):
        shards: list[list[Tensor]] = []
        filled = _SHARD_BYTES
        for tensor in tensors:
            if tensor.array != array:
                continue
            if filled + tensor.bytes > _SHARD_BYTES or not shards:
                shards.append([])
                filled = 0
            shards[-1].append(tensor)
            filled += tensor.bytes
        for number, shard in enumerate(shards, 1):
            yield f"{array}-{number:05d}-of-{len(shards):05d}.safetensors", shard


def _write_shard(write_bytes: Callable[[bytes], Any], tensors: Sequence[Tensor], contents: Contents) -> int:
    """Returns the CRC-32 of the file."""
    header: dict[str, Any] = {"__metadata__": _metadata(contents)}
    end = 0
    for tensor in tensors:
        begin, end = end, end + tensor.bytes
        header[tensor.name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": (begin, end)}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    head = len(text).to_bytes(8, "little") + text
    write_bytes(head)
    crc32 = zlib.crc32(head)
    for tensor in tensors:
        written = 0
        for piece in tensor.read():
            write_bytes(piece)
            crc32 = zlib.crc32(piece, crc32)
            written += len(piece)
        assert written == tensor.bytes, (tensor.name, written, tensor.bytes)
    return crc32


def _metadata(contents: Contents) -> dict[str, str]:
    return {
        "format": "pt",
        "optimizer": contents.optimizer,
        "step": str(contents.committed_steps),
        "committed_steps": str(contents.committed_steps),
        "algorithm": contents.algorithm,
        "hyperparameters": json.dumps(list(map(dict, contents.groups))),
    }


def _index(contents: Contents, weight_map: Mapping[str, str], sums: Mapping[str, int]) -> bytes:
    index = {
        "metadata": {
            "format": "superoffload",
            "version": _VERSION,
            "optimizer": contents.optimizer,
            "algorithm": contents.algorithm,
            "step": contents.committed_steps,
            "committed_steps": contents.committed_steps,
            "total_size": contents.bytes,
        },
        "groups": list(map(dict, contents.groups)),
        "parameter_groups": dict(contents.parameter_groups),
        "parameter_steps": dict(contents.parameter_steps),
        "crc32": dict(sums),
        "weight_map": dict(weight_map),
    }
    body = json.dumps(index, ensure_ascii=False, indent=1, allow_nan=False).encode().removesuffix(b"\n}")
    return body + b',\n "text_crc32": "%08x"\n}\n' % zlib.crc32(body)
