"""Which modules this thread is calling, as its stack shows: torch tells it in no other way."""

import sys
import types

import torch

# Of torch._dynamo.eval_frame: a call of what was compiled; by older releases' name, too.
_COMPILED_REGION = ("compile_wrapper", "_fn")
_CAPTURING = "make_graphed_callables"


def modules_around_compiled() -> list[torch.nn.Module]:
    """Returns the modules that this thread is calling, outermost last, up to what a compiled region begins with."""
    modules: list[torch.nn.Module] = []
    entered = False
    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        name = frame.f_code.co_name
        if name in _COMPILED_REGION and frame.f_globals.get("__name__") == "torch._dynamo.eval_frame":
            entered = True
            modules = []  # those before were inside
        elif frame.f_code is torch.nn.Module._wrapped_call_impl.__code__:
            modules.append(frame.f_locals["self"])
        frame = frame.f_back
    return modules if entered else []


def graphed_module() -> torch.nn.Module | None:
    """What torch.cuda.make_graphed_callables is capturing, if that is a module: its hooks run before each replay."""
    outermost: torch.nn.Module | None = None
    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is torch.nn.Module._call_impl.__code__:
            outermost = frame.f_locals["self"]
        elif frame.f_code.co_name == _CAPTURING and frame.f_globals.get("__name__") == "torch.cuda.graphs":
            given = frame.f_locals.get("callables", ())
            return outermost if any(module is outermost for module in given) else None
        frame = frame.f_back
    return None
