"""What a trace says about our kernels beside others: how much of each, and how much longer those take then."""

import collections
import gzip
import json
import statistics
from collections.abc import Iterable

OURS = {"pack": "superoffload_pack", "update of residents": "superoffload_resident"}  # and how names begin


def of_trace(path: str) -> list[str]:
    """Lines of a table, from a Chrome trace of torch's profiler, compressed; none where it has no such kernel."""
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    return lines([event for event in events if event.get("cat") == "kernel" and event.get("ph") == "X"])


def lines(kernels: list[dict]) -> list[str]:
    """Of events with `name`, `ts` and `dur` in microseconds."""
    others = [event for event in kernels if "superoffload" not in event["name"]]
    found = []
    for title, name in OURS.items():
        found += _beside(title, [event for event in kernels if name in event["name"]], others)
    return found


def _beside(title: str, ours: list[dict], others: list[dict]) -> list[str]:
    if not ours:
        return []
    beside, alone = collections.defaultdict(list), collections.defaultdict(list)
    spans, busy = _union(ours), _union(others)
    covered = sum(_overlap(event, busy) for event in ours)
    for event in others:
        of_its_name = beside if _overlap(event, spans) > 0 else alone
        of_its_name[event["name"]].append(event["dur"])
    whole = sum(event["dur"] for event in ours)
    found = [f"{title}: {len(ours)} kernels, {whole / 1e3:.3f} ms, {covered / whole:.0%} of it beside other kernels"]
    most = sorted(beside, key=lambda name: -sum(beside[name]))
    for name in [name for name in most if name in alone][:3]:
        ratio = statistics.median(beside[name]) / statistics.median(alone[name])
        found.append(f"{ratio:5.2f} times its duration alone, {len(beside[name])} times beside {title}: {name[:60]}")
    return found


def _union(events: Iterable[dict]) -> list[tuple[float, float]]:
    spans: list[tuple[float, float]] = []
    for begin, end in sorted((event["ts"], event["ts"] + event["dur"]) for event in events):
        if spans and begin <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(end, spans[-1][1]))
        else:
            spans.append((begin, end))
    return spans


def _overlap(event: dict, spans: list[tuple[float, float]]) -> float:
    begin, end = event["ts"], event["ts"] + event["dur"]
    return sum(max(0.0, min(end, last) - max(begin, first)) for first, last in spans)
