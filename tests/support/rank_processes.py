"""Trainers of all ranks of a run, each a process with a daemon of its own."""

import json
import os
import pathlib
import subprocess
import sys

import torch

ROOT = pathlib.Path(__file__).parents[2]


class Run:
    """Trainers in one process group."""

    load = staticmethod(torch.load)  # what a trainer has written

    def __init__(
        self,
        daemons,
        directory: pathlib.Path,
        *scenarios: dict,
        trainer: str = "sharded_trainer",
        environment: dict[str, str] | None = None,
    ) -> None:
        directory.mkdir()
        self.out = [directory / f"out{rank}" for rank in range(len(daemons))]
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-m", f"tests.support.{trainer}", directory / "store", str(rank)]
                + [str(len(daemons)), self.out[rank], *map(json.dumps, scenarios)],
                cwd=ROOT,
                env={
                    **os.environ,
                    "SUPEROFFLOAD_ENDPOINT": daemon.endpoint,
                    "OMP_NUM_THREADS": "2",
                    **(environment or {}),
                },
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank, daemon in enumerate(daemons)
        ]

    def end(self) -> list[tuple[int, str]]:
        """Code and log of each process."""
        errors = [process.communicate(timeout=300)[1] for process in self.processes]
        return [(process.returncode, error) for process, error in zip(self.processes, errors, strict=True)]

    def results(self) -> list[list[dict]]:
        ends = self.end()
        assert [code for code, _ in ends] == [0] * len(ends), "\n".join(error for _, error in ends)
        return [self.load(out) for out in self.out]

    def kill_rest(self, rank: int) -> None:
        """Rank `rank` kills itself; then the launcher kills the others."""
        assert self.processes[rank].wait(300) == -9
        for process in self.processes:
            process.kill()
            process.communicate(timeout=60)


def equal(a: dict, b: dict) -> None:
    for name, weight in a["weights"].items():
        assert torch.equal(weight, b["weights"][name]), name
