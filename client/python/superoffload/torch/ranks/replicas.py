"""Brings the rows that other ranks' daemons host to the parameters of this one, and finds replicas that differ."""

from collections.abc import Callable, Iterator, Sequence

import grpc
import torch

from superoffload._core import run_step
from superoffload._core.error import Error
from superoffload._core.run_step import For
from superoffload.torch.ranks import shards
from superoffload.torch.ranks.matrices import Matrices
from superoffload.torch.ranks.sharding import Sharding, Share

_all_gather = getattr(torch.distributed, "all_gather_single", None) or torch.distributed.all_gather_into_tensor
_BATCH_BYTES = 64 << 20
_ALIGNMENT = 64


class Replicas:
    """All ranks make one, and call the same methods in the same order.

    ``digests``: one int64 of the bits of each tensor, and 0 of None.
    """

    def __init__(
        self,
        sharding: Sharding,
        matrices: Matrices,
        on_gpu: bool,
        digests: Callable[[Sequence[torch.Tensor | None]], torch.Tensor],
    ) -> None:
        self._matrices = matrices
        self._digests_of = digests
        self._sharding = sharding
        self._group = sharding.group
        shares = sharding.shares.values()
        # Rows that are looked after here: of which share, and which rank's; and their digests as they should be. On the
        # CPU the others' only: HostParameters looks after its own.
        self._rows = [
            (share, rank)
            for share in shares
            for rank in share.ranks
            if (on_gpu or rank != sharding.group.rank) and len(share.rows(rank)) > 0
        ]
        self._digests = torch.empty(0, dtype=torch.int64, device="cpu")
        self._sets: list[tuple[object, list[list[Share]]]] = []  # process groups, and what they gather in which batches
        self._owned = [share for share in shares if share.owner is not None]  # all ranks have these
        by_ranks: dict[tuple[int, ...], list[Share]] = {}
        for share in shares:
            if share.owner is None:
                by_ranks.setdefault(share.ranks, []).append(share)
        everybodys = self._group.gather_objects(sorted(by_ranks))
        for ranks in sorted({ranks for theirs in everybodys for ranks in theirs}):
            group = self._process_group(ranks)
            if ranks in by_ranks:
                self._sets.append((group, list(_batches(by_ranks[ranks]))))

    def _process_group(self, ranks: tuple[int, ...]) -> object:
        if len(ranks) == self._group.ranks:
            return self._group.group
        if self._group.rank not in ranks:
            return None
        members = [torch.distributed.get_global_rank(self._group.group, rank) for rank in ranks]
        return torch.distributed.new_group(members, use_local_synchronization=True)

    def has_any(self) -> bool:
        """Whether this rank has elements that others have as well."""
        return bool(self._sets or self._owned)

    @torch.no_grad()
    def gather(self) -> None:
        """Each rank's own rows are right; afterwards all are."""
        for group, batches in self._sets:
            for batch in batches:
                self._gather(group, batch)
        for share in self._owned:
            root = torch.distributed.get_global_rank(self._group.group, share.owner)
            torch.distributed.broadcast(shards.local(share.parameter).detach(), root, group=self._group.group)
        self._matrices.scatter_values()
        self.keep()

    def gather_whole(self) -> None:
        """Owners of sharded matrices have what is in the shards."""
        self._matrices.gather_values()

    def keep(self) -> None:
        """The rows that are looked after here are what they should be."""
        self._digests = self._digests_now()
        self._matrices.keep_values()

    def changed(self) -> list[str]:
        """Names of parameters of which somebody has written such rows since."""
        different = (self._digests != self._digests_now()).nonzero().flatten().tolist()
        names = [self._rows[index][0].name for index in different] + self._matrices.changed_values()
        return list(dict.fromkeys(names))

    def _digests_now(self) -> torch.Tensor:
        return self._digests_of([_local_rows(share, rank) for share, rank in self._rows])

    def _gather(self, group: object, batch: list[Share]) -> None:
        sizes = [_padded_bytes(share) for share in batch]
        ranks = batch[0].ranks
        device = shards.local(batch[0].parameter).device
        own = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
        for share, target in zip(batch, _rows(batch, own.split(sizes), self._group.rank), strict=True):
            target.copy_(_local_rows(share, self._group.rank))
        everybody = torch.empty(len(ranks), own.numel(), dtype=torch.uint8, device=device)
        _all_gather(everybody.view(-1), own, group=group)
        for rank, theirs in zip(ranks, everybody, strict=True):
            if rank != self._group.rank:
                for share, source in zip(batch, _rows(batch, theirs.split(sizes), rank), strict=True):
                    _local_rows(share, rank).copy_(source)

    def check_values(self) -> None:
        """Raises Error on all ranks where replicas of a parameter differ."""
        shared = [((share.ranks, share.name), share.parameter) for share in self._sharding.shares.values()]
        shared += [((ranks, matrix.name), matrix.parameter) for ranks, matrix in self._matrices.copies()]
        own = self._digests_of([shards.local(parameter).detach() for _, parameter in shared]).tolist()
        everybodys = self._group.gather_objects({key: digest for (key, _), digest in zip(shared, own, strict=True)})
        seen: dict[tuple[tuple[int, ...], str], tuple[int, int]] = {}
        for rank, theirs in enumerate(everybodys):
            for key, digest in theirs.items():
                first, expected = seen.setdefault(key, (rank, digest))
                if digest != expected:
                    raise Error(
                        grpc.StatusCode.FAILED_PRECONDITION,
                        f"parameter {key[1]} is whole, or replicated, on ranks {first} and {rank}, but its values "
                        "there differ; broadcast it from one rank first, or train parameters that differ in an "
                        "optimizer of each rank (replicas=False)",
                    )

    def check_gradients(self, whole: list[torch.nn.Parameter]) -> None:
        """Raises Error on all ranks where gradients of whole parameters differ, which nobody has reduced then."""
        if not whole:
            return
        total = 0
        for digest, parameter in zip(self._digests_of([p.grad for p in whole]).tolist(), whole, strict=True):
            total = (total * 6364136223846793005 + digest + (parameter.grad is not None)) % 2**64
        own = [float(total >> 32), float(total % 2**32)]
        for rank, theirs in enumerate(run_step.gather(self._group, For.GRADIENTS, own)):
            if theirs != own and rank != self._group.rank:
                raise Error(
                    grpc.StatusCode.FAILED_PRECONDITION,
                    f"gradients of whole parameters differ between ranks {self._group.rank} and {rank}, so nothing was "
                    "committed: nobody has averaged them over the ranks. DistributedDataParallel does; gradients of "
                    "parameters that FSDP ignores have to be all-reduced before step()",
                )


