"""The pytree of init(): which of its leaves the daemon hosts, which are frozen, which offloaded layers hand over."""

from collections.abc import Mapping, Sequence
from typing import Any

import grpc
import jax
import numpy as np

from superoffload._core.error import Error
from superoffload.jax import arrays, replicas, streams, tree
from superoffload.jax.streams import Weights
from superoffload.jax.tree import HostedLeaf


class HostedTree:
    """``params``: as given to init(). ``groups``: of each of its leaves. ``weights``: which of them stream."""

    def __init__(self, params: Any, trainable: Any, groups: Sequence[int], weights: Weights) -> None:
        leaves, self._structure = tree.named_leaves(params)
        self._trained = tree.collect(params, trainable, groups)
        by_this_process = [leaf for leaf in self._trained if leaf.placement.part is not None]
        for process in range(jax.process_count()):  # all come to the same
            if not any(process in leaf.placement.parts for leaf in self._trained):
                raise Error(
                    grpc.StatusCode.UNIMPLEMENTED,
                    f"there is nothing that process {process} could host: the parameters have too few elements; train "
                    "with fewer processes",
                )
        self.hosted, self.gpu = streams.place(by_this_process, weights)
        self._names = [name for name, _ in leaves]
        self._by_name = {leaf.name: index for index, leaf in enumerate(self.hosted)}
        positions = {leaf.position for leaf in self._trained}
        self._frozen = {place: leaf for place, (_, leaf) in enumerate(leaves) if place not in positions}
        self._claimed: list[str] = []  # names of offloaded layers

    # Pytrees in, leaves out.

    def match(self, other: Any, what: str) -> list[Any]:
        """The hosted leaves of a pytree with the same names; one may be None. Raises Error when it is another."""
        leaves, _ = tree.named_leaves(other)
        self._check_names(leaves, what)
        found = [leaves[leaf.position][1] for leaf in self.hosted]
        for leaf, value in zip(self.hosted, found, strict=True):
            if value is not None and not streams.has_no_value(value, leaf):
                tree.check_like(leaf, value, what)
        return found

    def frozen(self, params: Any, traced: bool = False) -> Mapping[int, Any]:
        """The frozen leaves of ``params``; None: of init()."""
        if params is not None:
            leaves, _ = tree.named_leaves(params)
            self._check_names(leaves, "params")
            return {place: leaves[place][1] for place in self._frozen}
        if traced and any(leaf is not None for leaf in self._frozen.values()):
            raise Error(
                grpc.StatusCode.INVALID_ARGUMENT,
                "some leaves are frozen: inside of jit pass step(gradients, params=params), from which they are taken",
            )
        return self._frozen

    def _check_names(self, leaves: tree.Leaves, what: str) -> None:
        tree.check_names(self._names, [name for name, _ in leaves], what)

    def assemble_parts(self, parts: Sequence[np.ndarray], frozen: Mapping[int, Any] | None = None) -> Any:
        """The pytree of what this process hosts of the leaves, and of what others do. All processes call it."""
        hosted = {leaf.position: part for leaf, part in zip(self.hosted, parts, strict=True)}
        memories = []
        for leaf in self._trained:
            part, place = hosted.get(leaf.position), leaf.placement
            if part is None or place.divided:
                memory = arrays.empty(place.local.shape, leaf.dtype)
                if part is not None:
                    memory[leaf.part.slices_in(place.local)] = part
            else:
                memory = part
            memories.append(memory)
        replicas.exchange(self._trained, memories)
        leaves = [
            arrays.to_jax(memory, leaf.placement.local, leaf.shape, leaf.sharding)
            for leaf, memory in zip(self._trained, memories, strict=True)
        ]
        return self._assemble(self._trained, leaves, frozen)

    def assemble(self, leaves: Sequence[Any], frozen: Mapping[int, Any] | None = None) -> Any:
        """The pytree of the hosted leaves, where this process hosts all."""
        return self._assemble(self.hosted, leaves, frozen)

    def _assemble(self, own: Sequence[HostedLeaf], leaves: Sequence[Any], frozen: Mapping[int, Any] | None) -> Any:
        frozen = self._frozen if frozen is None else frozen
        flat = [frozen.get(place) for place in range(len(self._names))]
        for leaf, value in zip(own, leaves, strict=True):
            flat[leaf.position] = value
        return jax.tree.unflatten(self._structure, flat)

    def without_streamed(self, params: Any) -> Any:
        """With arrays without elements for the leaves that stream; itself where none does."""
        if not any(leaf.streams for leaf in self.hosted):
            return params
        leaves, structure = tree.named_leaves(params)
        streamed = {leaf.position: streams.nothing(leaf, self.gpu) for leaf in self.hosted if leaf.streams}
        return jax.tree.unflatten(structure, [streamed.get(place, leaf) for place, (_, leaf) in enumerate(leaves)])

    # Offloaded layers.

    def find(self, name: str) -> int | None:
        """The hosted leaf of that name; None for a frozen one. Raises Error when there is none."""
        if name not in self._names:
            raise Error(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"an offloaded layer has a parameter {name}, but init() had none of that name; it had "
                f"{', '.join(self._names[:5])}{', ...' if len(self._names) > 5 else ''}",
            )
        index = self._by_name.get(name)
        trained = next((leaf for leaf in self._trained if leaf.name == name), None)
        if trained is not None:
            tree.check_one_shard(trained)
        return index

    def claim(self, name: str) -> None:
        """An offloaded layer hands over the gradients of the leaves below ``name``."""
        self._claimed.append(name)

    def is_claimed(self, name: str) -> bool:
        return any(not layer or name == layer or name.startswith(layer + ".") for layer in self._claimed)

    def remaining(self, gradients: Any) -> Any:
        """With None for the leaves that offloaded layers hand over."""
        leaves, structure = tree.named_leaves(gradients)
        return jax.tree.unflatten(structure, [None if self.is_claimed(name) else leaf for name, leaf in leaves])
