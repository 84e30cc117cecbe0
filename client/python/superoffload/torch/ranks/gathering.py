"""Gatherings over a process group of torch.distributed that say which ranks have not come."""

import contextlib
import datetime
import itertools
import pickle
import time
from typing import Any

import grpc
import torch
import torch.distributed

from superoffload._core.run import GroupFailed

_SLOW = datetime.timedelta(seconds=2)  # a rank that has waited so long puts itself on the roll
_ROLL_SECONDS = 4.0  # that is written by then, by whoever waits

_number = itertools.count()


_host_groups: dict[str, tuple[Any, Any]] = {}  # by name of a group: it, and the one beside it


def host_group(group: Any) -> Any:
    """A group of the same ranks that gathers what is in the CPU's memory: itself, or, beside NCCL's, one on gloo.

    NCCL would have the GPU wait for a rank that does not come, until its watchdog ends the process without a word on
    which rank that was. All ranks call it.
    """
    try:
        group._get_backend(torch.device("cpu"))
        return group
    except RuntimeError:
        known, beside = _host_groups.get(group.group_name, (None, None))
    if known is not group:
        ranks = torch.distributed.get_process_group_ranks(group)
        options = getattr(group._get_backend(torch.device("cuda")), "options", None)
        timeout = getattr(options, "_timeout", None)
        beside = torch.distributed.new_group(ranks, timeout, backend="gloo", use_local_synchronization=True)
        _host_groups[group.group_name] = group, beside
    return beside


class Gatherings:
    """All-gathers of one group, in the same order on all ranks; each must build it at the same place of its program.

    What is gathered is in the CPU's memory. A gathering that fails raises GroupFailed on the ranks that came, and the
    sentence names those that did not.
    """

    def __init__(self, rank: int, ranks: int, group: Any) -> None:
        self._rank, self._ranks, self._group = rank, ranks, host_group(group)
        self._prefix = f"superoffload/{next(_number)}"
        self._count = 0
        self._meeting = ("", 0)

    def absent(self, purpose: str, seconds: float) -> list[int]:
        """The ranks that have not called this for the same purpose within so long; then it can be repeated."""
        number = self._meeting[1] + 1 if self._meeting[0] == purpose else 1
        keys = [f"{self._prefix}/{purpose}/{number}/{rank}" for rank in range(self._ranks)]
        store = torch.distributed.distributed_c10d._get_default_store()
        store.set(keys[self._rank], "here")
        deadline = time.monotonic() + seconds
        while not store.check(keys) and time.monotonic() < deadline:  # wait() would keep others from the store
            time.sleep(0.01)
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        if missing:
            store.delete_key(keys[self._rank])
        else:
            self._meeting = purpose, number
        return missing

    def gather(self, own: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all ranks, in rank order; all have the shape of ``own``."""
        everybody = [torch.empty_like(own) for _ in range(self._ranks)]
        self._count += 1
        try:
            work = torch.distributed.all_gather(everybody, own, group=self._group, async_op=True)
            self._wait(work)
        except RuntimeError as error:
            raise self._absence(error) from error
        return everybody

    def exchange(self, own: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        """Each rank's piece of all ranks' bytes, in rank order; ``sent``, ``received``: how many to and from each."""
        theirs = torch.empty(sum(received), dtype=torch.uint8, device="cpu")
        self._count += 1
        try:
            self._wait(
                torch.distributed.all_to_all_single(theirs, own, received, sent, group=self._group, async_op=True)
            )
        except RuntimeError as error:
            raise self._absence(error) from error
        return theirs

    def gather_objects(self, message: Any) -> list[Any]:
        """Anything that can be pickled."""
        content = torch.frombuffer(bytearray(pickle.dumps(message)), dtype=torch.uint8)
        lengths = self.gather(torch.tensor([content.numel()], dtype=torch.int64, device="cpu"))
        own = torch.zeros(max(int(length) for length in lengths), dtype=torch.uint8, device="cpu")
        own[: content.numel()] = content
        everybody = self.gather(own)
        return [
            pickle.loads(theirs[: int(length)].numpy().tobytes())
            for theirs, length in zip(everybody, lengths, strict=True)
        ]

    def _wait(self, work: Any) -> None:
        try:
            work.wait(_SLOW)
        except RuntimeError:
            if work.is_completed():
                raise
            self._enter()
            work.wait()

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/{self._count}/{rank}"

    def _enter(self) -> Any:
        """Puts this rank on the roll of those who wait."""
        store = torch.distributed.distributed_c10d._get_default_store()
        store.set(self._key(self._rank), "waits")
        return store

    def _absence(self, error: RuntimeError) -> GroupFailed:
        missing = set(range(self._ranks)) - {self._rank}
        with contextlib.suppress(Exception):  # the roll is gone with the rank that had it
            store = self._enter()
            deadline = time.monotonic() + _ROLL_SECONDS
            while missing and time.monotonic() < deadline:
                missing = {rank for rank in missing if not store.check([self._key(rank)])}
                time.sleep(0.05)
        if missing:
            who = f"rank {', '.join(map(str, sorted(missing)))} of {self._ranks} did not come: it has died, or it hangs"
        else:
            who = "all ranks came, but the process group has failed"
        return GroupFailed(
            grpc.StatusCode.ABORTED,
            f"rank {self._rank} gathers what the ranks of the run agree on, and {who}; start the trainers of all ranks "
            f"anew, which go on at the same step ({str(error).splitlines()[0]})",
        )
