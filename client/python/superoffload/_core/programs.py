"""Where the programs and the library are: in this package, if its wheel holds them, else on the machine."""

import os
import pathlib
import shutil
import sys

DAEMON_ENVIRONMENT = "SUPEROFFLOAD_DAEMON"
_PACKAGE = pathlib.Path(__file__).parents[1]


def installed(folder: str, name: str) -> str | None:
    """The path of a file in ``bin`` or ``lib`` of this package, else of the environment; None when neither has it."""
    for root in (_PACKAGE, pathlib.Path(sys.prefix)):
        path = root / folder / name
        if path.exists():
            return str(path)
    return None


def daemon() -> str | None:
    """The path of superoffloadd: $SUPEROFFLOAD_DAEMON, else the installed one; None when there is none."""
    return os.environ.get(DAEMON_ENVIRONMENT) or installed("bin", "superoffloadd") or shutil.which("superoffloadd")


def planner() -> str | None:
    """The path of superoffload-plan, which lies beside superoffloadd; None when there is no daemon."""
    found = daemon()
    return found and str(pathlib.Path(found).with_name("superoffload-plan"))


def _run(name: str) -> None:
    path = str(_PACKAGE / "bin" / name)
    os.execv(path, [path, *sys.argv[1:]])


def superoffloadd() -> None:
    """The console script."""
    _run("superoffloadd")


def superoffloadctl() -> None:
    """The console script."""
    _run("superoffloadctl")


def superoffload_plan() -> None:
    """The console script."""
    _run("superoffload-plan")
