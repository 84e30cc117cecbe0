"""The package's types hold, and a user's script is checked against them."""

import pathlib
import subprocess
import sys

import pytest

PACKAGE = pathlib.Path(__file__).parents[2] / "client/python"

RIGHT = """
import superoffload.torch

def build(parameters: list) -> superoffload.torch.AdamW:
    schedule = superoffload.torch.CheckpointSchedule(every_steps=1000, directory="/ckpt")
    optimizer = superoffload.torch.AdamW(parameters, lr=1e-2, max_grad_norm=0.25, name="run", checkpoint=schedule)
    optimizer.save_checkpoint("/ckpt/by-hand")
    return optimizer
"""
WRONG = """
import superoffload.torch

superoffload.torch.CheckpointSchedule(every_steps="often", directory="/ckpt")
superoffload.torch.AdamW([], lr="small")
"""


def mypy(*words, cache):
    return subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", PACKAGE / "pyproject.toml", "--cache-dir", cache, *words],
        capture_output=True,
        text=True,
        cwd=PACKAGE,  # as an installed package is on mypy's path
    )


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("mypy")


def test_the_package_is_typed(cache):
    checked = mypy(cache=cache)
    assert checked.returncode == 0, checked.stdout


def test_a_users_script_is_checked(cache, tmp_path):
    (tmp_path / "right.py").write_text(RIGHT)
    (tmp_path / "wrong.py").write_text(WRONG)
    right = mypy(tmp_path / "right.py", cache=cache)
    assert right.returncode == 0, right.stdout
    wrong = mypy(tmp_path / "wrong.py", cache=cache).stdout
    assert 'incompatible type "str"; expected "int"' in wrong and 'expected "float"' in wrong, wrong
