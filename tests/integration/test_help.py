"""Every program says what it is for when it is asked, and which version it is."""

import os
import pathlib
import subprocess
import sys

import pytest
from tests.support.build_directory import BUILD

ROOT = pathlib.Path(__file__).parents[2]


def ask(*words):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}  # as python -m in this folder
    return subprocess.run(
        list(map(str, words)), capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120, env=environment
    )


def of_repository(pattern):
    listed = ask("git", "-C", ROOT, "ls-files", pattern)
    assert listed.returncode == 0, listed.stderr
    return [ROOT / name for name in listed.stdout.split()]


@pytest.mark.parametrize("asked", ["--help", "-h"])
def test_the_packages_program_prints_help(asked):
    done = ask(sys.executable, "-m", "superoffload", asked)
    assert done.returncode == 0 and "superoffload plan --help" in done.stdout and "--version" in done.stdout


def test_the_packages_program_prints_its_version():
    done = ask(sys.executable, "-m", "superoffload", "--version")
    assert done.returncode == 0
    name, version = done.stdout.split()
    assert name == "superoffload" and len(version.split(".")) == 3


@pytest.mark.parametrize(
    ("program", "flag"), [("server/superoffloadd", "--keeper"), ("client/superoffloadctl", "--json")]
)
def test_a_program_prints_help_and_ends_well(program, flag):
    done = ask(BUILD / program, "--help")
    assert done.returncode == 0 and done.stdout.startswith(f"{os.path.basename(program)}: ") and not done.stderr
    assert flag in done.stdout
    assert ask(BUILD / program, "--no-such-flag").returncode == 1


def test_so_does_everything_that_was_built():
    programs = [
        path
        for folder in ("server", "client", "kernels", "tests")
        for path in (BUILD / folder).rglob("*")
        if path.is_file() and os.access(path, os.X_OK) and ".so" not in path.name and "CMakeFiles" not in path.parts
    ]
    assert {"superoffloadd", "superoffload-plan", "adam_bench", "train_bigram"} <= {path.name for path in programs}
    for program in programs:
        done = ask(program, "--help")
        assert done.returncode == 0 and done.stdout and not done.stderr, (program, done)


def test_so_do_scripts():
    scripts = [path for path in of_repository("*.sh") if "\n# Usage: " in path.read_text()]
    scripts.remove(ROOT / "tests/support/runners.sh")  # for scripts that source it
    assert len(scripts) > 12
    for script in scripts:
        assert "--help" in script.read_text(), f"{script} would run"
        done = ask("bash", script, "--help")
        assert done.returncode == 0 and "usage: " in done.stdout.lower() and not done.stderr, (script, done)


def test_so_do_programs_in_python():
    programs = [path for path in of_repository("*.py") if "ArgumentParser(" in path.read_text()]
    programs = [path for path in programs if '\nif __name__ == "__main__":' in path.read_text()]
    assert len(programs) > 8
    for program in programs:
        done = ask(sys.executable, program, "--help")
        assert done.returncode == 0 and "usage: " in done.stdout, (program, done.stderr)
