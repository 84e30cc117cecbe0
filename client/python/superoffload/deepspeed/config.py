"""What a DeepSpeed configuration says, as DeepSpeed 0.19 reads it."""

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from typing import Any

import torch

from superoffload.deepspeed import field_names
from superoffload.deepspeed.fields import Fields

_DTYPES = {
    name: dtype
    for dtype, names in {
        torch.bfloat16: ("bf16", "bfloat16", "torch.bfloat16"),
        torch.float16: ("fp16", "float16", "half", "torch.float16"),
        torch.float32: ("fp32", "float32", "float", "torch.float32"),
    }.items()
    for name in names
}


@dataclasses.dataclass(frozen=True)
class Batches:
    """Rows of data; `total` = `micro` * `passes` * data-parallel ranks."""

    total: int  # of a step, of all ranks: train_batch_size
    micro: int  # of a pass of one rank: train_micro_batch_size_per_gpu
    passes: int  # gradient_accumulation_steps


@dataclasses.dataclass(frozen=True)
class LossScaleFields:
    """Of fp16."""

    static: float  # 0: dynamic
    initial: float
    window: int
    hysteresis: int
    refills_hysteresis: bool  # with each step that does not overflow
    least: float


@dataclasses.dataclass(frozen=True)
class Named:
    """The optimizer or the scheduler."""

    type: str
    params: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Config:
    """A configuration that was found to be right for so many ranks."""

    batches: Batches
    counts_passes: bool  # managed_gradient_accumulation; False: each step() is a step
    sequence_parallel_size: int
    dtype: torch.dtype | None  # of parameters; None: as the model has them
    state_dtypes: dict[str, torch.dtype]  # keyword arguments of our optimizers; empty: all state is fp32
    buffer_dtype: torch.dtype | None  # None: as the model has them
    sums_dtype: torch.dtype | None  # of gradients of several passes; None: that of parameters
    autocast: torch.dtype | None
    loss_scale: LossScaleFields | None
    casts_inputs: bool  # to fp16
    clipping: float  # of the gradients' global norm; 0: none
    reduce_dtype: torch.dtype | None  # None: that of gradients
    sums_gradients: bool  # of the ranks, instead of averaging them
    stage: int
    optimizer: Named | None
    scheduler: Named | None
    offloaded_share: float | None  # of optimizer states that are on the CPU; None: not said
    cores_share: float | None  # for the optimizer; None: not said
    streams_parameters: bool
    gathers_on_save: bool
    steps_per_print: int | None
    times_steps: bool
    prints_itself: bool
    drops_last_batch: bool
    tag_validation: str  # warn, fail or ignore
    loads_universal: bool
    clipping_is_said: bool  # False: it is DeepSpeed's default
    ignored: tuple[str, ...]  # fields that only tune DeepSpeed


