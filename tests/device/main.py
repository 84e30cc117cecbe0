"""The checks that need a GPU, as subcommands; tests/device/run.sh sets up what they need and calls this."""

import argparse
import contextlib
import datetime
import importlib
import pathlib
import sys
from collections.abc import Callable

from tests.device import bench, checks, machine
from tests.device.session import Session, stopping_early

# Seconds: together little more than half an hour, and none more than ten minutes.
SUBCOMMANDS: dict[str, tuple[float, Callable[[Session], None]]] = {
    "smoke": (180, checks.smoke),
    "bits": (480, checks.bits),
    "bench": (540, bench.bench),
    "kills": (300, checks.kills),
    "sanitize": (240, checks.sanitize),
    "largest": (180, bench.largest),
}


def import_once() -> None:
    """For the steps, which are forks of this process. A step that misses something says so itself."""
    with contextlib.suppress(ImportError, OSError):
        importlib.import_module("torch.utils.checkpoint")
        importlib.import_module("superoffload.torch")


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="tests/device/run.sh", description=__doc__)
    parser.add_argument("subcommands", nargs="+", choices=SUBCOMMANDS, metavar="SUBCOMMAND", help=" ".join(SUBCOMMANDS))
    parser.add_argument("--output", type=pathlib.Path, required=True, help="folder for logs and results")
    parser.add_argument(
        "--budget", type=float, help="seconds, for each subcommand; steps get more or less in proportion"
    )
    parser.add_argument("--only", default="", help="a regular expression: only steps with such titles")
    arguments = parser.parse_args(words)
    if set(arguments.subcommands) != {"sanitize"}:
        import_once()
    status = 0
    for name in arguments.subcommands:
        budget, run = SUBCOMMANDS[name]
        scale = (arguments.budget or budget) / budget
        session = Session(name, scale * budget, arguments.output, scale, arguments.only)
        date = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC"
        session.facts |= {"date": date, "dry_run": machine.DRY_RUN}
        dry = " (DRY RUN: no GPU)" if machine.DRY_RUN else ""
        print(f"# {name}, {date}, at most {scale * budget:.0f} s{dry}", flush=True)
        with stopping_early(session):
            run(session)
        status = session.finish() or status
        if session.stopped:
            break
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
