"""Reads pickles of which nothing is imported or called but what containers and numbers are made of.

A pickle can name any function and have it called. Files of DeepSpeed name classes of DeepSpeed, argparse and others,
which need not be installed here and would mean nothing. Each of them becomes an `Inert` object.
"""

import collections
import io
import pickle
import pickletools
import struct
from collections.abc import Callable, Mapping
from typing import Any

# Of numpy.dtype, and of struct. Bytes are little-endian.
_NUMPY = {"f8": "d", "f4": "f", "f2": "e", "i8": "q", "i4": "i", "u8": "Q", "u4": "I", "b1": "?"}
_BUILTINS = ("builtins", "__builtin__")  # as protocol 2 calls it
_CONTAINERS = (dict, list, tuple, set, frozenset)
_NUMPY_SCALARS = ("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar")


class Inert:
    """Stands for an object whose class is not imported. ``arguments``: what it would have been made of."""

    named = ""  # the class, as MODULE.NAME
    arguments: tuple[Any, ...]

    def __new__(cls, *arguments: Any, **_: Any) -> "Inert":
        made = super().__new__(cls)
        made.arguments = arguments
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    # What a pickle fills objects with is dropped.
    def __setstate__(self, _: Any) -> None:
        pass

    def __setitem__(self, _: Any, __: Any) -> None:
        pass

    def append(self, _: Any) -> None:
        pass

    extend = add = append


class Unpickler(pickle.Unpickler):
    """``functions``: what is called in place of functions and classes, by MODULE.NAME; bound methods, which a pickle
    cannot change. ``values``: what stands in place of others. ``persistent``: what a persistent ID stands for.
    """

    def __init__(
        self,
        data: bytes,
        functions: Mapping[str, Callable[..., Any]],
        values: Mapping[str, Any],
        persistent: Callable[[Any], Any],
    ) -> None:
        super().__init__(io.BytesIO(data))
        _check_memo(data)
        self._persistent = persistent
        self._found: dict[str, Any] = {
            "collections.OrderedDict": collections.OrderedDict,
            "collections.defaultdict": self._dict,
            **{f"{module}.{kind.__name__}": kind for module in _BUILTINS for kind in _CONTAINERS},
            "_codecs.encode": self._encode,
            **dict.fromkeys(_NUMPY_SCALARS, self._scalar),
            **values,
            **functions,
        }

    def find_class(self, module: str, name: str) -> Any:
        named = f"{module}.{name}"
        if named not in self._found:
            self._found[named] = type("Inert", (Inert,), {"named": named})
        return self._found[named]

    def persistent_load(self, pid: Any) -> Any:
        return self._persistent(pid)

    def _dict(self, *_: Any) -> dict[Any, Any]:
        return {}

    def _encode(self, text: str, encoding: str) -> bytes:
        """Bytes, as protocol 2 has them."""
        if encoding != "latin1":
            raise pickle.UnpicklingError(f"bytes are encoded as {encoding!r}")
        return text.encode("latin1")

    def _scalar(self, dtype: Inert, data: bytes) -> Any:
        code = _NUMPY.get(dtype.arguments[0])
        return Inert() if code is None else struct.unpack(f"<{code}", data)[0]


def _check_memo(data: bytes) -> None:
    """A pickle may number what it refers to later as it likes, and memory is taken up to the highest number."""
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and (argument or 0) > len(data):
            raise pickle.UnpicklingError("it numbers more objects than it has")