def read(config: Any, ranks: int) -> Config:
    """``config``: a dict, or the path of a JSON file; ``ranks``: all of them, also those that share a sequence.

    Raises ValueError with a sentence that names the field.
    """
    given = _load(config)
    if isinstance(given, Mapping) and isinstance(zero := given.get("zero_optimization"), bool):  # its first format
        given = {**given, "zero_optimization": {"stage": int(zero)}}
    ignored: list[str] = []
    fields = Fields("", given, ignored)
    sequence_parallel_size = fields.take("sequence_parallel_size", int, 1)
    if sequence_parallel_size < 1 or ranks % sequence_parallel_size:
        raise ValueError(
            f"sequence_parallel_size is {sequence_parallel_size} but must divide the number of ranks, {ranks}"
        )
    batches = _batches(fields, ranks // sequence_parallel_size)
    half = _half(fields)
    types = fields.object("data_types")
    clipping_is_said = fields.has("gradient_clipping")
    zero = _zero(fields)
    checkpoint = fields.object("checkpoint")
    made = Config(
        batches=batches,
        counts_passes=fields.take("managed_gradient_accumulation", bool, True),
        sequence_parallel_size=sequence_parallel_size,
        buffer_dtype=types.one_of("buffer_dtype", None, _DTYPES),
        sums_dtype=_sums_dtype(types, batches.passes, half["dtype"], ranks),
        autocast=_autocast(fields, half["dtype"]),
        clipping=_clipping(fields),
        clipping_is_said=clipping_is_said,
        reduce_dtype=fields.one_of("communication_data_type", None, _DTYPES),
        sums_gradients=fields.one_of("gradient_allreduce_op", False, {"mean": False, "sum": True}),
        optimizer=_named(fields, "optimizer"),
        scheduler=_named(fields, "scheduler"),
        steps_per_print=fields.take("steps_per_print", int, None),
        times_steps=fields.take("wall_clock_breakdown", bool, False),
        prints_itself=fields.take("dump_state", bool, False),
        drops_last_batch=fields.take("dataloader_drop_last", bool, False),
        tag_validation=checkpoint.one_of("tag_validation", "warn", {word: word for word in ("warn", "fail", "ignore")}),
        loads_universal=checkpoint.take("load_universal", bool, False),
        ignored=(),
        **half,
        **zero,
    )
    _check_types(types, made)
    checkpoint.refuse("use_node_local_storage", [False], "but all ranks write to one file system here")
    checkpoint.tunes("parallel_write", "writer", "async_save")
    checkpoint.end()
    if made.sums_gradients and made.stage == 3:
        raise ValueError("gradient_allreduce_op is 'sum', which DeepSpeed refuses with ZeRO stage 3, too")
    _end(fields)
    return dataclasses.replace(made, ignored=tuple(ignored))


def _load(config: Any) -> Any:
    if isinstance(config, Mapping):
        return config
    if not isinstance(config, (str, os.PathLike)):
        raise ValueError("config must be a dict, or the path of a JSON file with DeepSpeed's configuration")
    try:
        with open(config, encoding="utf-8") as file:
            return json.load(file, object_pairs_hook=_once)
    except OSError as error:
        raise ValueError(f"the configuration {config} cannot be read: {error.strerror}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"the configuration {config} is no JSON (without comments): {error}") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        twice = next(name for name in made if sum(name == other for other, _ in pairs) > 1)
        raise ValueError(f"{twice} is there twice in the configuration")
    return made


def _batches(fields: Fields, ranks: int) -> Batches:
    """What is missing follows from the others, as in DeepSpeed."""
    total, micro, passes = (
        fields.take(name, int, None)
        for name in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    )
    if total is None and micro is None:
        raise ValueError("train_batch_size or train_micro_batch_size_per_gpu must be in the configuration")
    if passes is None:
        passes = 1 if total is None or micro is None else total // micro // ranks if micro > 0 else 0
    if micro is None:
        micro = total // ranks // passes if passes > 0 else 0
    if total is None:
        total = micro * passes * ranks
    if min(total, micro, passes) < 1 or total != micro * passes * ranks:
        raise ValueError(
            f"train_batch_size is {total} but must be train_micro_batch_size_per_gpu * gradient_accumulation_steps * "
            f"data-parallel ranks, {micro} * {passes} * {ranks}, and none of them 0"
        )
    return Batches(total, micro, passes)


def _half(fields: Fields) -> dict[str, Any]:
    """What bf16 and fp16 say."""
    bf16, fp16 = fields.object("bf16", "bfloat16"), fields.object("fp16")
    enabled = {torch.bfloat16: bf16.take("enabled", bool, False), torch.float16: fp16.take("enabled", bool, False)}
    if all(enabled.values()):
        raise ValueError("bf16.enabled and fp16.enabled are both true; leave one")
    if not bf16.take("check_grad_overflow", bool, True):
        bf16.ignore("check_grad_overflow", "steps whose gradients are not finite are skipped")
    bf16.tunes("immediate_grad_update")
    states = {"master_dtype": "bf16_master_weights_and_grads", "state_dtype": "bf16_optimizer_states"}
    narrow = [option for option, name in states.items() if bf16.take(name, bool, False)]
    if narrow == ["state_dtype"]:
        raise ValueError("bf16.bf16_optimizer_states needs bf16.bf16_master_weights_and_grads")
    if narrow and not enabled[torch.bfloat16]:
        raise ValueError("bf16.bf16_master_weights_and_grads needs bf16.enabled")
    bf16.end()
    fp16.refuse("fp16_master_weights_and_grads", [False], "but masters are kept in fp32 or bf16 here")
    scale = LossScaleFields(
        static=fp16.take("loss_scale", float, 0.0),
        initial=2.0 ** fp16.take("initial_scale_power", int, 16),
        window=fp16.take("loss_scale_window", int, 1000),
        hysteresis=fp16.take("hysteresis", int, 2),
        refills_hysteresis=fp16.take("consecutive_hysteresis", bool, False),
        least=fp16.take("min_loss_scale", float, 1.0),
    )
    casts = fp16.take("auto_cast", bool, False)
    fp16.end()
    if not 0 <= scale.static < math.inf:
        raise ValueError(f"fp16.loss_scale is {scale.static} but must be 0, for a dynamic one, or more")
    if scale.window < 1 or scale.hysteresis < 1 or not 0 < scale.least <= scale.initial < math.inf:
        raise ValueError(
            "fp16.loss_scale_window and fp16.hysteresis must be at least 1, and fp16.min_loss_scale more than 0 and at "
            "most 2 ** fp16.initial_scale_power"
        )
    dtype = next((dtype for dtype, on in enabled.items() if on), None)
    is_fp16 = dtype is torch.float16
    return {
        "dtype": dtype,
        "state_dtypes": dict.fromkeys(narrow, torch.bfloat16),
        "loss_scale": scale if is_fp16 else None,
        "casts_inputs": is_fp16 and casts,
    }


def _autocast(fields: Fields, half: torch.dtype | None) -> torch.dtype | None:
    autocast = fields.object("torch_autocast")
    enabled = autocast.take("enabled", bool, False)
    dtype = autocast.one_of("dtype", torch.bfloat16, _DTYPES)
    autocast.tunes("lower_precision_safe_modules")  # in which dtype ranks exchange weights
    autocast.end()
    if not enabled:
        return None
    if half is not None:
        raise ValueError("torch_autocast.enabled is true, and so is that of bf16 or fp16; leave one")
    if dtype is not torch.bfloat16:
        raise ValueError("torch_autocast.dtype must be bfloat16 here; for float16, which needs a loss scale, use fp16")
    return dtype


def _clipping(fields: Fields) -> float:
    clipping: float = fields.take("gradient_clipping", float, 1.0)
    if not 0 <= clipping < math.inf:
        raise ValueError(f"gradient_clipping is {clipping} but must be 0, which is none, or more")
    return clipping


def _zero(fields: Fields) -> dict[str, Any]:
    """What zero_optimization says."""
    zero = fields.object("zero_optimization")
    stage = zero.take("stage", int, 0)
    if not 0 <= stage <= 3:
        raise ValueError(f"zero_optimization.stage is {stage} but must be 0, 1, 2 or 3")
    optimizer = zero.object("offload_optimizer")
    on_cpu = _device(optimizer)
    share = optimizer.take("ratio", float, None)
    cores = optimizer.take("cpuadam_cores_perc", float, None)
    for name, value in (("ratio", share), ("cpuadam_cores_perc", cores)):
        if value is not None and not 0 <= value <= 1:
            raise ValueError(f"{optimizer.name(name)} is {value} but must be 0 to 1")
    if share is not None and share < 1 and stage != 3:
        raise ValueError(f"{optimizer.name('ratio')} is {share}, but below 1 DeepSpeed takes it with stage 3 only")
    optimizer.take("super_offload", bool, False)  # the daemon works in one way, with either the same results
    _pinned(optimizer)
    optimizer.tunes("nvme_path", "buffer_count", "pipeline_read", "pipeline_write", "fast_init")
    optimizer.end()
    parameters = zero.object("offload_param")
    streams = _device(parameters) or zero.take("cpu_offload_param", bool, False)
    if streams and stage != 3:
        raise ValueError("zero_optimization.offload_param needs stage 3")
    _pinned(parameters)
    parameters.tunes("nvme_path", "buffer_count", "buffer_size", "max_in_cpu")
    parameters.end()
    zero.tunes("cpu_offload", "cpu_offload_use_pin_memory")  # state is the daemon's, with and without
    without = "which has no counterpart here, and would change results"
    for name in ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients"):
        zero.refuse(name, [False], without)
    zero.refuse_enabled("zenflow")
    gathers = [
        zero.take(name, bool, False)
        for name in (
            "stage3_gather_16bit_weights_on_model_save",
            "gather_16bit_weights_on_model_save",
            "stage3_gather_fp16_weights_on_model_save",
        )
    ]
    zero.tunes(*field_names.OF_ZERO)
    zero.end()
    if streams and share not in (None, 1.0):
        optimizer.ignore("ratio", "the GPU keeps no state of parameters that stream")
        share = None
    return {
        "stage": stage,
        "offloaded_share": share if on_cpu else None,
        "cores_share": cores if on_cpu else None,
        "streams_parameters": streams,
        "gathers_on_save": any(gathers),
    }


def _device(offload: Fields) -> bool:
    """Whether it is the CPU."""
    device: str = offload.one_of("device", "none", {name: name for name in ("none", "cpu", "nvme")})
    if device == "nvme":
        raise ValueError(f"{offload.name('device')} is 'nvme', but the daemon keeps what it has in memory; write 'cpu'")
    return device == "cpu"


def _pinned(offload: Fields) -> None:
    if not offload.take("pin_memory", bool, True):
        offload.ignore("pin_memory", "what a GPU copies from and to is always pinned")


def _named(fields: Fields, field: str) -> Named | None:
    section = fields.object(field)
    kind, params = section.take("type", str, None), section.any("params") or {}
    section.tunes("legacy_fusion")
    section.end()
    if kind is None:
        return None
    if not isinstance(params, Mapping):
        raise ValueError(f"{field}.params is {params!r} but must be an object")
    if autos := [name for name, value in params.items() if value == "auto"]:
        raise ValueError(
            f'{field}.params.{autos[0]} is "auto", for which the Hugging Face Trainer has a value; write one'
        )
    return Named(kind, dict(params))


def _check_types(types: Fields, read: Config) -> None:
    parameters = types.one_of("param_dtype", None, _DTYPES)
    types.refuse("keep_in_fp32_modules", ["auto", []], "but buffers keep the dtype that they have; cast them yourself")
    types.end()
    if parameters is not None and parameters != (read.dtype or torch.float32):
        raise ValueError("data_types.param_dtype is not that of bf16 or fp16; leave it out")


def _sums_dtype(types: Fields, passes: int, dtype: torch.dtype | None, ranks: int) -> torch.dtype | None:
    wanted: torch.dtype | None = types.one_of("grad_accum_dtype", None, _DTYPES)
    if wanted is None or passes == 1 or wanted == dtype:
        return None
    if wanted != torch.float32:
        raise ValueError("data_types.grad_accum_dtype must be fp32 or the dtype of parameters")
    if ranks > 1 and dtype is not None:
        raise ValueError(
            "data_types.grad_accum_dtype is fp32: FSDP2, which divides parameters among ranks here, sums gradients of "
            "several passes in the dtype of parameters; leave it out, or train in fp32 with torch_autocast"
        )
    return wanted


def _end(fields: Fields) -> None:
    fields.refuse_enabled(*field_names.WITHOUT_COUNTERPART)
    fields.tunes(*field_names.OF_ALL)
    tensors = fields.object("tensor_parallel")
    tensors.refuse("autotp_size", [0, 1], "but tensors are divided by your own code here (DTensors)")
    tensors.tunes("tp_size", "tp", "dtype", "preset_model", "partition_config")
    tensors.end()
    fields.end()
