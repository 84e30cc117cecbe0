#!/usr/bin/env python3
"""Makes dashboard.json from the metric catalogue in server/metrics/metrics.h: one panel per metric of a daemon.

Usage: make_dashboard.py >dashboard.json
"""

import json
import pathlib
import re

CATALOGUE = pathlib.Path(__file__).resolve().parents[2] / "server" / "metrics" / "metrics.h"
ENTRY = re.compile(r"(superoffload_\w+)(?:\{([\w,]*)\})?(?:,|\s{2,}|$)\s*(.*)")

# What a plain graph of the number would not show.
EXPRESSIONS = {
    "superoffload_kernel_bytes_total": ("superoffload:kernel_bytes_per_second", "{{pass}}", "Bps"),
    "superoffload_elements": (
        "superoffload_memory_bytes / ignoring(use) group_left superoffload_elements",
        "{{use}}",
        "bytes",
    ),
    "superoffload_step_phase_seconds": (
        "histogram_quantile(0.99, sum by (le, optimizer, phase) "
        "(rate(superoffload_step_phase_seconds_bucket[$__rate_interval])))",
        "{{optimizer}} {{phase}}, p99",
        "s",
    ),
}
LEFT_OUT = {"superoffload_build_info", "superoffload_kernel_seconds_total"}


def catalogue():
    """(name, labels, explanation) of each metric."""
    for line in CATALOGUE.read_text().split("#ifndef")[0].splitlines():
        text = line.removeprefix("//").strip()
        names = []
        while text.startswith("superoffload_"):
            match = ENTRY.match(text)
            names.append((match[1], match[2].split(",") if match[2] else []))
            text = match[3]
        for name, labels in names:
            yield name, labels, text


def unit(name):
    if "bytes_per_second" in name:
        return "Bps"
    if "bytes" in name:
        return "bytes"
    if "timestamp" in name:
        return "dateTimeAsIso"
    return "s" if "seconds" in name else "short"


def target(name, labels):
    legend = " ".join(f"{{{{{label}}}}}" for label in labels if label != "uid")
    if name in EXPRESSIONS:
        return EXPRESSIONS[name]
    if name.endswith("_total"):
        rate_unit = "Bps" if "bytes" in name else "ops"
        return f"sum by ({', '.join(labels)}) (rate({name}[$__rate_interval]))", legend, rate_unit
    if name in ("superoffload_pass_seconds", "superoffload_checkpoint_seconds"):
        by = ", ".join(["le", *labels])
        return f"histogram_quantile(0.99, sum by ({by}) (rate({name}_bucket[$__rate_interval])))", f"{legend}, p99", "s"
    return name, legend or name.removeprefix("superoffload_"), unit(name)


def panels():
    for index, (name, labels, explanation) in enumerate(m for m in catalogue() if m[0] not in LEFT_OUT):
        expression, legend, panel_unit = target(name, labels)
        yield {
            "id": index + 1,
            "title": name.removeprefix("superoffload_").removesuffix("_total").replace("_", " "),
            "description": explanation,
            "type": "timeseries",
            "datasource": {"type": "prometheus", "uid": "$datasource"},
            "gridPos": {"h": 8, "w": 8, "x": 8 * (index % 3), "y": 8 * (index // 3)},
            "fieldConfig": {"defaults": {"unit": panel_unit, "min": 0}, "overrides": []},
            "targets": [{"expr": expression, "legendFormat": legend, "refId": "A"}],
        }


def main():
    dashboard = {
        "title": "superoffloadd",
        "uid": "superoffloadd",
        "schemaVersion": 38,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [{"name": "datasource", "type": "datasource", "query": "prometheus"}]},
        "panels": list(panels()),
    }
    print(json.dumps(dashboard, indent=1))


if __name__ == "__main__":
    main()
