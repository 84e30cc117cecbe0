"""A model's parameters: they change in step() and nowhere else, and what others write to them is found.

Those on a GPU: _torch_gpu_live.py.
"""

import abc

import grpc
import torch

from superoffload import _memory
from superoffload._error import Error
from superoffload._torch_parameters import HostedParameter


class LiveParameters(abc.ABC):
    """The model's side of the published parameters."""

    def __init__(self, hosted: list[HostedParameter]) -> None:
        self._hosted = hosted

    @abc.abstractmethod
    def adopt(self) -> None:
        """The model's parameters become the published ones."""

    @abc.abstractmethod
    def before_step(self) -> None:
        """A step is about to begin: the published parameters are still those of the last one."""

    @abc.abstractmethod
    def on_commit(self) -> None:
        """A step was committed, and its parameters are published."""

    @abc.abstractmethod
    def push(self) -> None:
        """The published memory becomes the model's parameters."""

    @abc.abstractmethod
    def keep(self) -> None:
        """The model's parameters are what they should be: the published ones."""

    @abc.abstractmethod
    def changed(self) -> list[str]:
        """Names of parameters that somebody else has written or replaced."""

    @abc.abstractmethod
    def close(self) -> None:
        """The model's parameters are where nothing of the attachment is needed."""

    def check(self) -> None:
        for parameter in self._hosted:
            tensor, theta = parameter.tensor, parameter.theta
            if tensor.dtype != theta.dtype or tensor.shape != theta.shape or tensor.device != theta.device:
                raise Error(
                    grpc.StatusCode.FAILED_PRECONDITION,
                    f"parameter {parameter.name} is {list(tensor.shape)} {tensor.dtype} on {tensor.device}, but was "
                    f"{list(theta.shape)} {theta.dtype} on {theta.device}; build a new optimizer after changing it",
                )
        changed = self.changed()
        if changed:
            others = f" and {len(changed) - 1} more were" if len(changed) > 1 else " was"
            raise Error(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"parameter {changed[0]}{others} changed by somebody else than the optimizer, and nothing was "
                "committed; call push_params() to make the model's parameters the masters, or pull_params() to undo "
                "the change, and then step() again",
            )


class HostParameters(LiveParameters):
    """On the CPU they are the model's own tensors, wherever it put them; digests tell whether they changed."""

    def __init__(self, hosted: list[HostedParameter]) -> None:
        super().__init__(hosted)
        self._digests: list[int] = []

    def before_step(self) -> None:
        pass  # the digests are there

    def on_commit(self) -> None:
        self.adopt()

    def adopt(self) -> None:
        runs = []
        for parameter in self._hosted:
            tensor, theta = parameter.tensor, parameter.theta
            copies = tensor.is_contiguous()
            if not copies:
                tensor.data.copy_(theta)
            runs.append((theta.data_ptr(), tensor.data_ptr() if copies else None, theta.nbytes))
        self._digests = _memory.copy_and_digest(runs, torch.get_num_threads())
        torch.autograd.graph.increment_version([parameter.tensor for parameter in self._hosted])

    def push(self) -> None:
        for parameter in self._hosted:
            parameter.theta.copy_(parameter.tensor.detach())

    def close(self) -> None:
        pass

    def keep(self) -> None:
        self._digests = self._digests_now()

    def changed(self) -> list[str]:
        now = self._digests_now()
        return [p.name for p, then, digest in zip(self._hosted, self._digests, now, strict=True) if then != digest]

    def _digests_now(self) -> list[int]:
        tensors = [parameter.tensor.detach().contiguous() for parameter in self._hosted]  # itself where it is
        runs = [(tensor.data_ptr(), None, tensor.nbytes) for tensor in tensors]
        return _memory.copy_and_digest(runs, torch.get_num_threads())
