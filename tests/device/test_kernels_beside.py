"""What is read from a trace, of events that are made up."""

import gzip
import json

from tests.device import kernels_beside


def kernel(name, begin, duration):
    return {"ph": "X", "cat": "kernel", "name": name, "ts": begin, "dur": duration}


def test_overlap_and_slowdown_are_those_of_the_intervals(tmp_path):
    events = [
        kernel("gemm", 0, 100),
        kernel("gemm", 100, 100),
        kernel("gemm", 200, 150),  # half of the pack kernel is beside it
        kernel("superoffload_pack_bfloat16", 340, 20),
        kernel("superoffload_resident_bfloat16", 345, 5),  # ours as well: no other kernel
        {"ph": "X", "cat": "gpu_memcpy", "name": "copy", "ts": 350, "dur": 10},
    ]
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    assert kernels_beside.of_trace(str(path)) == [
        "pack: 1 kernels, 0.020 ms, 50% of it beside other kernels",
        " 1.50 times its duration alone, 1 times beside pack: gemm",
        "update of residents: 1 kernels, 0.005 ms, 100% of it beside other kernels",
        " 1.50 times its duration alone, 1 times beside update of residents: gemm",
    ]


def test_kernels_that_overlap_each_other_count_once():
    events = [kernel("a", 0, 10), kernel("b", 5, 10), kernel("superoffload_pack_x", 0, 20)]
    assert kernels_beside.lines(events) == ["pack: 1 kernels, 0.020 ms, 75% of it beside other kernels"]


def test_without_our_kernels_there_is_nothing_to_say():
    assert kernels_beside.lines([kernel("gemm", 0, 10)]) == []
