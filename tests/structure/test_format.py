"""Python files are as .ruff.toml says."""

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]


def ruff(*words):
    done = subprocess.run([sys.executable, "-m", "ruff", *words, "."], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_python_has_no_known_mistakes():
    ruff("check", "--no-cache")


def test_python_is_formatted():
    ruff("format", "--check", "--no-cache")
