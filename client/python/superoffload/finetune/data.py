"""The rows that a recipe trains on, and those that it is evaluated on."""

import datetime
import pathlib
from typing import Any

from superoffload.finetune import documents, rows
from superoffload.finetune.recipe import Recipe


def training_rows(recipe: Recipe, tokenizer: Any, today: datetime.date) -> rows.Rows:
    """Raises ValueError with a sentence where the data cannot be read, or has nothing to learn from."""
    return _rows(recipe, tokenizer, recipe.data, recipe.split, today)


def evaluation_rows(recipe: Recipe, tokenizer: Any, today: datetime.date) -> rows.Rows | None:
    if recipe.evaluation_data is None:
        return None
    return _rows(recipe, tokenizer, recipe.evaluation_data, recipe.evaluation_split, today)


def is_text(data: str) -> bool:
    """Whether it is one long text, not records."""
    path = pathlib.Path(data)
    return path.is_file() and path.suffix not in (".jsonl", ".json", ".parquet", ".csv")


def _rows(recipe: Recipe, tokenizer: Any, data: str, split: str, today: datetime.date) -> rows.Rows:
    try:
        if is_text(data):
            made = rows.split(documents.of_file(pathlib.Path(data), tokenizer), recipe.length)
        else:
            found = documents.of_records(documents.read_records(data, split), tokenizer, recipe.learn, today)
            padding = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if i is not None), 0)
            made = rows.pack(list(found), recipe.length, padding, recipe.seed, recipe.pack)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {data}: {error}") from error
    except ValueError as error:
        raise ValueError(f"{data}: {error}") from error
    if not bool((made.labels != rows.IGNORED).any()):
        raise ValueError(f"{data} has nothing to learn from")
    return made
