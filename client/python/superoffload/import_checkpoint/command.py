"""``superoffload import-checkpoint``: a checkpoint of DeepSpeed becomes one that superoffloadd restores.

DeepSpeed need not be installed, and torch neither. README: superoffload/torch/state/README.md.
"""

import argparse
import dataclasses
import functools
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import grpc

from superoffload._core import checkpoint_files
from superoffload._core.error import Error
from superoffload.import_checkpoint import universal_checkpoint, zero_checkpoint
from superoffload.import_checkpoint.saved_state import (
    FIRST,
    MASTER,
    SECOND,
    LeftOut,
    Parameter,
    Piece,
    SavedState,
    inconsistent,
    number,
    optional,
)

_MOMENTS = {"adamw": (FIRST, SECOND), "adam": (FIRST, SECOND), "lion": (FIRST,)}  # by the daemon's algorithm
_CLASSES = {"adamw": "AdamW", "adam": "Adam", "lion": "Lion"}  # of superoffload.torch
_LATEST = ("latest", "latest_universal")
_MODULE = "module."  # what DistributedDataParallel puts before all names

# What would have to change results: the value that does not.
_REFUSED = {"amsgrad": False, "bias_correction": True}


@dataclasses.dataclass(frozen=True)
class Imported:
    """What was written."""

    directory: str
    algorithm: str  # the daemon's name
    committed_steps: int
    parameters: int
    elements: int  # of the parameters
    bytes: int
    groups: int
    left_out: LeftOut


def import_checkpoint(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    tag: str | None = None,
    algorithm: str | None = None,
) -> Imported:
    """Writes the fp32 masters, moments, steps and hyper-parameters of ``source`` as a checkpoint.

    Args:
        source: what DeepSpeed was told to save to, or the directory of a tag in it: of ZeRO stage 1, 2 or 3, or a
            universal checkpoint.
        output: a directory that does not exist, in one that does.
        tag: which of ``source``; None is the one that its file ``latest`` names, else ``latest_universal``.
        algorithm: "adamw", "adam" (weight decay as an L2 term) or "lion"; None is what the files say: "lion" without
            second moments or eps, else "adamw" unless the optimizer or DeepSpeed's configuration says "adam".

    Raises:
        Error: what is missing, damaged, does not fit together or has no counterpart, with a canonical code; nothing is
            written then.
        OSError: ``output`` cannot be written.
    """
    directory = _tag_directory(os.path.abspath(source), tag)
    kind = universal_checkpoint if universal_checkpoint.is_one(directory) else zero_checkpoint
    if kind is zero_checkpoint and not zero_checkpoint.is_one(directory):
        raise _no_checkpoint(directory)
    saved = kind.read(directory)
    if not saved.parameters:
        raise inconsistent(directory, "has no parameters")
    chosen = _algorithm(directory, saved, _moments(directory, saved.parameters), algorithm)
    groups = [_scalars(f"{directory}: parameter group {i}", group, chosen) for i, group in enumerate(saved.groups)]
    parameters = _named(directory, saved.parameters)
    committed_steps = max(parameter.steps for parameter in parameters.values())
    contents = checkpoint_files.Contents(
        optimizer=os.path.basename(directory),
        algorithm=chosen,
        committed_steps=committed_steps,
        groups=groups,
        parameter_groups={name: parameter.group for name, parameter in parameters.items()},
        parameter_steps={name: p.steps for name, p in parameters.items() if p.steps != committed_steps},
        tensors=[
            checkpoint_files.Tensor(array, name, parameter.shape, functools.partial(_floats, parameter.arrays[array]))
            for array in (MASTER, *_MOMENTS[chosen])
            for name, parameter in parameters.items()
        ],
    )
    output = os.path.abspath(output)
    checkpoint_files.write(output, contents)
    return Imported(
        output,
        chosen,
        committed_steps,
        len(parameters),
        sum(math.prod(parameter.shape) for parameter in parameters.values()),
        contents.bytes,
        len(groups),
        saved.left_out,
    )


def _no_checkpoint(directory: str) -> Error:
    return Error(
        grpc.StatusCode.NOT_FOUND,
        f"{directory} is no checkpoint of DeepSpeed; name what save_checkpoint() was told, or the directory of a tag",
    )


def _tag_directory(source: str, tag: str | None) -> str:
    if not os.path.isdir(source):
        raise Error(
            grpc.StatusCode.NOT_FOUND, f"{source} is no directory; name what save_checkpoint() of DeepSpeed was told"
        )
    if tag is None and (zero_checkpoint.is_one(source) or universal_checkpoint.is_one(source)):
        return source
    for file in _LATEST if tag is None else ():
        path = os.path.join(source, file)
        if os.path.isfile(path):
            with open(path, errors="replace") as latest:
                tag = latest.read(4096).strip()
            break
    if tag is None:
        raise _no_checkpoint(source)
    directory = os.path.join(source, tag)
    if not tag or os.path.dirname(os.path.normpath(tag)) or not os.path.isdir(directory):
        there = sorted(entry.name for entry in os.scandir(source) if entry.is_dir())
        raise Error(
            grpc.StatusCode.NOT_FOUND,
            f"{source} has no directory {tag!r}, but {', '.join(there[:5]) or 'none'}; choose one with --tag",
        )
    return os.path.normpath(directory)


def _moments(directory: str, parameters: Mapping[str, Parameter]) -> tuple[str, ...]:
    first, *others = (tuple(parameter.arrays) for parameter in parameters.values())
    if any(other != first for other in others):
        raise inconsistent(directory, f"has {SECOND} of some parameters only")
    return first[1:]


