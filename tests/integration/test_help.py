"""Every program says what it is for when it is asked, and which version it is."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("asked", ["--help", "-h"])
def test_the_packages_program_prints_help(asked):
    done = subprocess.run([sys.executable, "-m", "superoffload", asked], capture_output=True, text=True)
    assert done.returncode == 0 and "superoffload plan --help" in done.stdout and "--version" in done.stdout


def test_the_packages_program_prints_its_version():
    done = subprocess.run([sys.executable, "-m", "superoffload", "--version"], capture_output=True, text=True)
    assert done.returncode == 0
    name, version = done.stdout.split()
    assert name == "superoffload" and len(version.split(".")) == 3
