"""Has optimizer classes of other packages ask us, once these packages are imported, whenever one is built.

Nothing of them is imported here, so that a process without torch starts as fast as ever.
"""

import functools
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

SWITCH = "SUPEROFFLOAD_STAND_INS"  # 0: off, also in a process in which they stand in already

_BITSANDBYTES = [
    f"{paged}{name}{bits}"
    for paged in ("", "Paged")
    for name in ("Adam", "AdamW", "Lion")
    for bits in ("", "8bit", "32bit")
]
# Modules, and the classes in them that are asked for.
CLASSES = {
    "torch.optim": ["Adam", "AdamW"],
    "bitsandbytes.optim": _BITSANDBYTES,
    "deepspeed.ops.adam": ["DeepSpeedCPUAdam"],
    "transformers.optimization": ["AdamW"],
}


def watch() -> None:
    """From now on; modules that are imported already count."""
    for name in CLASSES.keys() & sys.modules.keys():
        _replace(sys.modules[name])
    sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Finds what all others find, and is told when a module of ``CLASSES`` has been imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in CLASSES:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = None if find is None or finder is self else find(fullname, path, target)
            if spec is not None:
                _call_after(spec.loader, _replace)
                return spec
        return None


def _call_after(loader: Any, call: Callable[[ModuleType], None]) -> None:
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        loader.exec_module = execute
        execute(module)
        call(module)

    loader.exec_module = exec_module


def _replace(module: ModuleType) -> None:
    for name in CLASSES[module.__name__]:
        asked = getattr(module, name, None)
        if isinstance(asked, type):
            _ask(asked)


def _ask(asked: type) -> None:
    """An object of this very class is built by us; those of classes derived from it are as they were."""
    initialize: Callable[..., None] = asked.__init__  # type: ignore[misc]

    @functools.wraps(initialize)
    def build(self: Any, *arguments: Any, **named: Any) -> None:
        if type(self) is not asked or os.environ.get(SWITCH) == "0":
            initialize(self, *arguments, **named)
            return
        from superoffload.stand_ins import building

        building.build(self, initialize, arguments, named)

    asked.__init__ = build  # type: ignore[misc]
