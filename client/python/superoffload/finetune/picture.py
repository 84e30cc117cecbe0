"""A picture of the loss."""

import pathlib
from collections.abc import Sequence
from typing import Any


def draw(entries: Sequence[dict[str, Any]], path: pathlib.Path) -> None:
    """Of log.jsonl. Nothing where matplotlib is not installed."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        print(f"superoffload finetune: {path.name} is not drawn: pip install matplotlib")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5))
    for name, marker in (("loss", ""), ("evaluation_loss", "o")):
        points = [(entry["step"] + 1, entry[name]) for entry in entries if name in entry]
        if points:
            axes.plot(*zip(*points, strict=True), marker=marker, label=name.replace("_", " "))
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)
