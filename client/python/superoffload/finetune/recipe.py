"""A recipe: what is trained, on what, how, and where the result goes. README.md has a table of its fields."""

import dataclasses
import difflib
import pathlib
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

from superoffload._core import yaml_text


@dataclasses.dataclass(frozen=True)
class Lora:
    """Low-rank adapters (Hu et al. 2021): the model is frozen, and products of two small matrices are trained."""

    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    targets: str | list[str] = "all-linear"  # names of modules, as peft's target_modules

    def __post_init__(self) -> None:
        _at_least("lora.rank", self.rank, 1)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Raises ValueError with a sentence where fields contradict each other."""

    model: str  # a name on the Hugging Face Hub, or a directory
    data: str  # a text file, .jsonl, or a name or a directory of Hugging Face datasets
    output: str = ""  # a directory; default: the recipe's name, beside it
    split: str = "train"  # of the dataset, with datasets' slices
    evaluation_data: str | None = None
    evaluation_split: str = "test"
    evaluate_every: int = 0  # steps; 0: at the end only
    learn: Literal["completions", "all"] = "completions"  # which tokens count: those that the model is to write, or all
    length: int = 4096  # tokens of a row
    pack: bool = True  # several documents to a row; none sees another one
    batch_size: int = 4  # rows of a step, of all ranks together
    micro_batch_size: int = 0  # rows of a pass of a rank; 0: all at once
    epochs: float = 1.0
    steps: int = 0  # 0: as many as `epochs` has
    ranks: int = 1  # processes, each with a GPU where there are GPUs
    sequence_parallel: int = 1  # ranks that share each sequence (Ulysses)
    optimizer: str = "AdamW"  # one of superoffload.torch
    optimizer_options: Mapping[str, Any] | None = None  # its other arguments, as `superoffload run --config` has them
    learning_rate: float = 1e-5
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup: float = 0.03  # part of the steps
    max_grad_norm: float | None = 1.0
    dtype: Literal["bfloat16", "float32"] = "bfloat16"  # of parameters and computation
    attention: str = "auto"  # transformers' attn_implementation
    recompute: bool = True  # blocks in backward (gradient checkpointing)
    weights: Literal["auto", "resident", "streamed"] = "auto"  # of blocks on a GPU
    lora: Lora | None = None  # None: everything is trained
    seed: int = 0
    checkpoint_every: int = 100  # steps; 0: never
    keep_checkpoints: int = 2
    architecture: Mapping[str, Any] | None = (
        None  # the model's config.json, for --plan and --miniature without a network
    )

    def __post_init__(self) -> None:
        for name in ("length", "batch_size", "ranks", "sequence_parallel"):
            _at_least(name, getattr(self, name), 1)
        for name in ("micro_batch_size", "steps", "evaluate_every", "checkpoint_every", "keep_checkpoints", "warmup"):
            _at_least(name, getattr(self, name), 0)
        if self.steps == 0 and not self.epochs > 0:
            raise ValueError(f"epochs is {self.epochs} but must be more than 0, where steps is not given")
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate is {self.learning_rate} but must be more than 0")
        if not self.warmup <= 1:
            raise ValueError(f"warmup is {self.warmup} but must be a part of the steps, 0 to 1")
        if self.ranks % self.sequence_parallel:
            raise ValueError(
                f"sequence_parallel is {self.sequence_parallel}, which does not divide ranks ({self.ranks})"
            )
        if self.batch_size % self.groups:
            raise ValueError(
                f"batch_size is {self.batch_size}, which {self.groups} ranks with sequences of their own cannot share "
                "evenly; make it a multiple"
            )
        if self.micro_batch_size and self.rows % self.micro_batch_size:
            raise ValueError(
                f"micro_batch_size is {self.micro_batch_size}, which does not divide the {self.rows} rows that a rank "
                "has in a step"
            )

    @property
    def groups(self) -> int:
        """Ranks with sequences of their own."""
        return self.ranks // self.sequence_parallel

    @property
    def rows(self) -> int:
        """Of a rank, in a step."""
        return self.batch_size // self.groups

    @property
    def rows_per_pass(self) -> int:
        return self.micro_batch_size or self.rows

    @property
    def passes(self) -> int:
        """Of a step."""
        return self.rows // self.rows_per_pass


def published() -> dict[str, pathlib.Path]:
    """The recipes that come with the package, by name."""
    here = pathlib.Path(__file__).parent
    installed, cloned = here / "recipes", here.parents[2] / "examples" / "recipes"
    return {path.stem: path for path in sorted((installed if installed.is_dir() else cloned).glob("*.yaml"))}


def read(path: pathlib.Path) -> Recipe:
    """``path``: a file, or the name of a published recipe, whose output is then in the working directory.

    Raises ValueError with a sentence that names the file and the field.
    """
    if str(path) in published() and not path.exists():
        return dataclasses.replace(_read(published()[str(path)]), output=str(path))
    return _read(path)


def _read(path: pathlib.Path) -> Recipe:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    try:
        given = yaml_text.parse(text)
    except ValueError as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    try:
        recipe: Recipe = _made(Recipe, "", given)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    output = recipe.output or path.with_suffix("").name
    return dataclasses.replace(recipe, output=str(path.parent / pathlib.Path(output).expanduser()))


def _made(kind: Any, prefix: str, given: Any) -> Any:
    if not isinstance(given, dict):
        raise ValueError(f"{prefix.rstrip('.') or 'a recipe'} must have fields by name, as in `length: 4096`")
    hints = typing.get_type_hints(kind)
    values = {}
    for name, value in given.items():
        if name not in hints:
            near = difflib.get_close_matches(str(name), hints, n=1)
            raise ValueError(
                f"there is no field {prefix}{name}" + (f"; did you mean {prefix}{near[0]}?" if near else "")
            )
        values[name] = _value(prefix + name, hints[name], value)
    missing = [
        prefix + field.name
        for field in dataclasses.fields(kind)
        if field.default is dataclasses.MISSING and field.name not in values
    ]
    if missing:
        raise ValueError(f"{' and '.join(missing)} must be given")
    return kind(**values)


def _value(name: str, hint: Any, value: Any) -> Any:
    """The value as a field's type; YAML has 1e-5 as a text, which Python takes for a number."""
    if dataclasses.is_dataclass(hint):
        return _made(hint, f"{name}.", value)
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in inner:
            return None
        choices = [each for each in inner if each is not type(None)]
        for choice in choices[:-1]:
            try:
                return _value(name, choice, value)
            except ValueError:
                continue
        return _value(name, choices[-1], value)
    if origin is Literal:
        if value not in inner:
            raise ValueError(f"{name} is {value!r} but must be one of {', '.join(inner)}")
        return value
    if origin is list:
        if not isinstance(value, list):
            raise ValueError(f"{name} is {value!r} but must be a list")
        return [_value(name, inner[0], element) for element in value]
    if hint is float and isinstance(value, (int, str)) and not isinstance(value, bool):
        try:
            return float(value)
        except ValueError:
            pass
    kind = Mapping if origin is not None else hint
    if not isinstance(value, kind) or (isinstance(value, bool) and hint is not bool):
        words = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
        raise ValueError(f"{name} is {value!r} but must be {words.get(hint, 'fields by name')}")
    return value


def _at_least(name: str, value: float, least: int) -> None:
    if value < least:
        raise ValueError(f"{name} is {value} but must be at least {least}")
