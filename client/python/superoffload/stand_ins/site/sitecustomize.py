"""What every Python of ``superoffload run`` imports when it starts, because PYTHONPATH has this folder.

It must neither fail nor be slow, and the sitecustomize that it hides runs as without it.
"""

import importlib.machinery
import importlib.util
import os
import sys


def _run_hidden() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    others = [path for path in sys.path if os.path.abspath(path) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        sys.modules["sitecustomize"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


def _watch_imports() -> None:
    try:
        from superoffload.stand_ins import imports
    except ImportError as error:
        print(f"superoffload: {sys.executable} keeps its optimizers: {error}", file=sys.stderr)
    else:
        imports.watch()


_watch_imports()
_run_hidden()
