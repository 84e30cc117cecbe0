"""An adapter without its framework says what to install."""

import subprocess
import sys

import pytest

IMPORT = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == sys.argv[1] else find(name, *rest)
import importlib
importlib.import_module(f"superoffload.{sys.argv[1]}")
"""


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_missing_framework_names_its_extra(framework):
    done = subprocess.run([sys.executable, "-c", IMPORT, framework], capture_output=True, text=True)
    assert done.returncode != 0
    assert f"pip install 'superoffload[{framework}]'" in done.stderr
