"""How long a trainer waits in step(), by what the step turns out to be, with one daemon against another.

One process trains the same bf16 model with both daemons, step by step in turn: steps that commit, steps that are
clipped and steps that are skipped. After the last gradient step() waits for the verdict, for the passes that are left,
and copies the parameters. Prints medians in milliseconds, and each daemon's share of the first one's time. Without a
second daemon it prints the shares of commits.

    python client/bench/step_wait_bench.py --daemon build/release/server/superoffloadd [--against OTHER] [--steps 20]
"""

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time

import torch

import superoffload.torch

WARM_UP = 8  # superoffload watches the first steps; speculation learns what to expect of the next ones


@contextlib.contextmanager
def running(binary: str, workers: int):
    with tempfile.TemporaryDirectory(prefix="so-bench-") as directory:
        process = subprocess.Popen(
            [binary, f"--runtime_directory={directory}", "--metrics_address=off", f"--worker_threads={workers}"],
            stderr=subprocess.DEVNULL,
        )
        endpoint = f"{directory}/control.sock"
        while not os.path.exists(endpoint):
            if process.poll() is not None:
                sys.exit(f"{binary} ended with {process.returncode}")
            time.sleep(0.01)
        try:
            yield f"unix:{endpoint}"
        finally:
            process.terminate()
            process.wait()


class Trainer:
    def __init__(self, endpoint: str, layers: int, hidden: int) -> None:
        torch.manual_seed(0)
        self._model = torch.nn.Sequential(*(torch.nn.Linear(hidden, hidden, bias=False) for _ in range(layers)))
        self._model.to(torch.bfloat16)
        self._optimizer = superoffload.torch.AdamW(self._model.parameters(), lr=1e-5, endpoint=endpoint)
        self._input = torch.randn(64, hidden, dtype=torch.bfloat16)

    def step(self, kind: str) -> float:
        """Seconds in step()."""
        loss = self._model(self._input).float().square().mean()
        if kind == "skip":
            loss = loss * float("inf")
        self._optimizer.max_grad_norm = 1e-9 if kind == "clip" else None
        loss.backward()
        begin = time.perf_counter()
        self._optimizer.step()
        seconds = time.perf_counter() - begin
        self._optimizer.zero_grad()
        return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--daemon", required=True)
    parser.add_argument("--against")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    daemons = [arguments.daemon] + ([arguments.against] if arguments.against else [])
    with contextlib.ExitStack() as stack:
        endpoints = [stack.enter_context(running(binary, arguments.workers)) for binary in daemons]
        trainers = [Trainer(endpoint, arguments.layers, arguments.hidden) for endpoint in endpoints]
        first = None
        for kind in ("commit", "clip", "skip"):
            for _ in range(WARM_UP):
                for trainer in trainers:
                    trainer.step(kind)
            seconds = [[] for _ in trainers]
            for _ in range(arguments.steps):
                for trainer, samples in zip(trainers, seconds, strict=True):
                    samples.append(trainer.step(kind))
            medians = [statistics.median(samples) for samples in seconds]
            first = first or medians[0]
            shares = [
                f"{1e3 * median:8.1f} ms  {median / (medians[0] if len(medians) > 1 else first):5.2f}"
                for median in medians
            ]
            print(f"{kind:7}", *shares)


if __name__ == "__main__":
    main()
