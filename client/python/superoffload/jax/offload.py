"""Layers that hand their gradients over while the rest of backward still runs.

The backward of the layer computes its gradients and passes them to the client library in a call of XLA's foreign
function interface. The cotangents of the layer's inputs pass through that call unchanged, so the backward of the layers
below it, which needs them, comes after it; and because the call has a side effect, XLA does not drop it where there is
nothing below. In the place of the gradients autodiff gets zeros, which cost nothing where nobody returns them from jit.

Parameters that stream have no elements in the layer's pytree and come by a call: in forward after the layer's inputs,
and again in backward after its cotangents. So backward computes the forward of the layer once more, and XLA has the
parameters of few layers at a time.
"""

from collections.abc import Callable, Sequence
from typing import Any

import grpc
import jax
import jax.numpy as jnp

from superoffload._core.error import Error
from superoffload.jax import ffi, streams, tree
from superoffload.jax.optimizer import Optimizer


def _slices(optimizer: Optimizer, name: str, params: Any, stacked: bool) -> list[int | None]:
    """The hosted leaf of each leaf of a layer's parameters; None: it is frozen. Raises Error when they do not fit."""
    found = []
    for leaf_name, leaf in tree.named_leaves(params)[0]:
        full = name if leaf_name == "parameters" else f"{name}.{leaf_name}" if name else leaf_name
        index = optimizer.hosted_tree.find(full)
        found.append(index)
        if index is None:
            continue
        hosted = optimizer.hosted_tree.hosted[index]
        own = hosted.part.shape
        shape = own[1:] if stacked else own
        if leaf is None or tuple(leaf.shape) == shape or streams.has_no_value(leaf, hosted):
            continue
        remedy = "index= is for layers of a stack, whose parameters have one more dimension in init()"
        if not stacked and tuple(leaf.shape) == own[1:]:
            remedy = "in a scan over stacked parameters pass index=, the number of the layer"
        elif hosted.devices > 1:
            remedy = f"each process has {list(own)} of it: call the layer inside of jax.shard_map, with the shards"
        raise Error(
            grpc.StatusCode.INVALID_ARGUMENT,
            f"parameter {full} is {list(leaf.shape)} in the layer and {list(hosted.shape)} in init(): {remedy}",
        )
    return found


def _check_given(optimizer: Optimizer, name: str, params: Any, stacked: bool) -> None:
    """Raises Error unless they are the layer's parameters. What is given of one that streams may be of another step."""
    hosted = _slices(optimizer, name, params, stacked)
    streamed = _streamed(optimizer, hosted)
    for index, (_, leaf) in zip(hosted, tree.named_leaves(params)[0], strict=True):
        if index in streamed and leaf is not None and leaf.size:
            raise Error(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"parameter {optimizer.hosted_tree.hosted[index].name} streams, but its layer is called with a value "
                "of it: pass what init() and finish() return, which have no elements there",
            )


def _streamed(optimizer: Optimizer, hosted: Sequence[int | None]) -> dict[int, jax.ShapeDtypeStruct]:
    leaves = {index: optimizer.hosted_tree.hosted[index] for index in hosted if index is not None}
    return {index: leaf.form for index, leaf in leaves.items() if leaf.streams}


def _with_streamed(optimizer: Optimizer, name: str, params: Any, stacked: bool, after: Any) -> Any:
    """A layer's parameters: ``params`` itself, unless some stream, which come once an array of ``after`` is there."""
    hosted = _slices(optimizer, name, params, stacked)
    forms = _streamed(optimizer, hosted)
    if not forms:
        return params
    awaited = [leaf for leaf in jax.tree.leaves(after) if jnp.issubdtype(leaf.dtype, jnp.number)]
    read = dict(zip(forms, ffi.read(optimizer.submitter, forms, awaited[0] if awaited else None), strict=True))
    leaves, structure = tree.named_leaves(params)
    flat = [leaf if index is None else read.get(index, leaf) for index, (_, leaf) in zip(hosted, leaves, strict=True)]
    return jax.tree.unflatten(structure, flat)


