"""What ``optimizer.state`` has of each parameter."""

import weakref
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, Protocol

import grpc
import torch

from superoffload._core.error import Error


class Values(Protocol):
    """The daemon's values of all parameters, by index; see written.py."""

    def torch_keys(self) -> tuple[str, ...]: ...
    def state_keys(self) -> tuple[str, ...]: ...
    def copy_of_state(self, index: int, key: str) -> torch.Tensor: ...
    def set_state(self, index: int, key: str, value: Any) -> None: ...


class ParameterState:
    """What torch has in ``optimizer.state[parameter]``, and the fp32 ``master``: copies of the present moment.

    What is written to them goes to the daemon before the next step. Other keys are the loop's. It has a mapping's
    methods and is no Mapping to isinstance(): Lightning rebuilds mappings, with all that is in them, in order to move
    them from the GPU.
    """

    keys, values, items = Mapping.keys, Mapping.values, Mapping.items
    get = Mapping.get
    update, setdefault = MutableMapping.update, MutableMapping.setdefault

    def __init__(self, values: Values, index: int) -> None:
        self._values: Values = weakref.proxy(values)
        self._index = index
        self._keys = values.state_keys()
        self.others: dict[Any, Any] = {}  # than the daemon's
        self.is_cleared = False

    def __getitem__(self, key: str) -> Any:
        if key in self.others:
            return self.others[key]
        if key not in self:
            raise KeyError(key)
        return self._values.copy_of_state(self._index, key)

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in self._keys:
            self.others[key] = value
            return
        if self.is_cleared:
            raise Error(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"the state of this parameter was cleared, and {key} is set in it; assign all of it as one: "
                f"optimizer.state[parameter] = {{{', '.join(map(repr, self._values.torch_keys()))}: ...}}",
            )
        self._values.set_state(self._index, key, value)

    def __delitem__(self, key: str) -> None:
        if key in self._keys:
            raise Error(
                grpc.StatusCode.UNIMPLEMENTED,
                f"{key} cannot be deleted alone; optimizer.state[parameter].clear() has the parameter begin anew",
            )
        del self.others[key]

    def pop(self, key: str, *default: Any) -> Any:
        return self.others.pop(key, *default) if key not in self._keys else self.__delitem__(key)

    def clear(self) -> None:
        """The parameter begins anew with the next step, as in torch."""
        self.others.clear()
        self.is_cleared = True

    def __iter__(self) -> Iterator[str]:
        return iter(list(self.others) if self.is_cleared else [*self._keys, *self.others])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __contains__(self, key: object) -> bool:
        return key in list(iter(self))
