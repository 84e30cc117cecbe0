"""superoffload._core is every framework's: it imports none."""

import pathlib
import subprocess
import sys

import superoffload._core

IMPORTS = """
import importlib, pkgutil, sys
for framework in ("torch", "jax", "numpy"):
    sys.modules[framework] = None  # importing it raises
import superoffload, superoffload._core
for module in pkgutil.iter_modules(superoffload._core.__path__):
    importlib.import_module(f"superoffload._core.{module.name}")
    print(module.name)
"""


def test_imports_no_framework():
    out = subprocess.run([sys.executable, "-c", IMPORTS], check=True, capture_output=True, text=True).stdout
    here = pathlib.Path(superoffload._core.__file__).parent
    assert set(out.split()) == {path.stem for path in here.glob("*.py")} - {"__init__"}
