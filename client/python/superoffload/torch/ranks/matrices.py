"""Whole matrices for algorithms that update such, of parameters of which each rank has a shard.

One rank's daemon hosts a matrix. In step() the owner gathers the shards of its gradient; after the verdict it scatters
the new parameters into the shards. Both travel in an all-to-all of bytes, in which a rank sends what others own and
receives what it owns, so that each shard crosses once, and all ranks send and receive at the same time.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import grpc
import torch

from superoffload._core import run_step
from superoffload._core.error import Error
from superoffload._core.run_step import For
from superoffload.torch.ranks import shards
from superoffload.torch.ranks.shards import Matrix

_BATCH_BYTES = 64 << 20  # of a rank, in one exchange
_ABSENT, _PRESENT, _NO_ELEMENT = range(3)


class Group(Protocol):
    """The ranks that train together; see sharding.py."""

    rank: int
    ranks: int

    def gather_objects(self, message: Any) -> list[Any]: ...
    def gather_doubles(self, values: list[float]) -> list[list[float]]: ...
    def gather_bytes(self, own: torch.Tensor) -> list[torch.Tensor]: ...
    def exchange(self, own: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor: ...


class Matrices:
    """All ranks make one, and call the same methods in the same order, but for those that say otherwise.

    ``digests``: one int64 of the bits of each tensor, and 0 of None.
    """

    def __init__(
        self,
        group: Group,
        matrices: Sequence[Matrix],
        digests: Callable[[Sequence[torch.Tensor | None]], torch.Tensor],
    ) -> None:
        self._digests_of = digests
        self._group = group
        self._matrices = list(matrices)
        self._by_parameter = {id(matrix.parameter): matrix for matrix in matrices}
        self._exchanges = list(_exchanges(self._matrices, group.ranks))
        # This rank's gradients, as they were: present, and digests.
        self._gathered: list[tuple[bool, int]] | None = None
        self._values: list[int] = []  # and of its parameters, as they should be

    def has_any(self) -> bool:
        return bool(self._matrices)

    def of(self, parameter: torch.Tensor) -> Matrix | None:
        return self._by_parameter.get(id(parameter))

    def check_stay(self, device: object) -> None:
        """Raises Error where they are to move to a GPU, or are not on the CPU. It alone calls it."""
        for matrix in self._matrices:
            where = matrix.parameter.device.type if device is None else "a GPU"
            if where != "cpu":
                raise Error(
                    grpc.StatusCode.UNIMPLEMENTED,
                    f"the algorithm updates whole matrices, and {matrix.name} is sharded, and is on {where} or moves "
                    "there: shards are gathered in the CPU's memory only; train on the CPU, or leave it out of "
                    "fully_shard (its ignored_params)",
                )

    # Gradients.

    @property
    def are_gathered(self) -> bool:
        """Whether the gradients of the open step are; of this rank alone, for which others may have forgotten it."""
        return self._gathered is not None

    def forget_gradients(self) -> None:
        """There is no open step. This rank alone calls it."""
        self._gathered = None
        for matrix in self._matrices:
            matrix.gradient = None

    def find_edited(self) -> str | None:
        """The matrix of which this rank's gradient has changed since it was gathered, if any. It alone calls it."""
        if self._gathered is None:
            return None
        pairs = zip(self._matrices, self._gathered, self._gradient_digests(), strict=True)
        return next((matrix.name for matrix, then, now in pairs if then != now), None)

    def on_scaled(self) -> None:
        """This rank's gradients were scaled, and those that were gathered stand for them still. It alone calls it."""
        if self._gathered is not None:
            self._gathered = self._gradient_digests()

    def agree(self, changed: bool) -> tuple[bool, bool]:
        """First: whether a rank has ``changed`` gradients since; second: whether all have the same ones gathered.

        Raises Error on all ranks where one refuses the step, or makes another call.
        """
        own = [float(changed), float(self.are_gathered)]
        everybody = run_step.gather(self._group, For.MATRICES, own)
        return any(theirs != 0 for theirs, _ in everybody), len({gathered for _, gathered in everybody}) == 1

    def check_gradients(self) -> None:
        """Raises Error for those of this rank that cannot be gathered. It alone calls it."""
        for matrix in self._matrices:
            gradient, mine = shards.gradient(matrix.parameter), shards.local(matrix.parameter)
            if gradient is None:
                continue
            expected = shards.gradient_dtype(matrix.parameter)
            if gradient.layout != torch.strided or gradient.dtype != expected or gradient.shape != mine.shape:
                raise Error(
                    grpc.StatusCode.FAILED_PRECONDITION,
                    f"the gradient of {matrix.name} is {gradient.layout} {list(gradient.shape)} {gradient.dtype}, but "
                    f"was to be dense {list(mine.shape)} {expected} when the optimizer was built; build a new one",
                )

    def gather_gradients(self) -> None:
        """Owners have whole gradients afterwards. Raises Error on all ranks unless all have those of the same ones."""
        if self.are_gathered:
            return
        present = self._agree_on_presence()
        gradients = [shards.gradient(matrix.parameter) for matrix in self._matrices]
        dtypes = [shards.gradient_dtype(matrix.parameter) for matrix in self._matrices]
        for batch in self._exchanges:
            batch = [index for index in batch if present[index]]
            mine = [gradients[index] for index in batch]
            wholes = self._gather([self._matrices[i] for i in batch], mine, [dtypes[i] for i in batch])
            for index, whole in zip(batch, wholes, strict=True):
                self._matrices[index].gradient = whole
        self._gathered = self._gradient_digests()

    def _agree_on_presence(self) -> list[bool]:
        rank = self._group.rank
        own = [
            _NO_ELEMENT if matrix.blocks[rank].elements == 0 else int(matrix.parameter.grad is not None)
            for matrix in self._matrices
        ]
        everybody = self._group.gather_bytes(torch.tensor(own, dtype=torch.uint8, device="cpu"))
        present = []
        for matrix, theirs in zip(self._matrices, torch.stack(everybody).t().tolist(), strict=True):
            if _ABSENT in theirs and _PRESENT in theirs:
                raise Error(
                    grpc.StatusCode.FAILED_PRECONDITION,
                    f"{matrix.name} has a gradient on rank {theirs.index(_PRESENT)} and none on rank "
                    f"{theirs.index(_ABSENT)}, so nothing was committed; all ranks call step() with gradients of the "
                    "same parameters",
                )
            present.append(_PRESENT in theirs)
        return present

    def _gradient_digests(self) -> list[tuple[bool, int]]:
        gradients = [shards.gradient(matrix.parameter) for matrix in self._matrices]
        present = [gradient is not None for gradient in gradients]
        return list(zip(present, self._digests_of(gradients).tolist(), strict=True))

    # Parameters.

    @torch.no_grad()
    def gather_values(self) -> None:
        """Owners have what is in the shards."""
        for batch in self._exchanges:
            matrices = [self._matrices[index] for index in batch]
            mine = [shards.local(matrix.parameter).detach() for matrix in matrices]
            for matrix, whole in zip(matrices, self._gather(matrices, mine, _dtypes(matrices)), strict=True):
                if matrix.whole is not None and whole is not None:
                    matrix.whole.copy_(whole)

    @torch.no_grad()
    def scatter_values(self) -> None:
        """Shards have what owners have. Those in which that changes nothing are not written."""
        for batch in self._exchanges:
            matrices = [self._matrices[index] for index in batch]
            values = self._scatter(matrices, [matrix.whole for matrix in matrices], _dtypes(matrices))
            for matrix, value in zip(matrices, values, strict=True):
                mine = shards.local(matrix.parameter).detach()
                if not torch.equal(_bytes(mine), _bytes(value)):
                    mine.copy_(value)

    def keep_values(self) -> None:
        """This rank's shards are what they should be."""
        self._values = self._value_digests()

    def changed_values(self) -> list[str]:
        """Names of matrices of which somebody has written this rank's shard since. It alone calls it.

        Raises Error for those that were replaced by others.
        """
        for matrix in self._matrices:
            mine, shape = shards.local(matrix.parameter), matrix.blocks[self._group.rank].shape
            if tuple(mine.shape) != shape or mine.dtype != matrix.dtype:
                raise Error(
                    grpc.StatusCode.FAILED_PRECONDITION,
                    f"parameter {matrix.name} is {list(mine.shape)} {mine.dtype} on this rank, but was {list(shape)} "
                    f"{matrix.dtype} when the optimizer was built; build a new one after changing it",
                )
        pairs = zip(self._matrices, self._values, self._value_digests(), strict=True)
        return [matrix.name for matrix, then, now in pairs if then != now]

    def copies(self) -> Iterator[tuple[tuple[int, ...], Matrix]]:
        """Those of which several ranks have this rank's block, with these ranks (a replicate dimension of the mesh)."""
        for matrix in self._matrices:
            holders = matrix.holders(self._group.rank)
            if len(holders) > 1 and matrix.blocks[self._group.rank].elements:
                yield holders, matrix

    def _value_digests(self) -> list[int]:
        return self._digests_of([shards.local(matrix.parameter).detach() for matrix in self._matrices]).tolist()

    # State.

    def scatter_state(
        self, matrix: Matrix, state: Mapping[str, torch.Tensor], keys: Sequence[str]
    ) -> dict[str, torch.Tensor]:
        """What this rank has of the arrays of a matrix's state; ``state``: the owner's, which are whole."""
        dtypes = self._group.gather_objects({key: state[key].dtype for key in keys if key in state})[matrix.owner]
        result = {}
        for key, dtype in dtypes.items():
            (result[key],) = self._scatter([matrix], [state.get(key)], [dtype])
        return result

    def gather_state(self, by_tensor: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
        """The state of matrices that this rank owns, by id of the parameter; given is what each rank has of it.

        Raises Error on all ranks unless all of them have the same arrays of it, whole or as the parameter is sharded.
        """
        result: dict[int, dict[str, Any]] = {}
        for matrix in self._matrices:
            given = by_tensor.get(id(matrix.parameter))
            dtypes = self._agree_on_state(matrix, given)
            if given is None:
                continue
            state = dict(given)
            for key, dtype in dtypes.items():
                (state[key],) = self._gather([matrix], [shards.local(given[key])], [dtype])
            if matrix.owner == self._group.rank:
                result[id(matrix.parameter)] = state
        return result

    def _agree_on_state(self, matrix: Matrix, given: Mapping[str, Any] | None) -> dict[str, torch.dtype]:
        """The arrays that are sharded."""
        block = matrix.blocks[self._group.rank]
        tensors = {key: value for key, value in (given or {}).items() if torch.is_tensor(value)}
        sharded = {key: value for key, value in tensors.items() if shards.is_sharded(value)}
        fits = all(tuple(shards.local(value).shape) == block.shape for value in sharded.values())
        own = given is None, fits, {key: value.dtype for key, value in sharded.items()}
        everybody = self._group.gather_objects(own)
        for rank, theirs in enumerate(everybody):
            if theirs != everybody[0] or not theirs[1]:
                raise Error(
                    grpc.StatusCode.INVALID_ARGUMENT,
                    f"the state of {matrix.name} is not the same on ranks 0 and {rank}, or is not sharded as the "
                    "parameter is; have all ranks load what torch_state_dict() returned on them",
                )
        return own[2]

    # Between ranks.

    def _gather(
        self, matrices: Sequence[Matrix], mine: Sequence[torch.Tensor | None], dtypes: Sequence[torch.dtype]
    ) -> list[torch.Tensor | None]:
        """Whole tensors on their owners, None elsewhere, of what each rank has."""
        rank, everybody = self._group.rank, range(self._group.ranks)
        wholes = [
            torch.empty(matrix.parameter.shape, dtype=dtype, device="cpu") if matrix.owner == rank else None
            for matrix, dtype in zip(matrices, dtypes, strict=True)
        ]
        sent: list[list[torch.Tensor]] = [[] for _ in everybody]
        received: list[list[torch.Tensor]] = [[] for _ in everybody]
        for matrix, own, whole in zip(matrices, mine, wholes, strict=True):
            sources = matrix.sources()
            if rank in sources:
                assert own is not None, "it has elements, and all agree on what there is"
                sent[matrix.owner].append(own)
            for other in sources if whole is not None else ():
                received[other].append(matrix.blocks[other].of(whole))
        self._exchange(sent, received)
        return wholes

    def _scatter(
        self, matrices: Sequence[Matrix], wholes: Sequence[torch.Tensor | None], dtypes: Sequence[torch.dtype]
    ) -> list[torch.Tensor]:
        """What this rank has of tensors that owners have whole."""
        rank, everybody = self._group.rank, range(self._group.ranks)
        mine = [
            torch.empty(matrix.blocks[rank].shape, dtype=dtype, device="cpu")
            for matrix, dtype in zip(matrices, dtypes, strict=True)
        ]
        sent: list[list[torch.Tensor]] = [[] for _ in everybody]
        received: list[list[torch.Tensor]] = [[] for _ in everybody]
        for matrix, own, whole in zip(matrices, mine, wholes, strict=True):
            if matrix.owner == rank:
                assert whole is not None, "the owner has it"
                for other in matrix.receivers():
                    sent[other].append(matrix.blocks[other].of(whole))
            if matrix.blocks[rank].elements:
                received[matrix.owner].append(own)
        self._exchange(sent, received)
        return mine

    def _exchange(self, sent: list[list[torch.Tensor]], received: list[list[torch.Tensor]]) -> None:
        """Copies what each rank sends here into ``received``. Both are by rank, in the same order on both ends."""
        nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
        own = torch.cat([nothing, *(_bytes(tensor) for theirs in sent for tensor in theirs)])
        sizes = [[sum(tensor.nbytes for tensor in theirs) for theirs in side] for side in (sent, received)]
        rest = self._group.exchange(own, *sizes)
        for target in (tensor for theirs in received for tensor in theirs):
            piece, rest = rest.split([target.nbytes, rest.numel() - target.nbytes])
            aligned = piece if piece.storage_offset() % target.element_size() == 0 else piece.clone()
            target.copy_(aligned.view(target.dtype).view(target.shape))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _dtypes(matrices: Sequence[Matrix]) -> list[torch.dtype]:
    return [matrix.dtype for matrix in matrices]


def _exchanges(matrices: Sequence[Matrix], ranks: int) -> Iterator[list[int]]:
    """Indices of those that are exchanged at once: of each owner as many, where there are, so that none waits."""
    owned = [0] * ranks
    turns = []
    for index, matrix in enumerate(matrices):
        turns.append((owned[matrix.owner], index))
        owned[matrix.owner] += 1
    batch: list[int] = []
    size = 0
    for _, index in sorted(turns):
        nbytes = matrices[index].parameter.numel() * matrices[index].parameter.element_size()
        if batch and size + nbytes > _BATCH_BYTES * ranks:
            yield batch
            batch, size = [], 0
        batch.append(index)
        size += nbytes
    if batch:
        yield batch
