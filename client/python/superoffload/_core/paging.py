"""Requests that go in pages (optimizer.proto): no message to the daemon grows with the model."""

from collections.abc import Iterable, Iterator
from typing import Any

_PAGE_BYTES = 128 * 1024  # a page ends before it has more; the daemon takes twice that
_LISTS = {  # what may be long
    "CreateOptimizerRequest": ("groups", "parameters"),
    "AttachOptimizerRequest": ("parameter_crc32",),
}


def pages(request: Any) -> Iterator[Any]:
    """The pages of a request, in order; only the last one is without ``more``."""
    lists = _LISTS[request.DESCRIPTOR.name]
    if request.ByteSize() <= _PAGE_BYTES:
        return iter([request])
    head = type(request)()
    head.CopyFrom(request)
    for name in lists:
        head.ClearField(name)
    return _with_lists(head, [(name, _runs(getattr(request, name))) for name in lists])


def _runs(entries: Any) -> Iterator[Any]:
    """Cuts a list into runs, each as long as a page may be."""
    first, size = 0, 0
    for index, entry in enumerate(entries):
        needed = 4 if isinstance(entry, int) else entry.ByteSize() + 6  # with its tag and length
        if size + needed > _PAGE_BYTES and index > first:
            yield entries[first:index]
            first, size = index, 0
        size += needed
    yield entries[first:]


def _with_lists(head: Any, lists: Iterable[tuple[str, Iterator[Any]]]) -> Iterator[Any]:
    page = head
    for name, parts in lists:
        for part in parts:
            page.more = True
            yield page
            page = type(head)()
            getattr(page, name).extend(part)
    yield page
