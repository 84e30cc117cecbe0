"""Trains one model twice, with torch.optim.AdamW and with superoffload, kills the daemon meanwhile, and compares.

Usage: python compare.py SUPEROFFLOADD PICTURE.svg [--steps=N] [FLAG OF train.py]...
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

from columns import aligned
from picture import draw

TRAIN = pathlib.Path(__file__).with_name("train.py")


def train(*words, **environment):
    """What train.py measures; its progress stays visible."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", TRAIN, *map(str, words)],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        text=True,
    )
    if done.returncode != 0:
        raise SystemExit("the quick start stops here: training failed; what is above says why")
    return json.loads(done.stdout)


def table(ours, torchs):
    parameters = ours["parameters"]
    moved = torchs["anonymous_bytes"] - ours["anonymous_bytes"]
    difference = max(abs(a - b) for a, b in zip(ours["losses"], torchs["losses"], strict=True))
    rows = [
        ("", "torch.optim.AdamW", "superoffload"),
        (
            "time that the trainer waits for the optimizer, per step",
            *(f"{r['wait_seconds'] * 1e3:.0f} ms" for r in (torchs, ours)),
        ),
        ("time of a whole step", *(f"{r['step_seconds'] * 1e3:.0f} ms" for r in (torchs, ours))),
        ("memory of the trainer's process", *(f"{r['anonymous_bytes'] / 1e9:.2f} GB" for r in (torchs, ours))),
        ("loss of the last step", *(f"{r['losses'][-1]:.3f}" for r in (torchs, ours))),
    ]
    lines = [
        aligned(rows),
        "",
        f"   {moved / 1e9:.2f} GB ({moved / parameters:.0f} bytes for each of {parameters / 1e6:.0f} M parameters)"
        " left the trainer's process.",
        f"   The daemon was killed once; that step took {ours['pause_seconds']:.1f} s. The losses differ by"
        f" {difference:.3f} at most.",
    ]
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("picture", type=pathlib.Path)
    parser.add_argument("--steps", type=int, default=30)
    arguments, flags = parser.parse_known_args()
    picture, steps = arguments.picture, arguments.steps
    flags.append(f"--steps={steps}")
    print(f"== training with torch.optim.AdamW (fused, on fp32 masters): {steps} steps, about a minute", flush=True)
    torchs = train("torch", *flags)
    with tempfile.TemporaryDirectory(prefix="so-quick-") as runtime:
        command = [arguments.program, "--keeper", f"--runtime_directory={runtime}", "--metrics_address=off"]
        with open(f"{runtime}/log", "wb") as log:
            keeper = subprocess.Popen(command, stderr=log)
        try:
            while not os.path.exists(f"{runtime}/control.sock"):
                if keeper.poll() is not None:
                    raise SystemExit(pathlib.Path(f"{runtime}/log").read_text())
                time.sleep(0.01)
            killed_at = steps // 2
            print(f"== the same with superoffload; its daemon is killed (kill -9) in step {killed_at}", flush=True)
            flags += [f"--kill-at={killed_at}", f"--keeper={keeper.pid}"]
            ours = train("superoffload", *flags, SUPEROFFLOAD_ENDPOINT=f"unix:{runtime}/control.sock")
        finally:
            keeper.terminate()
            keeper.wait()
    title = f"{ours['parameters'] / 1e6:.0f} M parameters in bf16: both curves are there"
    picture.write_text(draw(torchs["losses"], ours["losses"], killed_at, title))
    print(f"\n{table(ours, torchs)}\n\n   both curves: {picture}\n")


if __name__ == "__main__":
    main()