def _algorithm(directory: str, saved: SavedState, moments: Sequence[str], asked: str | None) -> str:
    if asked is not None and asked not in _MOMENTS:
        raise Error(
            grpc.StatusCode.INVALID_ARGUMENT,
            f"algorithm is {asked!r} but must be one of {', '.join(map(repr, _MOMENTS))}",
        )
    chosen = asked or _algorithm_of_files(saved, moments)
    if missing := [moment for moment in _MOMENTS[chosen] if moment not in moments]:
        raise Error(
            grpc.StatusCode.INVALID_ARGUMENT,
            f"{directory} lacks {', '.join(missing)}, which {chosen} has; leave the algorithm out to have it chosen",
        )
    return chosen


def _algorithm_of_files(saved: SavedState, moments: Sequence[str]) -> str:
    """DeepSpeed's Lion on the CPU saves second moments that it does not use, but has no eps."""
    optimizer = optional(saved.configuration, "optimizer", dict, {})
    kind = str(optimizer.get("type")).lower()
    if SECOND not in moments or any(group and "eps" not in group for group in saved.groups) or kind == "lion":
        return "lion"
    decoupled = [group["decoupled_weight_decay"] for group in saved.groups if "decoupled_weight_decay" in group]
    if decoupled and all(value is decoupled[0] for value in decoupled):
        return "adam" if decoupled[0] is False else "adamw"
    options = optional(optimizer, "params", dict, {})
    return "adam" if kind == "adam" and options.get("adam_w_mode") is False else "adamw"


def _scalars(where: str, group: Mapping[str, Any], algorithm: str) -> dict[str, float]:
    """The daemon's hyper-parameters of a parameter group; none of a group that was not saved."""
    if not group:
        return {}
    for option, harmless in _REFUSED.items():
        if group.get(option, harmless) != harmless:
            raise Error(
                grpc.StatusCode.UNIMPLEMENTED,
                f"{where} has {option}={group[option]!r}, which the daemon does not have; begin from the weights",
            )
    names = ("lr", "weight_decay") if algorithm == "lion" else ("lr", "eps", "weight_decay")
    missing = [name for name in (*names, "betas") if name not in group]
    betas = group.get("betas")
    if missing or not isinstance(betas, list | tuple) or len(betas) != 2:
        raise inconsistent(where, f"lacks {', '.join(missing) or 'two betas'}")
    values = {"beta1": betas[0], "beta2": betas[1], **{name: group[name] for name in names}}
    scalars = {name: float(number(value, f"{where}: {name}")) for name, value in values.items()}
    for name, value in scalars.items():
        if not (math.isfinite(value) and value >= 0 and (value < 1 or not name.startswith("beta"))):
            raise inconsistent(where, f"has {name}={value}, which no optimizer can have")
    return scalars


def _named(directory: str, parameters: Mapping[str, Parameter]) -> dict[str, Parameter]:
    """By the names that the model's parameters have without a wrapper around it."""
    for name in parameters:
        if not name.isprintable():
            raise inconsistent(directory, f"has a parameter named {name!r}")
    wrapped = all(name.startswith(_MODULE) for name in parameters)
    return {name[len(_MODULE) if wrapped else 0 :]: parameter for name, parameter in parameters.items()}


def _floats(pieces: Sequence[Piece]) -> Iterator[bytes]:
    for piece in pieces:
        yield from piece.tensor.floats(piece.first, piece.elements)


def _summary(imported: Imported) -> str:
    left = imported.left_out
    others = {"frozen parameters": left.frozen, "buffers": left.buffers, "tied names": left.tied}
    told = ", ".join(f"{what}: {count}" for what, count in others.items() if count)
    parameters = "model.named_parameters()" if imported.groups == 1 else "the_same_groups"
    return (
        f"step {imported.committed_steps}, {imported.parameters} parameters with {imported.elements} elements, "
        f"groups: {imported.groups}, {imported.bytes} bytes in {imported.directory}"
        f"{f' (the model has as well, and the optimizer has not: {told})' if told else ''}; restore it with "
        f"superoffload.torch.{_CLASSES[imported.algorithm]}({parameters}, restore={imported.directory!r})"
    )


def main(words: list[str]) -> int:
    """The exit status: 2 when something is wrong with what is named, 1 when the output cannot be written."""
    parser = argparse.ArgumentParser(
        prog="superoffload import-checkpoint",
        description="Makes a checkpoint that superoffloadd restores of one that DeepSpeed has saved: ZeRO stages 1, 2 "
        "and 3, and universal checkpoints. DeepSpeed need not be installed.",
        allow_abbrev=False,
    )
    parser.add_argument("source", metavar="SOURCE", help="what save_checkpoint() was told, or a tag's directory in it")
    parser.add_argument("output", metavar="OUTPUT", help="a directory that does not exist yet")
    parser.add_argument("--tag", help="which of SOURCE; the one that its file latest names, if left out")
    parser.add_argument(
        "--algorithm",
        choices=_MOMENTS,
        help="adam has weight decay as an L2 term; if left out, what the files say, and adamw where they do not",
    )
    given = parser.parse_args(words)
    try:
        imported = import_checkpoint(given.source, given.output, tag=given.tag, algorithm=given.algorithm)
    except Error as error:
        print(f"superoffload import-checkpoint: {error.message}", file=sys.stderr)
        return 1 if error.code == grpc.StatusCode.RESOURCE_EXHAUSTED else 2
    except OSError as error:
        print(f"superoffload import-checkpoint: {error.filename or given.output}: {error.strerror}", file=sys.stderr)
        return 1
    print(_summary(imported))
    return 0
