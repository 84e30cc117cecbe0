"""The package's types hold, and a user's script is checked against them."""

import inspect
import pathlib
import subprocess
import sys

import pytest

from superoffload.jax import keywords as jax_keywords
from superoffload.jax import optimizer as jax_optimizer
from superoffload.torch import keywords as torch_keywords
from superoffload.torch import optimizer as torch_optimizer

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
MISSPELT = """
import superoffload.jax
import superoffload.torch

superoffload.torch.AdamW([], max_gradient_norm=1.0)
superoffload.torch.Adam([], bucket_byte=1)
superoffload.torch.Lion([], names="run")
superoffload.jax.adamw(1e-3, max_grad_norm=1.0)
superoffload.jax.adam(1e-3, mask=None)
superoffload.jax.lion(1e-3, leases=1.0)
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


def test_a_misspelt_keyword_is_found(cache, tmp_path):
    (tmp_path / "misspelt.py").write_text(MISSPELT)
    checked = mypy(tmp_path / "misspelt.py", cache=cache).stdout
    for word in ("max_gradient_norm", "bucket_byte", "names", "max_grad_norm", "mask", "leases"):
        assert f'Unexpected keyword argument "{word}"' in checked, checked


@pytest.mark.parametrize(("optimizer", "keywords"), [(torch_optimizer, torch_keywords), (jax_optimizer, jax_keywords)])
def test_type_checkers_know_every_keyword(optimizer, keywords):
    parameters = inspect.signature(optimizer.Optimizer.__init__).parameters.values()
    taken = {parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}
    assert taken == set(keywords.Keywords.__annotations__)
