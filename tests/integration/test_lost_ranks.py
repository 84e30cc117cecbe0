"""What the other ranks of a run are told, and can do, when a rank hangs or its machine's memory is lost."""

import os
import pathlib
import subprocess

from tests.conftest import Daemon
from tests.support.rank_processes import Run, equal

CTL = pathlib.Path(os.environ["SUPEROFFLOAD_BUILD"]) / "client" / "superoffloadctl"


def save(daemon: Daemon, name: str, directory: pathlib.Path, step: int) -> None:
    """This rank's part; the last one makes the whole."""
    words = ["checkpoint", name, directory, f"--step={step}"]
    subprocess.run([CTL, f"--endpoint={daemon.endpoint}", *words], check=True, timeout=60)


def test_ranks_that_do_not_come_are_named_and_a_checkpoint_takes_all_back(tmp_path, monkeypatch):
    daemons = [Daemon("--metrics_address=off") for _ in range(2)]
    options = {"name": "lost", "sync": "pull_params"}
    undisturbed = Run(daemons, tmp_path / "first", {}, {**options, "steps": 3}).results()[0][0]
    for rank, daemon in enumerate(daemons):
        save(daemon, f"lost.{rank}-of-2", tmp_path / "saved", step=3)
    saved = str(tmp_path / "saved")

    # A job may always pass restore=: where nothing is lost, it goes on.
    monkeypatch.setenv("GROUP_SECONDS", "12")
    hung = Run(daemons, tmp_path / "hangs", {**options, "restore": saved, "die_at": [1, 4, "hangs"]})
    _, told = hung.processes[0].communicate(timeout=120)
    assert "rank 1 of 2 did not come: it has died, or it hangs" in told
    assert "the step is prepared, and other ranks may have committed it" in told
    hung.processes[1].kill()
    hung.processes[1].communicate(timeout=60)
    monkeypatch.delenv("GROUP_SECONDS")

    assert daemons[1].stop() == 0, daemons[1].log  # with its memory
    daemons[1] = Daemon("--metrics_address=off")
    for result in Run(daemons, tmp_path / "lost", options, {**options, "restore": saved}).results():
        refused, restored = result
        assert (
            "rank 1 has no optimizer in its daemon while others are at step 4: its memory was lost" in refused["error"]
        )
        assert "restore=" in refused["error"] and "DATA_LOSS" in refused["error"]
        assert restored["begun"] == 3
        equal(restored, undisturbed)
    for daemon in daemons:
        assert daemon.stop() == 0, daemon.log
