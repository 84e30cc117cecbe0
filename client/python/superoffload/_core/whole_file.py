"""Files that have their old content or their new one, whenever the process ends."""

import os
import pathlib
from collections.abc import Callable
from typing import Any, BinaryIO


def replace(path: pathlib.Path, write: Callable[[BinaryIO], Any]) -> None:
    """``write``: writes the new content. Raises OSError."""
    beside = path.with_name(f".{path.name}")
    with beside.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