def gather_state(
    sharding: Sharding, matrices: Matrices, by_tensor: dict[int, dict[str, torch.Tensor]], keys: Sequence[str]
) -> None:
    """Completes what this rank's daemon has of each parameter's state, by id, to the elements that the rank has.

    All ranks call it. A rank that hosts no element takes the number of steps from others.
    """
    for tensor in sharding.trained:
        mine = by_tensor.get(id(tensor))
        share = sharding.shares.get(id(tensor))
        steps = None if mine is None else float(mine["step"])
        everybodys = sharding.group.gather_objects((share is not None, steps))
        known = [step for _, step in everybodys if step is not None]
        if not known:
            continue
        whole = dict(mine or {})
        matrix = matrices.of(tensor)
        if matrix is not None:
            whole |= matrices.scatter_state(matrix, whole, [key for key in keys if key != "step"])
        if any(shared for shared, _ in everybodys):
            rows = sharding.group.gather_objects(mine if share is not None else None)
            theirs = [rows[rank] for rank in share.ranks if rows[rank]] if share is not None else []
            for key in keys if theirs else []:
                whole[key] = torch.cat([row[key].reshape(row[key].shape or 1) for row in theirs])
        for key in keys:
            shape = shards.local(tensor).shape
            known_here = key in whole and key != "step"
            empty = torch.empty(shape, dtype=torch.float32, device="cpu")
            whole[key] = whole[key].reshape(shape) if known_here else empty
        whole["step"] = torch.tensor(max(known), dtype=torch.float32, device="cpu")
        by_tensor[id(tensor)] = whole


def _batches(shares: list[Share]) -> Iterator[list[Share]]:
    batch: list[Share] = []
    size = 0
    for share in shares:
        size += _padded_bytes(share) * len(share.ranks)
        if batch and size > _BATCH_BYTES:
            yield batch
            batch, size = [], _padded_bytes(share) * len(share.ranks)
        batch.append(share)
    if batch:
        yield batch


def _padded_bytes(share: Share) -> int:
    """Returns the bytes of the most rows that a rank hosts."""
    mine = shards.local(share.parameter)
    rows = mine.shape[0] if mine.dim() > 0 else 1
    size = -(-rows // len(share.ranks)) * (mine.nbytes // max(rows, 1))
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _local_rows(share: Share, rank: int) -> torch.Tensor:
    """Returns the rows in the parameter's memory, with its version counter."""
    mine = shards.local(share.parameter).detach()
    rows = share.rows(rank)
    return mine.view(1).narrow(0, 0, len(rows)) if mine.dim() == 0 else mine.narrow(0, rows.start, len(rows))


def _rows(batch: list[Share], buffers: tuple[torch.Tensor, ...], rank: int) -> Iterator[torch.Tensor]:
    """The rows of each in a buffer of bytes."""
    for share, buffer in zip(batch, buffers, strict=True):
        rows = _local_rows(share, rank)
        yield buffer[: rows.nbytes].view(rows.dtype).view(rows.shape)
