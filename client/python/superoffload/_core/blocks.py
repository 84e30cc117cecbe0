"""Blocks of a model: which one a parameter is of, by its name, and some of them."""

import collections
import math
import re
from collections.abc import Sequence

_IN_A_LIST = re.compile(r"(?P<list>(?:[^.]+\.)*?)(?P<index>\d+)\.")  # the outermost list that the name goes through


def units(names: Sequence[str], sizes: Sequence[int]) -> list[int]:
    """Returns 0 for what comes before the blocks, 1 to n for the n blocks, n + 1 for what comes after them.

    The blocks are the entries of the list of modules that has most of the ``sizes``. Without one all are 0.
    """
    indices = _indices(names, sizes)
    order = _order(indices)
    result, outside = [], 0
    for index in indices:
        if index is not None:
            outside = len(order) + 1
        result.append(outside if index is None else order[index])
    return result


def count(names: Sequence[str], sizes: Sequence[int]) -> int:
    """Returns the number of blocks."""
    return len(_order(_indices(names, sizes)))


def choose(names: Sequence[str], sizes: Sequence[int], share: float) -> list[int]:
    """Returns the numbers of ``share`` of the blocks, evenly among the others."""
    every = count(names, sizes)
    return evenly(math.ceil(every * share), every)


def evenly(count: int, of: int) -> list[int]:
    """Returns ``count`` of the numbers 1 to ``of``, as far from each other as can be."""
    return [number for number in range(1, of + 1) if -(-number * count // of) > -(-(number - 1) * count // of)]


def _order(indices: Sequence[int | None]) -> dict[int, int]:
    return {index: 1 + place for place, index in enumerate(sorted({i for i in indices if i is not None}))}


def _indices(names: Sequence[str], sizes: Sequence[int]) -> list[int | None]:
    found = [_IN_A_LIST.match(name) for name in names]
    of_list: collections.Counter[str] = collections.Counter()
    for match, size in zip(found, sizes, strict=True):
        if match is not None:
            of_list[match["list"]] += size
    if not of_list:
        return [None] * len(names)
    blocks = of_list.most_common(1)[0][0]
    return [int(match["index"]) if match is not None and match["list"] == blocks else None for match in found]
