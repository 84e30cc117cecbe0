"""Any process of a run of two ranks dies at random instants; the run ends with the bits of an undisturbed one."""

import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import time

import torch
from tests.conftest import Daemon

ROOT = pathlib.Path(__file__).parents[2]
RUN = pathlib.Path(__file__).parent / "run.sh"


def test_three_hundred_kills_of_two_ranks_change_no_bit():
    run = subprocess.run([RUN, "--ranks", "--kills", "300"], capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.fullmatch(r"kills=300 mismatches=0", run.stdout.splitlines()[-1]), run.stdout


class Job:
    """A job of torchrun's agent, with a daemon and its keeper for each rank."""

    def __init__(self, directory: pathlib.Path, name: str, keepers: list[Daemon]) -> None:
        self.directory, self.name, self.keepers = directory, name, keepers
        for stale in directory.glob("pid-*"):
            stale.unlink()
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1000"]
        launcher = torchrun if os.environ.get("SUPEROFFLOAD_JOB_LAUNCHER") == "torchrun" else []
        words = [sys.executable, *launcher, "-m", "tests.support.elastic_job", directory, name]
        words += [keeper.endpoint for keeper in keepers]
        with (directory / f"{name}.log").open("w") as log:
            # Else gloo finds the addresses of the processes before in torchrun's store.
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
            self.process = subprocess.Popen(words, cwd=ROOT, env=environment, stdout=log, stderr=log)

    def log(self) -> str:
        return (self.directory / f"{self.name}.log").read_text()[-5000:]

    def trainer(self, rank: int) -> int:
        path = self.directory / f"pid-{rank}"
        while not path.exists():
            assert self.process.poll() is None, self.log()
            time.sleep(0.01)
        return int(path.read_text())

    def daemon(self, rank: int) -> int:
        keeper = self.keepers[rank].process.pid
        while True:
            children = pathlib.Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()
            if children:
                return int(children[0])
            time.sleep(0.01)

    def wait_steps(self, steps: int) -> None:
        """Until some rank has committed so many more."""
        until = committed(self.keepers[0]) + steps
        while committed(self.keepers[0]) < until:
            assert self.process.poll() is None, self.log()
            time.sleep(0.05)

    def end(self) -> None:
        """The agent ends its ranks."""
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(60)

    def weights(self) -> list[dict[str, torch.Tensor]]:
        assert self.process.wait(300) == 0, self.log()
        return [torch.load(self.directory / f"{self.name}-{rank}") for rank in range(2)]


def kill(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:  # it has died with the other rank
        return False
    return True


def committed(keeper: Daemon) -> int:
    ctl = pathlib.Path(os.environ["SUPEROFFLOAD_BUILD"]) / "client" / "superoffloadctl"
    words = [ctl, f"--endpoint={keeper.endpoint}", "list", "--json"]
    while (listed := subprocess.run(words, capture_output=True, text=True)).returncode != 0:
        time.sleep(0.05)  # it is being restarted
    return max((int(o["committed_steps"]) for o in json.loads(listed.stdout)["optimizers"]), default=0)


def test_a_torchrun_job_survives_ten_kills(tmp_path):
    kills = int(os.environ.get("SUPEROFFLOAD_JOB_KILLS", "10"))
    seed = int(os.environ.get("SUPEROFFLOAD_SEED", random.randrange(1 << 30)))
    print(f"seed {seed}")
    chance = random.Random(seed)
    target = tmp_path / "target"
    target.write_text(str(10**9))
    keepers = [Daemon("--metrics_address=off", "--keeper", "--worker_threads=1") for _ in range(2)]
    job = Job(tmp_path, "killed", keepers)
    try:
        job.wait_steps(1)
        done = 0
        while done < kills:
            if chance.random() < 0.7:
                job.wait_steps(chance.randint(1, 10))
            time.sleep(chance.uniform(0.0, 0.5))
            assert job.process.poll() is None, job.log()
            victims = [(kind, rank) for kind in ("trainer", "daemon") for rank in (0, 1)]
            for kind, rank in chance.sample(victims, chance.choice([1, 1, 1, 2, 3])):
                done += done < kills and kill(getattr(job, kind)(rank))
        last = max(map(committed, keepers)) + 10
        target.write_text(str(last))
        kill(job.trainer(0))  # both ranks start once more, and read it
        killed = job.weights()
    finally:
        job.end()

    fresh = [Daemon("--metrics_address=off", "--worker_threads=1") for _ in range(2)]
    undisturbed = Job(tmp_path, "undisturbed", fresh).weights()
    print(f"{done} kills, {last} steps")
    for rank in range(2):
        for name, weight in undisturbed[rank].items():
            assert torch.equal(weight, killed[rank][name]), name
    for daemon in keepers + fresh:
        assert daemon.stop() == 0, daemon.log
