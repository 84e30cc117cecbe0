"""Every program says what it is for when it is asked, and which version it is."""

import os
import subprocess
import sys

import pytest
from tests.support.build_directory import BUILD


@pytest.mark.parametrize("asked", ["--help", "-h"])
def test_the_packages_program_prints_help(asked):
    done = subprocess.run([sys.executable, "-m", "superoffload", asked], capture_output=True, text=True)
    assert done.returncode == 0 and "superoffload plan --help" in done.stdout and "--version" in done.stdout


def test_the_packages_program_prints_its_version():
    done = subprocess.run([sys.executable, "-m", "superoffload", "--version"], capture_output=True, text=True)
    assert done.returncode == 0
    name, version = done.stdout.split()
    assert name == "superoffload" and len(version.split(".")) == 3


@pytest.mark.parametrize(
    ("program", "flag"), [("server/superoffloadd", "--keeper"), ("client/superoffloadctl", "--json")]
)
def test_a_program_prints_help_and_ends_well(program, flag):
    done = subprocess.run([BUILD / program, "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith(f"{os.path.basename(program)}: ") and not done.stderr
    assert flag in done.stdout
    assert subprocess.run([BUILD / program, "--no-such-flag"], capture_output=True).returncode == 1
