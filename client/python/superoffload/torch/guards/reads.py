"""Finds code that reads parameters between step() and the next forward pass, when new ones may be half there.

Averages of weights, copies of the model and logged norms are such code: no module is called, so no hook waits. A
dispatch mode of torch sees every operation on tensors, and what it is given. It costs some microseconds for each, and
the modes of a thread must end in the reverse order of their beginning. So it is there after some steps only, and not
inside of modes of others. Parameters that stream share their places: nobody may use one out of its block, and in the
first steps such a mode looks after that.
"""

import abc
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _python_dispatch
from torch.utils._pytree import tree_leaves

from superoffload.torch.guards.own_operations import are_ours
from superoffload.torch.hooks import weakly
from superoffload.torch.ranks import shards
from superoffload.torch.ranks.shards import HostedParameter


class _Mode(_python_dispatch.TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, looks_at: Callable[[torch.Tensor], bool | None]) -> None:
        super().__init__()
        self.looks_at: Callable[[torch.Tensor], bool | None] | None = looks_at
        self.thread = threading.get_ident()  # autograd's threads have it on their stacks as well
        self.inference = torch.is_inference_mode_enabled()  # whose end restores what of the stack torch keeps elsewhere
        self.orphaned = False  # its watch has gone while another mode was above it

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # else torch.compile compiles nothing meanwhile

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        looks_at = self.looks_at
        if looks_at is not None and not are_ours() and not getattr(function, "is_view", False):
            for given in tree_leaves((args, kwargs)):
                if isinstance(given, torch.Tensor) and looks_at(given):
                    break
        return function(*args, **(kwargs or {}))


def _pop(mode: _Mode) -> bool:
    """Whether it could be taken away from this thread.

    Under another mode it cannot, nor inside of an inference mode that began later or of a backward pass, whose ends
    restore the stack. It does nothing until it can.
    """
    mode.looks_at = None
    popped = _python_dispatch._get_current_dispatch_mode() is mode and _may_pop(mode)
    if popped:
        mode.__exit__(None, None, None)
    drop_orphans()
    return popped


def drop_orphans() -> None:
    """Ends modes whose watch has gone, as far as none is above them."""
    while isinstance(mode := _python_dispatch._get_current_dispatch_mode(), _Mode) and mode.orphaned:
        if not _may_pop(mode):
            break
        mode.__exit__(None, None, None)


def _may_pop(mode: _Mode) -> bool:
    here = mode.thread == threading.get_ident() and not _in_backward()
    return here and torch.is_inference_mode_enabled() == mode.inference


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


class _Watch(abc.ABC):
    """Looks at what operations of this thread, and of autograd's, are given that lies in the parameters' memory."""

    def __init__(self, hosted: list[HostedParameter]) -> None:
        self._ranges = [(p.theta.data_ptr(), p.theta.data_ptr() + p.theta.nbytes) for p in hosted]
        self._first, self._end = (0, 0)
        if hosted:
            self._first, self._end = min(self._ranges)[0], max(end for _, end in self._ranges)
            self._device = hosted[0].theta.device
        self._mode: _Mode | None = None  # on the stack of a thread

    def begin(self) -> None:
        self.end()
        if not self._ranges or self._mode is not None:
            return
        if isinstance(_python_dispatch._get_current_dispatch_mode(), _Mode | None) and not _in_backward():
            self._mode = _Mode(weakly(self._look_at, passes=1))
            self._mode.__enter__()

    def end(self) -> None:
        if self._mode is not None and _pop(self._mode):
            self._mode = None

    def __del__(self) -> None:
        self.end()
        if self._mode is not None:
            self._mode.orphaned = True

    def _look_at(self, tensor: torch.Tensor) -> bool:
        """Whether nothing more of the operation is of interest."""
        mine = shards.local(tensor)
        if mine.device != self._device or mine.layout != torch.strided:
            return False
        try:
            address = mine.data_ptr()
        except RuntimeError:  # it has no memory
            return False
        if not self._first <= address < self._end:
            return False
        return self._found(tensor, address)

    @abc.abstractmethod
    def _found(self, tensor: torch.Tensor, address: int) -> bool:
        """As `_look_at`, of a tensor that may lie in a parameter's memory."""


class ReadWatch(_Watch):
    """``on_read`` is called before the first operation that reads or writes one of the parameters, with its index."""

    def __init__(self, hosted: list[HostedParameter], on_read: Callable[[int], None]) -> None:
        super().__init__(hosted)
        self._on_read = on_read

    def _found(self, tensor: torch.Tensor, address: int) -> bool:
        for index, (first, end) in enumerate(self._ranges):
            if first <= address < end:
                self.end()
                self._on_read(index)
                return True
        return False


class UseWatch(_Watch):
    """``check_use`` is called before every operation on one of the parameters, or on another one in its place.

    It is given the parameter, or a view of it, and the indices of those that it may be.
    """

    def __init__(self, hosted: list[HostedParameter], check_use: Callable[[torch.Tensor, Sequence[int]], None]) -> None:
        super().__init__(hosted)
        self._check_use = check_use

    def _found(self, tensor: torch.Tensor, address: int) -> bool:
        self._check_use(tensor, [i for i, (first, end) in enumerate(self._ranges) if first <= address < end])
        return False
