"""Runs a command in whose processes others' optimizers are ours; no script is edited.

``superoffload run -- torchrun --nproc-per-node=4 train.py``. Which classes, and what holds: stand_ins/README.md.
"""

import argparse
import json
import os
import pathlib
import sys

from superoffload._core import yaml_text
from superoffload.stand_ins import imports


def main(words: list[str]) -> int:
    """Does not return where the command begins; the exit status is as a shell's otherwise."""
    parser = argparse.ArgumentParser(
        prog="superoffload run",
        usage="superoffload run [--config FILE] -- COMMAND [ARGUMENT...]",
        description="Runs a command. In its processes optimizers of torch, bitsandbytes and DeepSpeed that have a "
        "counterpart here are hosted by superoffloadd, if it can host the parameters; a line on stderr says which are. "
        f"{imports.SWITCH}=0 turns that off.",
    )
    parser.add_argument(
        "--config",
        type=pathlib.Path,
        metavar="FILE",
        help="keyword arguments of superoffload's optimizers, in YAML or JSON",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="and its arguments")
    given = parser.parse_args(words)
    command = given.command[1:] if given.command[:1] == ["--"] else given.command
    if not command:
        parser.error("there is no command, as in: superoffload run -- python train.py")
    environment = {**os.environ, imports.SWITCH: os.environ.get(imports.SWITCH, "1")}
    if given.config is not None:
        from superoffload.stand_ins import options

        try:
            chosen = _read(given.config)
            options.keywords(chosen)
        except ValueError as error:
            parser.error(f"{given.config}: {error}")
        environment[options.VARIABLE] = json.dumps(chosen)
    site = str(pathlib.Path(imports.__file__).with_name("site"))
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (site, os.environ.get("PYTHONPATH"))))
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        print(f"superoffload run: cannot run {command[0]}: {error.strerror}", file=sys.stderr)
        return 127 if isinstance(error, FileNotFoundError) else 126


def _read(path: pathlib.Path) -> dict[str, object]:
    """Raises ValueError with a sentence."""
    try:
        text = path.read_text()
    except OSError as error:
        raise ValueError(error.strerror) from error
    read = json.loads(text) if path.suffix == ".json" else yaml_text.parse(text)
    if not isinstance(read, dict):
        raise ValueError(f"has {type(read).__name__} but must have options by name, as in `weights: auto`")
    return read
