"""deploy/quickstart.sh in a tree of its own, in which nothing was built before."""

import os
import pathlib
import shutil
import subprocess

from tests.support import virtual_environment

ROOT = pathlib.Path(__file__).parents[2]


def tree(scratch: pathlib.Path) -> pathlib.Path:
    """A copy of ours with nothing in build/ but the environment of the quick start, which is not downloaded."""
    copy = scratch / "tree"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns("build", ".*", "__pycache__", "shared"))
    virtual_environment.make(copy / "build/quickstart")
    return copy


def run(tree: pathlib.Path, *words: str, path: str = "") -> subprocess.CompletedProcess[str]:
    """`path`: folders whose programs go before those of the machine."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("SUPEROFFLOAD", "LD_"))}
    environment = ours | {"PATH": f"{path}:{os.environ['PATH']}"} if path else ours
    return subprocess.run([tree / "deploy/quickstart.sh", *words], capture_output=True, text=True, env=environment)
