"""Subcommands that measure: bench and largest.

bench: a billion parameters at 32 k tokens per step, where there is compute to hide an optimizer behind. Its first row
is the floor, forward and backward alone; the others are what an optimizer costs beyond it. The most important rows
come first, and those for which no time is left are named.
"""

import itertools
import os
import shutil
import subprocess
import tempfile

from tests.device import machine
from tests.device.session import NOT_ASKED_FOR, PASSED, Session, Step

MPS = "nvidia-cuda-mps-control"
FLOOR = "no optimizer: forward and backward alone (the floor)"
SETTINGS = [("always", 0), ("never", 0), ("always", 4), ("never", 4)]  # speculation, resident buckets
# Where one sequence per step leaves nothing to hide the host's pass behind: optimizer, its options, those of the GPU.
FEW_TOKENS: list[tuple[str, dict[str, str], dict[str, object]]] = [
    ("AdamW", {}, {"resident_buckets": 0}),
    ("AdamW", {}, {"resident_buckets": 0, "gradient_slots": 1}),
    ("AdamW", {}, {"resident_buckets": 0, "gradient_slots": "in_place"}),
    ("AdamW", {}, {"resident_buckets": 8, "resident_steps": 4}),
    ("AdamW", {}, {"resident_buckets": "auto", "resident_steps": 4}),
    ("AdamW", {"state_dtype": "bfloat16"}, {"resident_buckets": 0}),
    ("AdamW", {"state_dtype": "bfloat16"}, {"resident_buckets": "auto", "resident_steps": 4}),
    ("AdamW", {"state_dtype": "bfloat16", "master_dtype": "bfloat16"}, {"resident_buckets": 0}),
    ("AdamW8bit", {}, {"resident_buckets": 0}),
    ("AdamW8bit", {}, {"resident_buckets": "auto", "resident_steps": 4}),
    ("AdamW8bit", {"master_dtype": "bfloat16"}, {"resident_buckets": "auto", "resident_steps": 4}),
]
MOST_WANTED = 5  # rows: then what only a GPU tells about a step's end, the link and memory
WIDTH = 62
HEADER = f"{'':{WIDTH}} {'ms/step':>8} {'exposed':>8} {'tokens/s':>9} {'HBM GiB':>8}"
# As a fraction of what the machine has, in the order in which they are tried.
FRACTIONS = (0.9, 0.8, 0.65, 0.5)


def _row(name: str, *arguments: object) -> object:
    """Imported in the child: without PyTorch a row fails by name, and the session goes on."""
    from tests.device import rows

    return getattr(rows, name)(*arguments)


def _probe(name: str, *arguments: str) -> list[str]:
    from tests.device import probe

    return getattr(probe, name)(*arguments)


def _tails() -> list[str]:
    from tests.device import tail

    return tail.tails()


def _pack_beside() -> list[str]:
    from tests.device import pack_beside

    return pack_beside.pack_beside_a_product()


def _table_of_rows(session: Session, rows: list[tuple], found: dict[str, dict]) -> None:
    for title, limit, labels, *what in rows:
        _into_table(session, session.call(title, limit, _row, *what), labels, found)


def _line(title: str, result: dict, floor: float | None) -> str:
    median = result["median_ms"]
    least = result["floor_milliseconds"] or floor
    exposed = "" if least in (None, median) else f"{median - least:.1f}"
    speed = result["tokens"] / median * 1e3
    return f"{title:{WIDTH}} {median:8.1f} {exposed:>8} {speed:9.0f} {result['gpu_bytes'] / machine.GIB:8.1f}"


def _ours(mover: str) -> tuple[str, int, list[str], str, str, list[tuple[str, int]]]:
    labels = [f"superoffload, mover {mover}, speculation {x}, {n} residents" for x, n in SETTINGS]
    return (f"superoffload, mover {mover}", 130, labels, "superoffload_rows", mover, SETTINGS)


def _one(label: str, limit: int, *what: str) -> tuple:
    return (label, limit, [label], *what)


def _few_tokens() -> tuple[str, int, list[str], str]:
    labels = ["the floor", "GPU only: fused AdamW on fp32 masters"]
    for algorithm, states, gpu in FEW_TOKENS:
        labels.append(" ".join([algorithm, *(f"{name}={value}" for name, value in (states | gpu).items())]))
    title = "half the model, 2 k tokens"
    return (title, 180, [f"{title}: {label}" for label in labels], "few_tokens_rows")


