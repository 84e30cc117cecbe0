"""Calls that compiled programs make of the client library, through XLA's foreign function interface.

A target's operands and results are those of client/src/xla/handlers.cc, and on GPUs of cuda_handlers.cc. All but "read"
have side effects, so XLA neither drops them nor runs one for two; what is read is the same in all of a program. A GPU's
operands are in its memory: what its handlers must know at once are attributes.
"""

import ctypes
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import grpc
import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir

from superoffload._core import library
from superoffload._core.error import Error
from superoffload._core.step_result import StepResult

_PREFIX = "superoffload_"
_TARGETS = {  # by XLA's platform
    "cpu": ("hand_over", "compare", "step", "count"),
    "CUDA": ("hand_over", "read", "step", "count", "publish"),
}


@functools.cache
def _register() -> None:
    """Raises Error when the library has no handlers."""
    for platform, names in _TARGETS.items():
        for name in names:
            target = jax.ffi.pycapsule(_handler(name, platform.lower()))
            try:
                jax.ffi.register_ffi_target(_PREFIX + name, target, platform=platform)
            except Exception as error:
                raise Error(
                    grpc.StatusCode.FAILED_PRECONDITION,
                    f"jax {jax.__version__} does not take this libsuperoffload's calls ({error}): pip install "
                    "'superoffload[jax]' brings one that does, or build libsuperoffload where this jaxlib is "
                    "installed; step() outside of jit works with any, on the CPU",
                ) from None


def check_handlers() -> None:
    """Raises Error when programs cannot call the library."""
    _register()


def _handler(name: str, platform: str) -> int:
    """Its address in the client library."""
    handler = ctypes.c_void_p()
    library.call("xla_handler", name.encode(), platform.encode(), ctypes.byref(handler))
    assert handler.value is not None, "it is there when the call succeeds"
    return handler.value


_WHOLE = -1


def check_devices(devices: int) -> None:
    """Of a program; raises Error for several: each would make the call. In a shard_map that is meant."""
    if devices > 1:
        raise Error(
            grpc.StatusCode.UNIMPLEMENTED,
            f"a program that hands gradients over runs on {devices} devices, but inside of jit gradients are handed "
            "over from one device only, yet: give it arrays of the one that the parameters of init() are on, or call "
            "step(gradients) outside of jit; offloaded layers also run in jax.shard_map, with one device per process",
        )


def _lower_operands(context: Any, *operands: Any) -> Sequence[Any]:
    check_devices(getattr(context.module_context.axis_context, "num_devices", 1))  # only programs without shard_map say
    return operands


_operands = jax.extend.core.Primitive("superoffload_operands")  # as they are, in programs for one device
_operands.multiple_results = True
_operands.def_impl(lambda *operands: operands)
_operands.def_abstract_eval(lambda *operands: operands)
mlir.register_lowering(_operands, _lower_operands)


def _call(name: str, results: Any, **options: Any) -> Any:
    _register()
    call = jax.ffi.ffi_call(_PREFIX + name, results, **{"has_side_effect": True} | options)
    return lambda *operands, **attributes: call(*_operands.bind(*operands), **attributes)


def _mapped(what: str) -> Error:
    return Error(
        grpc.StatusCode.UNIMPLEMENTED,
        f"an offloaded layer is mapped by jax.vmap, under which its parameters {what}: map inside of layer_fn "
        "instead, offloaded(lambda own, x: jax.vmap(...)(x), ...)",
    )


def _numbers(values: Sequence[int]) -> np.ndarray:
    return np.asarray(values, np.int64)


