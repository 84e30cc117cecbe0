"""Python files are as .ruff.toml says, C++ and CUDA files as .clang-format does."""

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]
SOURCES = ("*.h", "*.hpp", "*.cc", "*.cu", "*.cuh")


def ruff(*words):
    done = subprocess.run([sys.executable, "-m", "ruff", *words, "."], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_python_has_no_known_mistakes():
    ruff("check", "--no-cache")


def test_python_is_formatted():
    ruff("format", "--check", "--no-cache")


def test_cpp_is_formatted():
    listed = subprocess.run(["git", "ls-files", "-z", *SOURCES], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [name for name in listed.stdout.split("\0") if name]
    assert files
    clang_format = pathlib.Path(sys.executable).with_name("clang-format")
    done = subprocess.run([clang_format, "--dry-run", "-Werror", *files], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
