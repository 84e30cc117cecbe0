"""How documents become rows, and which rows a step has."""

import numpy as np
import pytest
import torch

from superoffload.finetune import rows
from superoffload.finetune.documents import Document


def document(first, length):
    return Document(np.arange(first, first + length, dtype=np.int32), np.arange(length) > 0)


def test_documents_are_packed_whole_and_each_has_positions_of_its_own():
    made = rows.pack([document(10, 3), document(20, 4), document(30, 2)], 6, padding=0, seed=0)
    found = []
    for tokens, positions, labels, used in zip(made.tokens, made.positions, made.labels, made.used, strict=True):
        assert tokens[used:].eq(0).all() and labels[used:].eq(rows.IGNORED).all()
        begins = [i for i in range(used) if positions[i] == 0]
        for begin, end in zip(begins, [*begins[1:], int(used)], strict=True):
            found.append(tokens[begin:end].tolist())
            assert positions[begin:end].tolist() == list(range(end - begin))
            assert labels[begin].item() == rows.IGNORED and torch.equal(
                labels[begin + 1 : end], tokens[begin + 1 : end]
            )
    assert sorted(found) == [[10, 11, 12], [20, 21, 22, 23], [30, 31]]
    assert made.used.sum() == 9


def test_a_document_that_is_longer_than_a_row_is_cut():
    made = rows.pack([document(0, 9)], 4, padding=0, seed=0)
    assert made.tokens.tolist() == [[0, 1, 2, 3]]


def test_a_text_is_divided_and_a_rest_that_makes_no_row_left_out():
    made = rows.split(document(0, 11), 4)
    assert made.tokens.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert rows.split(document(0, 3), 4).used.tolist() == [3]


def test_each_epoch_has_every_row_once_in_another_order():
    order = rows.Order(7, 2, seed=5)
    assert order.steps_per_epoch == 3
    epochs = [[row for step in range(3 * e, 3 * e + 3) for row in order.of_step(step)] for e in (0, 1)]
    assert all(len(set(epoch)) == 6 for epoch in epochs) and epochs[0] != epochs[1]
    assert rows.Order(7, 2, seed=5).of_step(4) == order.of_step(4)
    with pytest.raises(ValueError, match="the data has 1 rows, but a step takes batch_size = 2"):
        rows.Order(1, 2, seed=0)
