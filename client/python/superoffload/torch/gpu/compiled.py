"""Modules that were compiled in place, with ``module.compile()``: each waits for its parameters in front of its graph.

Their own hooks are within what is compiled, where nothing can wait. What torch calls instead of the module is an
attribute of it, which neither copies nor pickles of the module take along.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch


class _Around:
    def __init__(
        self,
        before: Callable[[torch.nn.Module], None],
        after: Callable[[torch.nn.Module, Any], None],
        module: torch.nn.Module,
    ) -> None:
        self._before = before
        self._after = after
        self._module = module
        self._compiled = module._compiled_call_impl

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._compiled(*arguments, **named)
        self._before(self._module)
        output = None
        try:
            output = self._compiled(*arguments, **named)
        finally:
            self._after(self._module, output)
        return output


def call_around(
    module: torch.nn.Module,
    before: Callable[[torch.nn.Module], None],
    after: Callable[[torch.nn.Module, Any], None],
) -> None:
    """Has both called around what is compiled, also where the module was compiled anew since."""
    if is_in_place(module) and not isinstance(module._compiled_call_impl, _Around):
        module._compiled_call_impl = _Around(before, after, module)


def is_in_place(module: torch.nn.Module) -> bool:
    return module._compiled_call_impl is not None


def is_compiled(module: torch.nn.Module) -> bool:
    """In place, or it is what torch.compile(module) returned: a module, which has hooks of its own."""
    return is_in_place(module) or "_orig_mod" in module._modules


def outermost(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Compiled modules that no other one contains: calls of those within are part of what is compiled."""
    if is_compiled(module):
        yield module
    else:
        for child in module.children():
            yield from outermost(child)