def bench(session: Session) -> None:
    rows = [
        _one(FLOOR, 60, "floor"),
        _ours("trainer"),
        _one("superoffload, mover trainer, no step is clipped", 60, "unclipped"),
        _one("GPU only: fused AdamW on fp32 masters", 45, "fused_adamw"),
        _few_tokens(),
        _one("DeepSpeed's schedule, emulated with our kernels", 75, "deepspeeds_schedule"),
        _ours("daemon"),
        _one("superoffload, layers compiled (own floor), 4 residents", 120, "compiled_layers"),
        _one("trace of two steps", 75, "trace", str(session.path(".trace.json.gz"))),
        _ours("direct"),
        _one("torchao CPUOffloadOptimizer (bf16 states, no masters)", 75, "torchao"),
        _one("DeepSpeed ZeRO-Offload (stage 2, CPUAdam)", 90, "zero_offload"),
    ]
    size = f"{machine.BILLION / 1e9:.2g} billion parameters"
    session.facts["regime"] = f"{size}, 32 k tokens per step, clipped each step"
    session.table += [f"{size}, clipped on every step unless said otherwise; exposed: ms beyond the floor", HEADER]
    found = session.facts["rows"] = {}
    _table_of_rows(session, rows[:MOST_WANTED], found)
    _probe_into_table(session, session.call("after backward", 60, _tails))
    _probe_into_table(session, session.call("the link", 20, _probe, "both_directions"))
    _probe_into_table(session, session.call("GPU memory", 60, _probe, "memory_by_mover"))
    _table_of_rows(session, rows[MOST_WANTED:], found)
    _probe_into_table(session, session.call("pack beside a product", 20, _pack_beside))
    _probe_into_table(session, session.call("movers beside kernels", 45, _probe, "movers_beside_kernels"))
    with tempfile.TemporaryDirectory(prefix="so-mps-") as directory:
        what = ("movers_beside_kernels_with_mps", directory)
        _probe_into_table(session, session.call("... with MPS", 45, _probe, *what))
        _quit_mps(directory)


def _probe_into_table(session: Session, step: Step) -> None:
    session.table += [f"{step.title}: {line}" for line in step.result or []]


def _quit_mps(directory: str) -> None:
    """It is no child of the step that started it, and would keep the GPU."""
    if shutil.which(MPS) is not None:
        quit_it = {"input": b"quit\n", "env": os.environ | {"CUDA_MPS_PIPE_DIRECTORY": directory}}
        subprocess.run([MPS], **quit_it, timeout=20, capture_output=True)


def _into_table(session: Session, step: Step, labels: list[str], found: dict[str, dict]) -> None:
    """A line per label, also for those that were not measured."""
    if step.outcome == NOT_ASKED_FOR:
        return
    results = step.result if isinstance(step.result, list) else [step.result or {}]
    for label, result in itertools.zip_longest(labels, results, fillvalue={}):
        if "median_ms" in result:
            found[label] = result
            staged = "  STAGED copies" * ("STAGED" in result["note"])
            session.table.append(_line(label, result, found.get(FLOOR, {}).get("median_ms")) + staged)
        else:
            session.table.append(f"{label:{WIDTH}} {step.outcome} {result.get('note', '')}".rstrip())


def _largest_row(name: str, fraction: float) -> dict:
    from tests.device import largest_model

    return getattr(largest_model, name)(fraction)


def largest(session: Session) -> None:
    session.table += ["one sequence of 2 k tokens per step", HEADER]
    for title, name in (
        ("GPU only: fused AdamW on fp32 masters", "gpu_only_model"),  # first: it takes seconds
        ("superoffload", "superoffload_model"),
    ):
        for fraction in FRACTIONS:
            step = session.call(f"{title}: {fraction:.0%} of the estimate", 120, _largest_row, name, fraction)
            if step.outcome == PASSED:
                billions = step.result["parameters"] / 1e9
                session.table.append(_line(f"{title}: {billions:.2f} billion parameters", step.result, None))
                break
        else:
            session.table.append(f"{title}: none was found")
