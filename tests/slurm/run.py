"""The scripts of deploy/slurm under a real Slurm: python -m tests.slurm.run PACKAGE.deb

By hand, as root, with the network: it makes a root of 400 MB in build/slurm-root and takes some minutes, most of them
for imports of torch.
"""

import json
import pathlib
import shutil
import sys

from tests.slurm.machines import NAMES, SHARED, TREE, Cluster, make_root

ROOT = TREE / "build" / "slurm-root"
RANKS = 4
LONG = 100_000  # steps of a job that does not end by itself


class Jobs:
    """What a user does."""

    def __init__(self, cluster):
        self.cluster, self.wait = cluster, cluster.machines["n1"].wait

    def submit(self, name, steps, *flags):
        words = ["sbatch", "--parsable", *flags, f"{SHARED}/run.sbatch", f"{SHARED}/trainer.py", name, str(steps)]
        return self.cluster.as_user(*words).stdout.strip()

    def state(self, job):
        shown = self.cluster.machines["n1"]("scontrol", "show", "job", job).stdout
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)["JobState"]

    def begun(self, name):
        """(step, host) of each start of each rank."""
        lines = [self._lines(name, rank) for rank in range(RANKS)]
        return [[(int(words[1]), words[2]) for words in its if words[0] == "begun"] for its in lines]

    def committed(self, name):
        """The last step that all ranks have done."""
        last = [self._lines(name, rank)[-1:] for rank in range(RANKS)]
        return min(int(words[0][0]) if words and words[0][0] != "begun" else 0 for words in last)

    def losses(self, name):
        return [{int(w[0]): w[1] for w in self._lines(name, rank) if w[0] != "begun"} for rank in range(RANKS)]

    def _lines(self, name, rank):
        told = self.cluster.shared / f"{name}.{rank}"
        whole = told.read_text().splitlines(keepends=True) if told.exists() else []
        return [line.split() for line in whole if line.endswith("\n")]

    def pid(self, name, rank):
        return int((self.cluster.shared / f"{name}.{rank}.pid").read_text())

    def wait_state(self, job, *states):
        self.wait(lambda: self.state(job) in states)

    def wait_steps(self, name, steps):
        self.wait(lambda: self.committed(name) >= steps)

    def wait_idle(self):
        self.wait(lambda: self.cluster.states() == {"idle"})

    def hosted(self):
        """{(machine, Superchip): names}"""
        found = {}
        for machine in NAMES:
            for superchip in (0, 1):
                control = f"--endpoint=unix:/run/superoffloadd-{superchip}/control.sock"
                listed = self.cluster.machines[machine]("superoffloadctl", control, "list", "--json").stdout
                found[machine, superchip] = sorted(o["name"] for o in json.loads(listed).get("optimizers", []))
        return found


def ranks_train_with_their_superchips_daemons_and_the_epilog_frees_them(jobs, undisturbed):
    job = jobs.submit("slurm-{job}-run", 150)
    name = f"slurm-{job}-run"
    jobs.wait_steps(name, 5)
    places = [(machine, superchip) for machine in NAMES for superchip in (0, 1)]
    assert jobs.hosted() == {place: [f"{name}.{rank}-of-{RANKS}"] for rank, place in enumerate(places)}
    jobs.wait_state(job, "COMPLETED")
    assert jobs.begun(name) == [[(0, "n1")], [(0, "n1")], [(0, "n2")], [(0, "n2")]]
    jobs.wait_idle()
    assert not any(jobs.hosted().values())
    undisturbed.extend(jobs.losses(name))


