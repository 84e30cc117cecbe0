"""Rows of the quick start's tables."""


def aligned(rows: list[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "   "
        + "  ".join(
            [f"{row[0]:<{widths[0]}}", *(f"{text:>{width}}" for text, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    )
