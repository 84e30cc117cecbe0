"""What a run has done, in its output directory: state.json, and a line in log.jsonl for each step."""

import dataclasses
import datetime
import json
import pathlib
from typing import Any

from superoffload._core import whole_file
from superoffload.finetune.ranks import Ranks
from superoffload.finetune.recipe import Recipe

# What may be another when a run goes on: it changes where and how fast, not what is trained.
_MAY_CHANGE = {
    "output",
    "evaluation_data",
    "evaluation_split",
    "evaluate_every",
    "micro_batch_size",
    "ranks",
    "sequence_parallel",
    "attention",
    "recompute",
    "weights",
    "checkpoint_every",
    "keep_checkpoints",
    "architecture",
}


@dataclasses.dataclass
class _State:
    """What state.json has."""

    recipe: dict[str, Any]
    begun: str  # the day, in ISO's form
    data: str = ""  # digest of the rows
    skipped: list[int] = dataclasses.field(default_factory=list)  # steps
    finished: bool = False


class Record:
    """Rank 0 writes it; all ranks read the same file system."""

    def __init__(self, output: pathlib.Path, state: _State) -> None:
        self._output, self._state = output, state
        self.entries: list[dict[str, Any]] = _read_lines(output / "log.jsonl")

    @staticmethod
    def read(output: pathlib.Path, recipe: Recipe) -> "Record":
        """Raises ValueError where the directory belongs to another recipe."""
        fields = json.loads(json.dumps(dataclasses.asdict(recipe)))
        wanted = {name: value for name, value in fields.items() if name not in _MAY_CHANGE}
        path = output / "state.json"
        state = _State(wanted, datetime.date.today().isoformat())
        if path.exists():
            state = _State(**json.loads(path.read_text()))
        for name, value in wanted.items():
            before = state.recipe.get(name)
            if before != value:
                raise ValueError(
                    f"{output} has a run with {name}: {before}, and the recipe has {name}: {value}; give the recipe "
                    "another output, or delete that directory"
                )
        return Record(output, state)

    @staticmethod
    def open(output: pathlib.Path, recipe: Recipe, ranks: Ranks) -> "Record":
        """All ranks call it. Raises ValueError as `read` does."""
        record = Record.read(output, recipe)
        ranks.wait()  # until all have read it
        if ranks.first:
            output.mkdir(parents=True, exist_ok=True)
            record._write()
        return record

    @property
    def begun(self) -> datetime.date:
        return datetime.date.fromisoformat(self._state.begun)

    @property
    def finished(self) -> bool:
        return self._state.finished

    def check_data(self, digest: str, ranks: Ranks) -> None:
        """Raises ValueError where a run would go on with other data than it began with."""
        if self._state.data not in ("", digest):
            raise ValueError(
                f"{self._output} has a run on other data: the files, the tokenizer or its template have changed since; "
                "give the recipe another output, or delete that directory"
            )
        self._state.data = digest
        if ranks.first:
            self._write()

    def step_after(self, committed_steps: int) -> int:
        """The step with which a loop goes on, counting those that were skipped."""
        step = taken = 0
        while taken < committed_steps or step in self._state.skipped:
            taken += step not in self._state.skipped
            step += 1
        return step

    def forget_from(self, step: int) -> None:
        """What was done after the checkpoint at which a run goes on is done again."""
        self.entries = [entry for entry in self.entries if entry["step"] < step]

    def begin_log(self) -> None:
        _replace(self._output / "log.jsonl", "".join(json.dumps(entry) + "\n" for entry in self.entries))

    def add(self, entry: dict[str, Any], skipped: bool) -> None:
        if skipped and entry["step"] not in self._state.skipped:
            self._state.skipped.append(entry["step"])
            self._write()
        self.entries.append(entry)
        with (self._output / "log.jsonl").open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def finish(self) -> None:
        self._state.finished = True
        self._write()

    def _write(self) -> None:
        _replace(self._output / "state.json", json.dumps(dataclasses.asdict(self._state), indent=2) + "\n")


def _replace(path: pathlib.Path, text: str) -> None:
    whole_file.replace(path, lambda file: file.write(text.encode()))


def _read_lines(path: pathlib.Path) -> list[dict[str, Any]]:
    entries = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            entries.append(json.loads(line))
        except ValueError:  # a process was killed while it wrote
            break
    return entries