def a_killed_task_and_a_killed_daemon_cost_no_step(jobs, undisturbed):
    job = jobs.submit("slurm-{job}-run", 150)
    name = f"slurm-{job}-run"
    jobs.wait_steps(name, 20)
    jobs.cluster.machines["n2"]("kill", "-9", str(jobs.pid(name, 3)))
    jobs.wait(lambda: all(len(starts) == 2 for starts in jobs.begun(name)))
    jobs.wait_steps(name, 60)
    daemon = jobs.cluster.machines["n1"]("systemctl", "show", "-P", "MainPID", "superoffloadd@1").stdout.strip()
    jobs.cluster.machines["n1"]("kill", "-9", daemon)
    jobs.wait_state(job, "COMPLETED")
    for starts in jobs.begun(name):
        assert [step for step, _ in starts] == sorted({step for step, _ in starts})
        assert starts[1][0] >= 20
    assert jobs.losses(name) == undisturbed
    jobs.wait_idle()
    assert not any(jobs.hosted().values())


def a_cancelled_job_is_freed_and_others_stay(jobs, undisturbed):
    kept = jobs.submit("kept", 10)
    jobs.wait_state(kept, "COMPLETED")
    job = jobs.submit("slurm-{job}-run", LONG)
    jobs.wait_steps(f"slurm-{job}-run", 10)
    jobs.cluster.as_user("scancel", job)
    jobs.wait_state(job, "CANCELLED")
    jobs.wait_idle()
    assert sorted(sum(jobs.hosted().values(), [])) == [f"kept.{rank}-of-{RANKS}" for rank in range(RANKS)]


def a_job_that_is_queued_again_goes_on_by_name(jobs, undisturbed):
    job = jobs.submit("requeued", 150, "--requeue")
    jobs.wait_steps("requeued", 20)
    jobs.cluster.machines["n1"]("scontrol", "requeue", job)
    jobs.wait_state(job, "PENDING")
    jobs.wait_idle()
    assert all(f"requeued.{rank}-of-{RANKS}" in sum(jobs.hosted().values(), []) for rank in range(RANKS))
    jobs.cluster.machines["n1"]("scontrol", "update", f"jobid={job}", "starttime=now")
    jobs.wait_state(job, "COMPLETED")
    assert all(len(starts) == 2 and starts[1][0] >= 20 for starts in jobs.begun("requeued"))
    assert jobs.losses("requeued") == undisturbed


def a_node_whose_daemon_does_not_answer_is_drained(jobs, undisturbed):
    jobs.wait_idle()
    machine = jobs.cluster.machines["n2"]
    machine("systemctl", "mask", "--runtime", "--now", "superoffloadd@1.socket", "superoffloadd@1.service")
    job = jobs.submit("drained", LONG)
    jobs.wait(lambda: any(state.startswith("drain") for state in jobs.cluster.states()))
    assert jobs.committed("drained") == 0
    jobs.cluster.as_user("scancel", job)
    machine("systemctl", "unmask", "--runtime", "superoffloadd@1.socket", "superoffloadd@1.service")


SCENARIOS = (
    ranks_train_with_their_superchips_daemons_and_the_epilog_frees_them,
    a_killed_task_and_a_killed_daemon_cost_no_step,
    a_cancelled_job_is_freed_and_others_stay,
    a_job_that_is_queued_again_goes_on_by_name,
    a_node_whose_daemon_does_not_answer_is_drained,
)


def main():
    (package,) = sys.argv[1:]
    make_root(ROOT, pathlib.Path(package))
    shared = ROOT.with_name("slurm-shared")
    shutil.rmtree(shared, ignore_errors=True)
    undisturbed = []  # losses of each rank, which no death changes
    with Cluster(ROOT, shared) as cluster:
        for file in (TREE / "deploy/slurm/run.sbatch", TREE / "tests/slurm/trainer.py"):
            shutil.copy(file, shared)
        for scenario in SCENARIOS:
            print(scenario.__name__, flush=True)
            try:
                scenario(Jobs(cluster), undisturbed)
            except BaseException:
                for output in sorted(shared.glob("*.out"))[-1:]:
                    print(output.read_text()[-3000:])
                raise
    print(f"{len(SCENARIOS)} passed")


if __name__ == "__main__":
    main()
