"""Rows of as many tokens as a recipe's length, into which documents are packed; and which rows a step has."""

import dataclasses
import hashlib
from collections.abc import Sequence

import torch

from superoffload.finetune.documents import Document

IGNORED = -100  # a label that no token has


@dataclasses.dataclass
class Rows:
    """Three are [rows, length]. Positions begin at 0 with each document, so that none sees another one."""

    tokens: torch.Tensor
    positions: torch.Tensor
    labels: torch.Tensor  # the tokens themselves, or IGNORED
    used: torch.Tensor  # [rows], how many tokens are not padding, which is at the end

    def __len__(self) -> int:
        return len(self.tokens)

    def digest(self) -> str:
        """Of what is in them."""
        made = hashlib.sha256()
        for tensor in (self.tokens, self.positions, self.labels):
            made.update(tensor.numpy().tobytes())
        return made.hexdigest()

    def batch(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        which = torch.tensor(indices)
        names = {"input_ids": self.tokens, "position_ids": self.positions, "labels": self.labels}
        return {name: tensor[which].long() for name, tensor in names.items()}


def split(document: Document, length: int) -> Rows:
    """A long text, row by row; what is left at its end and makes no row is left out, unless it is all."""
    count = max(1, len(document.tokens) // length)
    pieces = [
        Document(document.tokens[i * length : (i + 1) * length], document.learned[i * length : (i + 1) * length])
        for i in range(count)
    ]
    return _rows([[piece] for piece in pieces], length, padding=0)


def pack(documents: Sequence[Document], length: int, padding: int, seed: int, together: bool = True) -> Rows:
    """Documents one behind the other, whole, in a random order; longer ones than a row are cut to its length.

    ``together``: as many to a row as it has room for, or one.
    """
    order = torch.randperm(len(documents), generator=torch.Generator().manual_seed(seed)).tolist()
    packed: list[list[Document]] = []
    room = 0
    for i in order:
        document = Document(documents[i].tokens[:length], documents[i].learned[:length])
        if not len(document.tokens):
            continue
        if len(document.tokens) > room or not together:
            packed.append([])
            room = length
        packed[-1].append(document)
        room -= len(document.tokens)
    return _rows(packed, length, padding)


def _rows(packed: Sequence[Sequence[Document]], length: int, padding: int) -> Rows:
    shape = (len(packed), length)
    rows = Rows(
        torch.full(shape, padding, dtype=torch.int32),
        torch.zeros(shape, dtype=torch.int32),
        torch.full(shape, IGNORED, dtype=torch.int32),
        torch.zeros(len(packed), dtype=torch.int64),
    )
    for number, documents in enumerate(packed):
        first = 0
        for document in documents:
            place = (number, slice(first, first + len(document.tokens)))
            tokens = torch.from_numpy(document.tokens)
            rows.tokens[place] = tokens
            rows.positions[place] = torch.arange(len(tokens), dtype=torch.int32)
            rows.labels[place] = tokens.masked_fill(torch.from_numpy(~document.learned), IGNORED)
            first += len(tokens)
        rows.used[number] = first
        # Padding goes on: nobody learns from it, and what it follows does not see it.
        rows.positions[number, first:] = torch.arange(length - first) + rows.positions[number, first - 1] + 1
    return rows


class Order:
    """Which rows each step has, the same on all ranks and in every process that trains the recipe."""

    def __init__(self, rows: int, batch: int, seed: int) -> None:
        """Raises ValueError where there are too few rows for a step."""
        if rows < batch:
            raise ValueError(
                f"the data has {rows} rows, but a step takes batch_size = {batch}; take more data, a shorter length or "
                "a smaller batch_size"
            )
        self._rows, self._batch, self._seed = rows, batch, seed
        self.steps_per_epoch = rows // batch
        self._of_epoch = -1
        self._order: list[int] = []

    def of_step(self, step: int) -> list[int]:
        epoch, place = divmod(step, self.steps_per_epoch)
        if epoch != self._of_epoch:
            generator = torch.Generator().manual_seed(self._seed + epoch)
            self._order = torch.randperm(self._rows, generator=generator).tolist()
            self._of_epoch = epoch
        return self._order[place * self._batch : (place + 1) * self._batch]
