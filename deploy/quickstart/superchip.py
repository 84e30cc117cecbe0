"""Says what superoffload changes for Llama-8B on a GH200, as `superoffloadctl plan` simulates it.

Usage: python superchip.py SUPEROFFLOADCTL
"""

import json
import os
import subprocess
import sys

from columns import aligned

BATCH, SEQUENCE = 4, 4096
_GIB = 1 << 30
_STATE_BYTES = 4 + 4 + 4  # of a parameter: master weight and two moments in fp32
_GRADIENT_BYTES = 2  # bf16; all stay until step()
_ONLY_OURS = ("gradients", "device slots")  # they leave during backward


def plan(program):
    words = [
        "--model=llama-8b",
        "--machine=gh200-96-480",
        f"--batch={BATCH}",
        f"--sequence={SEQUENCE}",
        "--loss=chunked",
    ]
    return json.loads(subprocess.run([program, "plan", *words, "--json"], stdout=subprocess.PIPE, check=True).stdout)


def on_the_gpu(gpu, parameters):
    """Bytes of a GPU on which torch's fused AdamW has its state, too."""
    shared = sum(int(item["bytes"]) for item in gpu["items"] if item["purpose"] not in _ONLY_OURS)
    return shared + parameters * (_GRADIENT_BYTES + _STATE_BYTES)


def fitting(used, available):
    return f"{used / _GIB:.0f} GiB" if used <= available else f"{used / _GIB:.0f} GiB: does not fit"


def table(planned):
    gpu, performance = planned["memory"][0]["gpu"], planned["performance"]
    ours, available = int(gpu["total_bytes"]), int(gpu["available_bytes"])
    fused = on_the_gpu(gpu, int(planned["parameters"]))
    rows = [
        ("", "torch.optim.AdamW on the GPU (fused, fp32 masters)", "superoffload"),
        (f"GPU memory, of {available / _GIB:.0f} GiB", fitting(fused, available), fitting(ours, available)),
        ("time of a whole step", "", f"{performance['step_seconds'] * 1e3:.0f} ms"),
        ("time that the GPU waits for the optimizer", "", f"{performance['exposed_seconds'] * 1e3:.0f} ms"),
    ]
    return aligned(rows)


def main():
    cores = len(os.sched_getaffinity(0))
    print(
        f"   Here trainer and daemon share {cores} cores, so that one waits while the other computes. On a Superchip\n"
        f"   the GPU trains while its CPU updates: llama-8b on a GH200, {BATCH} x {SEQUENCE} tokens, simulated:\n"
    )
    print(f"{table(plan(sys.argv[1]))}\n")


if __name__ == "__main__":
    main()