def _like(array: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _compare(submitter: int, parameters: Sequence[int], values: Sequence[Any], number: Any, **kind: np.int64) -> Any:
    """Returns ``number``, once ``values`` are known to be those that the last step has left of ``parameters``."""
    call = _call("compare", jax.ShapeDtypeStruct((), jnp.int32))
    return call(number, *values, submitter=np.int64(submitter), parameters=_numbers(parameters), **kind)


def hand_over(
    submitter: int,
    parameters: Sequence[int],
    gradients: Sequence[Any],
    index: Any,
    passing: Sequence[Any],
    values: Sequence[Any] = (),
) -> list[Any]:
    """Hands gradients over; returns ``passing``, unchanged. Whoever uses those comes after the call.

    ``index``: which slices the gradients are of the parameters; None: they are whole. ``values``: those slices, at
    which the gradients are; none: they are not compared with what the optimizer has.
    """
    whole = np.int64(index is None)
    number = jnp.int32(_WHOLE) if index is None else index
    aliases = {1 + place: place for place in range(len(passing))}
    call = _call("hand_over", [_like(array) for array in passing], input_output_aliases=aliases)

    @jax.custom_batching.custom_vmap
    def passed(number: Any, values: Sequence[Any], *operands: Any) -> Any:
        if values:
            number = _compare(submitter, parameters, values, number, whole=whole, layer=np.int64(True))
        return call(number, *operands, submitter=np.int64(submitter), parameters=_numbers(parameters), whole=whole)

    @passed.def_vmap
    def _(*_: Any) -> Any:
        raise _mapped("would have one gradient per mapped input")

    return list(passed(number, list(values), *passing, *gradients))


def read(submitter: int, streamed: Mapping[int, jax.ShapeDtypeStruct], after: Any) -> list[Any]:
    """Parameters that stream, on a GPU, once ``after`` is there: an array, or None."""

    @jax.custom_batching.custom_vmap
    def values(*operands: Any) -> Any:
        call = _call("read", list(streamed.values()), has_side_effect=False)
        return call(*operands, submitter=np.int64(submitter), parameters=_numbers(list(streamed)))

    @values.def_vmap
    def _(*_: Any) -> Any:
        raise _mapped("would be read once per mapped input")

    return list(values(*([] if after is None else [after.reshape(-1)[:1]])))


def publish(submitter: int, published: Mapping[int, jax.ShapeDtypeStruct]) -> list[Any]:
    """Parameters, on a GPU, as the step that was ended last has left them."""
    call = _call("publish", list(published.values()))
    return list(call(submitter=np.int64(submitter), parameters=_numbers(list(published))))


def count(submitter: int, after: Sequence[Any]) -> Any:
    """Committed steps, once ``after`` is there."""
    call = _call("count", jax.ShapeDtypeStruct((), jnp.int32))
    return call(*after, submitter=np.int64(submitter))


def step(
    submitter: int,
    gradients: Mapping[int, Any],
    present: Mapping[int, Any],
    published: Sequence[jax.ShapeDtypeStruct],
    schedules: Mapping[int, Any],
    gradient_scale: Any,
    max_grad_norm: float,
) -> tuple[list[Any], StepResult]:
    """A whole step; returns all parameters.

    ``gradients`` by parameter; those of others are absent. ``present``: the loop's parameters, of those to compare.
    """
    first = next(iter(gradients.values()))
    committed = count(submitter, [first.reshape(-1)[:1]])
    if present:
        whole, layer = np.int64(True), np.int64(False)
        committed = _compare(submitter, list(present), list(present.values()), committed, whole=whole, layer=layer)
    scalars = [jnp.asarray(schedule(committed), jnp.float32).reshape(()) for schedule in schedules.values()]
    results = [jax.ShapeDtypeStruct((6,), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.float32), *published]
    aliases = {3 + place: 2 + parameter for place, parameter in enumerate(gradients)}
    numbers, reals, *params = _call("step", results, input_output_aliases=aliases)(
        committed,
        jnp.asarray(gradient_scale, jnp.float32).reshape(()),
        jnp.stack(scalars) if scalars else jnp.zeros((0,), jnp.float32),
        *gradients.values(),
        submitter=np.int64(submitter),
        parameters=_numbers(list(gradients)),
        absent=_numbers([parameter for parameter in range(len(published)) if parameter not in gradients]),
        scheduled=_numbers(list(schedules)),
        max_grad_norm=np.float64(max_grad_norm),
    )
    report = StepResult(
        kind=numbers[0],
        step=numbers[1],
        committed_steps=numbers[2],
        global_norm=reals[0],
        clip_coefficient=reals[1],
        speculated_buckets=numbers[3],
        republished_buckets=numbers[4],
        consecutive_skips=numbers[5],
    )
    return params, report


jax.tree_util.register_dataclass(
    StepResult,
    data_fields=[field for field in StepResult.__dataclass_fields__],
    meta_fields=[],
)
