"""Trainer and daemon die at random instants; training ends with the bits of an undisturbed run."""

import pathlib
import re
import subprocess

RUN = pathlib.Path(__file__).parent / "run.sh"


def test_two_hundred_kills_change_no_bit():
    run = subprocess.run([RUN, "--kills", "200"], capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.fullmatch(r"kills=200 mismatches=0", run.stdout.splitlines()[-1]), run.stdout
