"""DeepSpeed's entry points: arguments as DeepSpeed's, an engine that trains with superoffload's optimizers."""

import argparse
import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed

from superoffload._core import daemon, private_daemon, warn
from superoffload.deepspeed import checkpoints, optimizers, schedules, stages
from superoffload.deepspeed import config as configuration
from superoffload.deepspeed.config import Config
from superoffload.deepspeed.engine import Engine
from superoffload.torch import cuda
from superoffload.torch.optimizer import Optimizer


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds --deepspeed, which does nothing, and --deepspeed_config FILE, which `initialize` reads from ``args``."""
    group = parser.add_argument_group("DeepSpeed")
    group.add_argument("--deepspeed", action="store_true", help="taken, and without effect")
    group.add_argument("--deepspeed_config", metavar="FILE", help="DeepSpeed's configuration, in JSON")
    return parser


def init_distributed(dist_backend: str | None = None, **options: Any) -> None:
    """Joins the ranks that a launcher has started; a process that none has started is the only one.

    ``options``: timeout= goes to torch.distributed, what else DeepSpeed takes has no effect.
    """
    if torch.distributed.is_initialized():
        return
    backend = dist_backend or ("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    timeout = options.get("timeout")
    if "WORLD_SIZE" in os.environ:
        torch.distributed.init_process_group(backend, timeout=timeout)
    else:
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group(backend, timeout=timeout, store=store, rank=0, world_size=1)


def initialize(
    args: Any = None,
    model: torch.nn.Module | None = None,
    optimizer: optimizers.Client = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Any = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
    *,
    optimizer_options: Mapping[str, Any] | None = None,
) -> tuple[Engine, Optimizer, Any, Any]:
    """Returns the engine, its optimizer, a loader of ``training_data`` and the scheduler, or None for the last two.

    Args:
        args: has the path of the configuration as ``deepspeed_config``, if ``config`` is not given.
        model: on the CPU or where it is to be; its parameters are cast as bf16 or fp16 say, and divided among ranks.
        optimizer: of torch.optim or DeepSpeed, in whose place ours trains; or a function of the parameters that makes
            one, also of superoffload's. None: the configuration has an optimizer section.
        model_parameters: those that are trained, or groups of them; None: all that require gradients.
        training_data: a dataset.
        lr_scheduler: a scheduler of that optimizer, or a function of the optimizer that makes one. None: that of the
            configuration, if it has one.
        dist_init_required: False: the script joins the ranks itself.
        collate_fn: of the loader.
        config: a dict, or the path of a JSON file. ``config_params``: the same, DeepSpeed's older name.
        optimizer_options: keyword arguments of superoffload's optimizer, such as name= and checkpoint=.

    Raises:
        ValueError: for a field that is wrong, or that has no counterpart here and would change results, by its name.
        Error: what the daemon refuses.
    """
    if model is None:
        raise ValueError("initialize() needs a model")
    if mpu is not None or mesh_param is not None:
        raise ValueError("mpu= and mesh_param= have no counterpart; sequence_parallel_size is in the configuration")
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise ValueError("DeepSpeed's zero.Init has divided the model already; build it without")
    if dist_init_required is not False or not torch.distributed.is_initialized():
        init_distributed()
    path = next((each for each in (config, config_params, getattr(args, "deepspeed_config", None)) if each), None)
    ranks = torch.distributed.get_world_size()
    read = configuration.read(path, ranks)
    gpu = cuda.of_rank(int(os.environ.get("LOCAL_RANK", 0)))
    device = gpu or torch.device("cpu")
    options = dict(optimizer_options or {})
    groups = optimizers.by_names(model, model_parameters)
    wanted = optimizers.wanted(read, optimizer, model, groups, ranks)
    _cast(model, read)
    parallel = stages.divide(model, read, ranks)
    if read.cores_share is not None:
        private_daemon.set_workers_share(read.cores_share)
    if isinstance(optimizer, Optimizer):
        device = optimizer.hosted_parameters()[0].device  # they stay where they were when it was built
    elif wanted is None:
        model.to(device)  # a function builds on parameters that are in their place
    made: Any = wanted or optimizers.take(optimizer, model, groups, read)
    if isinstance(made, optimizers.Wanted):
        made = optimizers.build(made, model, read, gpu, ranks, options)
    if isinstance(optimizer, torch.optim.Optimizer) and made is not optimizer:
        optimizers.follow(optimizer, made)
    model.to(device)
    engine = Engine(model, read, made, _scheduler(lr_scheduler, read, made), parallel, device, collate_fn)
    if made.committed_steps:  # of its name in the daemon, or of a checkpoint that optimizer_options name
        engine.go_on(checkpoints.of_steps(engine))
    _say(read)
    if training_data is not None:
        engine.training_dataloader = engine.deepspeed_io(training_data)
    return engine, made, engine.training_dataloader, engine.lr_scheduler


def _cast(model: torch.nn.Module, config: Config) -> None:
    if config.dtype is not None:
        for parameter in model.parameters():
            if parameter.is_floating_point() and parameter.dtype != config.dtype:
                parameter.data = parameter.data.to(config.dtype)
    if config.sums_dtype is not None:
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.grad_dtype = config.sums_dtype
    if config.buffer_dtype is not None:
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer.data = buffer.data.to(config.buffer_dtype)


def _scheduler(given: Any, config: Config, optimizer: Optimizer) -> Any:
    if given is None:
        section = config.scheduler
        return None if section is None else schedules.make(section.type, optimizer, section.params)
    return given if hasattr(given, "step") else given(optimizer)


def _say(config: Config) -> None:
    """What of the configuration has no effect, once."""
    if torch.distributed.get_rank() != 0:
        return
    ignored = list(config.ignored)
    if config.cores_share is not None and not daemon.uses_private():
        ignored.append("zero_optimization.offload_optimizer.cpuadam_cores_perc (the daemon's configuration says)")
    remarks = [f"of DeepSpeed's configuration this has no effect here: {', '.join(ignored)}"] if ignored else []
    if not config.clipping_is_said:
        remarks.append(
            f"gradients are clipped to a norm of {config.clipping}, since gradient_clipping is not there, as in "
            "DeepSpeed from 0.19.3 on; DeepSpeed before did not clip then, which is gradient_clipping: 0.0"
        )
    if remarks:
        warn.warn("; ".join(remarks))
    if config.prints_itself:
        print(f"superoffload: {config}")
