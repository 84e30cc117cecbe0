"""What a process has open."""

import contextlib
import os
import pathlib


def open_files(pid):
    """What each of its descriptors stands for, by the descriptor's path."""
    files = {}
    for fd in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            files[fd] = os.readlink(fd)
    return files