def _check_axes(arrays: Any) -> None:
    """Raises Error in a shard_map that follows along which axes arrays vary: XLA's foreign functions do not say."""
    for array in jax.tree.leaves(arrays):
        kind = getattr(jax.typeof(array), "manual_axis_type", None)
        if getattr(kind, "varying", None):
            raise Error(
                grpc.StatusCode.UNIMPLEMENTED,
                "an offloaded layer is called in a jax.shard_map that checks along which axes arrays vary: pass "
                "check_vma=False to jax.shard_map",
            )


def offloaded(layer_fn: Callable[..., Any], optimizer: Optimizer, name: str = "") -> Callable[..., Any]:
    """A layer whose backward hands the gradients of its parameters over to the daemon.

    Args:
        layer_fn: ``layer_fn(params, *inputs)``, made of JAX operations; ``jax.checkpoint`` works, inside and outside.
        optimizer: that hosts the parameters; ``init()`` comes before the first call.
        name: where the layer's parameters are in the pytree of ``init()``: the keys, joined with dots, as
            ``"layers.0"``. The default: they are the whole pytree.

    Returns:
        ``layer(params, *inputs, index=None)``. ``index``, an integer that may be traced: the layer's number where
        ``params`` are a slice of stacked parameters, as in ``jax.lax.scan``. Differentiate with respect to ``params``
        as usual; their gradients are zeros, which ``optimizer.remaining(gradients)`` leaves out.

    A layer is used once in a backward pass: parameters that several layers share go to ``finish(gradients)``. Under
    ``jax.vmap`` use ``layer_fn`` that maps by itself.
    """
    optimizer.claim(name)

    @jax.custom_vjp
    def layer(params: Any, index: Any, *inputs: Any) -> Any:
        return layer_fn(_with_streamed(optimizer, name, params, index is not None, inputs), *inputs)

    def forward(params: Any, index: Any, *inputs: Any) -> Any:
        given = _with_streamed(optimizer, name, params, index is not None, inputs)
        if given is not params:
            return layer_fn(given, *inputs), (None, index, params, inputs)
        output, backward = jax.vjp(layer_fn, params, *inputs)
        return output, (backward, index, params, None)

    def hand_over(residuals: Any, cotangent: Any) -> Any:
        backward, index, params, again = residuals
        stacked = index is not None
        if again is not None:
            backward = jax.vjp(layer_fn, _with_streamed(optimizer, name, params, stacked, cotangent), *again)[1]
        gradients, *inputs = backward(cotangent)
        leaves = [leaf for _, leaf in tree.named_leaves(gradients)[0]]
        hosted = _slices(optimizer, name, gradients, stacked)
        own = {parameter: leaf for parameter, leaf in zip(hosted, leaves, strict=True) if parameter is not None}
        values: list[Any] = []
        if optimizer.hosted_tree.gpu is None:
            given = [leaf for _, leaf in tree.named_leaves(params)[0]]
            values = [leaf for parameter, leaf in zip(hosted, given, strict=True) if parameter is not None]
        flat, structure = jax.tree.flatten(inputs)
        passing = [place for place, leaf in enumerate(flat) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
        passed = ffi.hand_over(
            optimizer.submitter, list(own), list(own.values()), index, [flat[place] for place in passing], values
        )
        for place, leaf in zip(passing, passed, strict=True):
            flat[place] = leaf
        return jax.tree.map(jnp.zeros_like, params), None, *jax.tree.unflatten(structure, flat)

    layer.defvjp(forward, hand_over)

    def call(params: Any, *inputs: Any, index: Any = None) -> Any:
        _check_given(optimizer, name, params, index is not None)
        _check_axes((params, inputs))
        number = None if index is None else jnp.asarray(index, jnp.int32)
        return layer(params, number, *inputs)

    return call
