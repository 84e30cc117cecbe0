"""The rows of the benchmark: each trains a model in a process of its own, and returns what it measured.

All but one clip on every step, to a norm that every gradient exceeds.
"""

import contextlib
import dataclasses
import importlib
import os
import pathlib
import socket
import statistics
import time
import types
from collections.abc import Callable, Iterable, Iterator

import torch
from tests.device import kernels_beside, machine, models
from tests.device.bench import FEW_TOKENS

import superoffload.torch
from superoffload.torch import GpuOptions, VerdictKind
from superoffload.v1 import optimizer_pb2

BATCH = 2 if machine.DRY_RUN else 16  # sequences per step: 32 k tokens
WARM_UP = 5  # of which three are watched, without overlap (superoffload/torch/overlap.py)
STEPS = 2 if machine.DRY_RUN else 7
MAX_GRAD_NORM = 1e-4
MOST_GRAD_NORM = 1e6  # no gradient exceeds it
LEARNING_RATE = 1e-5
BUCKET_BYTES = 4096 if machine.DRY_RUN else 0  # 0: the default
HALF_BILLION = machine.BILLION // 2
LOGGED_BYTES_PER_PARAMETER = 28  # of the daemon, with a log of 5 slots
TUNING_STEPS = 3 * WARM_UP  # in which "auto" has become as many as there are
LARGEST_TRACE_BYTES = 15 << 20


@dataclasses.dataclass
class Measured:
    milliseconds: list[float]  # between the ends of steps that follow each other, on the GPU's clock
    parameters: int
    tokens: int  # per step
    gpu_bytes: int  # in use after the last step, of all processes; torch's cache gives nothing back
    floor_milliseconds: float | None = None  # where it is not the table's
    note: str = ""

    def report(self) -> dict[str, object]:
        return dataclasses.asdict(self) | {"median_ms": statistics.median(self.milliseconds)}


def mark() -> object:
    if machine.DRY_RUN:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(a: object, b: object) -> float:
    return (b - a) * 1e3 if machine.DRY_RUN else a.elapsed_time(b)


def measure(
    model: torch.nn.Module,
    step: Callable[[], None],
    steps: int = STEPS,
    batch: int = BATCH,
    each: Callable[[], object] = lambda: None,
) -> Measured:
    """Steps follow each other without a wait, so that one's tail may hide behind the next one's head."""
    generator = torch.Generator(machine.DEVICE).manual_seed(1)
    shape = (batch, models.SEQUENCE + 1)
    tokens = torch.randint(models.VOCABULARY, shape, generator=generator, device=machine.DEVICE)
    marks = []
    for _ in range(WARM_UP + steps + 1):
        model(tokens).backward()
        step()
        model.zero_grad(set_to_none=True)
        marks.append(mark())
        each()
    machine.synchronize()
    marks = marks[WARM_UP:]
    return Measured(
        [between(a, b) for a, b in zip(marks, marks[1:], strict=False)],
        models.count(model),
        batch * models.SEQUENCE,
        machine.used_gpu_bytes(),
    )


def _do_nothing() -> None:
    pass


def floor() -> dict[str, object]:
    machine.use_gpu()
    model = models.build(models.BILLION)
    return measure(model, _do_nothing).report()


def optimizer_of(
    model: torch.nn.Module, max_grad_norm: float = MAX_GRAD_NORM, algorithm: str = "AdamW", **options
) -> superoffload.torch.AdamW:
    return getattr(superoffload.torch, algorithm)(
        model.named_parameters(),
        lr=LEARNING_RATE,
        max_grad_norm=max_grad_norm,
        bucket_bytes=BUCKET_BYTES,
        **options,
    )


def line_per_mover(
    movers: Iterable[str], model: torch.nn.Module, describe: Callable[[superoffload.torch.AdamW], str]
) -> list[str]:
    """Lines of a table: of an optimizer with each mover that works here."""
    lines = []
    for mover in movers:
        with machine.daemon(machine.daemon_budget(models.count(model))):
            try:
                optimizer = optimizer_of(model, gpu=GpuOptions(mover=mover, resident_buckets=0, cast="fused"))
            except superoffload.Error as error:
                if not machine.lacks_what_it_needs(error):
                    raise
                lines.append(f"{mover:8} not here: {error}")
                continue
            with contextlib.closing(optimizer):
                lines.append(f"{mover:8} {describe(optimizer)}")
    print("\n".join(lines))
    return lines


def measure_attached(
    model: torch.nn.Module,
    optimizer: superoffload.torch.AdamW,
    overlaps: bool = True,
    expected: VerdictKind = VerdictKind.CLIP,
    **options,
) -> Measured:
    """Without overlap as in published schedules: all gradients, then the update, then the parameters."""
    kinds, early = [], []

    def step() -> None:
        early.append(optimizer.submitter().policy.early)
        optimizer.step()
        if not overlaps:
            optimizer.synchronize()

    result = measure(model, step, each=lambda: kinds.append(optimizer.last_result.kind), **options)
    report = optimizer.gpu_report
    result.note = f"mover {report.mover}, {kinds.count(VerdictKind.CLIP)} of {len(kinds)} steps clipped"
    if any(left != overlaps for left in early[WARM_UP:]):
        raise AssertionError(f"gradients left during backward in steps {early}, of which {WARM_UP} warmed up")
    result.note += ", STAGED copies" * report.staged + f"; {report.notes}" * bool(report.notes)
    if set(kinds) != {expected}:
        raise AssertionError(f"steps ended with {set(kinds)}, but all of them should with {expected}")
    return result


def superoffload_rows(mover: str, settings: list[tuple[str, int]]) -> Iterator[dict[str, object]]:
    """Per speculation and number of residents. One attachment for all: pinning its memory takes longer than a row does.

    The number of residents is fixed, so that nothing is tuned while it is measured.
    """
    machine.use_gpu()
    model = models.build(models.BILLION)
    with machine.daemon(machine.daemon_budget(models.count(model))):
        optimizer = optimizer_of(model, gpu=GpuOptions(mover=mover, resident_buckets=0, cast="fused"))
        for speculation, residents in settings:
            _set(optimizer, speculation, residents)
            yield measure_attached(model, optimizer).report()
        optimizer.close()


def unclipped() -> dict[str, object]:
    """All that was speculated stands."""
    machine.use_gpu()
    model = models.build(models.BILLION)
    with machine.daemon(machine.daemon_budget(models.count(model))):
        gpu = GpuOptions(mover="trainer", resident_buckets=0, cast="fused")
        with contextlib.closing(optimizer_of(model, MOST_GRAD_NORM, speculation="always", gpu=gpu)) as optimizer:
            return measure_attached(model, optimizer, expected=VerdictKind.COMMIT).report()


def few_tokens_rows() -> Iterator[dict[str, object]]:
    """Half a billion parameters, one sequence per step: the floor, the GPU alone, and FEW_TOKENS."""
    machine.use_gpu()
    model = models.build(HALF_BILLION)
    least = measure(model, _do_nothing, batch=1)
    yield least.report()
    yield _beyond(least, measure(model, fused_adamw_step(model), batch=1))
    for algorithm, states, gpu in FEW_TOKENS:
        options = {name: getattr(torch, value) for name, value in states.items()}
        with machine.daemon(models.count(model) * LOGGED_BYTES_PER_PARAMETER + machine.DAEMON_SPARE_BYTES):
            options["gpu"] = GpuOptions(mover="trainer", cast="fused", **gpu)
            with contextlib.closing(optimizer_of(model, algorithm=algorithm, **options)) as optimizer:
                if gpu["resident_buckets"] == "auto":
                    measure(model, optimizer.step, steps=TUNING_STEPS, batch=1)
                result = measure_attached(model, optimizer, batch=1)
                attachment = optimizer._hosting.attachment
                result.note += f", {attachment.resident_buckets} of {len(attachment.optimizer.layout.buckets)} resident"
        yield _beyond(least, result)


def _beyond(least: Measured, result: Measured) -> dict[str, object]:
    result.floor_milliseconds = least.report()["median_ms"]
    return result.report()


def _set(optimizer: superoffload.torch.AdamW, speculation: str, residents: int) -> None:
    """As an operator and the resident tuner do it."""
    optimizer._hosting.gpu.residents.choose(residents, optimizer._hosting.quiesce)
    policies = optimizer_pb2.Policies(speculation=f"SPECULATION_{speculation.upper()}")
    request = optimizer_pb2.UpdatePoliciesRequest(name=optimizer.name, policies=policies)
    optimizer._hosting.connection.call("UpdatePolicies", request)


def deepspeeds_schedule() -> dict[str, object]:
    """With clipping DeepSpeed speculates on nothing: all gradients, then the update, then the parameters."""
    machine.use_gpu()
    model = models.build(models.BILLION)
    with machine.daemon(machine.daemon_budget(models.count(model))):
        gpu = GpuOptions(mover="trainer", resident_buckets=0, cast="fused")
        optimizer = optimizer_of(model, overlap=False, speculation="never", gpu=gpu)
        result = measure_attached(model, optimizer, overlaps=False)
        optimizer.close()
        return result.report()


def fused_adamw_step(model: torch.nn.Module) -> Callable[[], None]:
    """On fp32 masters, as the daemon's: the parameters are their copies in bf16."""
    parameters = list(model.parameters())
    masters = [parameter.detach().float() for parameter in parameters]
    for master in masters:
        master.grad = torch.empty_like(master)
    optimizer = torch.optim.AdamW(masters, lr=LEARNING_RATE, fused=True)

    def step() -> None:
        torch._foreach_copy_([master.grad for master in masters], [parameter.grad for parameter in parameters])
        torch.nn.utils.clip_grad_norm_(masters, MAX_GRAD_NORM)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(parameters, masters)

    return step


def fused_adamw() -> dict[str, object]:
    machine.use_gpu()
    model = models.build(models.BILLION)
    return measure(model, fused_adamw_step(model)).report()


def _peer(name: str, module: str) -> types.ModuleType:
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise machine.Unavailable(f"{name} is not here: {error}") from error
    if machine.DRY_RUN:
        raise machine.Unavailable(f"{name} knows no fake GPU")
    return found


def torchao() -> dict[str, object]:
    peer = _peer("torchao", "torchao.optim")
    machine.use_gpu()
    model = models.build(models.BILLION)
    optimizer = peer.CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, lr=LEARNING_RATE, fused=True)

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()

    return measure(model, step).report()


class _UnderDeepSpeed(torch.nn.Module):
    """Its engine as `measure` calls a model."""

    def __init__(self, engine: torch.nn.Module) -> None:
        super().__init__()
        self.engine = engine

    def forward(self, tokens: torch.Tensor) -> types.SimpleNamespace:
        loss = self.engine(tokens)
        return types.SimpleNamespace(backward=lambda: self.engine.backward(loss))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The engine's step does it."""


def zero_offload() -> dict[str, object]:
    """DeepSpeed's, with its CPUAdam, which it compiles here."""
    peer = _peer("DeepSpeed", "deepspeed")
    machine.use_gpu()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    model = models.build(models.BILLION)
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "bf16": {"enabled": True},
        "gradient_clipping": MAX_GRAD_NORM,
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE}},
    }
    engine, *_ = peer.initialize(model=model, model_parameters=model.parameters(), config=config)
    return measure(_UnderDeepSpeed(engine), engine.step).report()


def compiled_layers() -> dict[str, object]:
    """A model of transformers, whose layers are compiled in place; brings its own floor."""
    machine.use_gpu()
    try:
        model, note = models.Llama(), "LlamaForCausalLM of transformers"
        layers = model.layers()
    except ImportError as error:
        model, note = models.build(models.BILLION), f"our own transformer, because transformers is not here: {error}"
        layers = model.blocks
    backend = "eager" if machine.DRY_RUN else "inductor"

    def compile_layers() -> None:
        torch._dynamo.reset()
        for layer in layers:
            layer.compile(backend=backend)

    compile_layers()
    least = measure(model, _do_nothing)
    with machine.daemon(machine.daemon_budget(models.count(model))):
        compile_layers()  # what was compiled knows parameters that move, and no hooks
        optimizer = optimizer_of(model, gpu=GpuOptions(resident_buckets=4, cast="fused"))
        result = measure_attached(model, optimizer)
        optimizer.close()
    result.note = f"{note}; {result.note}"
    return _beyond(least, result)


def trace(to: str) -> dict[str, object]:
    """A Chrome trace of two steps, for chrome://tracing or ui.perfetto.dev."""
    machine.use_gpu()
    model = models.build(models.BILLION)
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] * (not machine.DRY_RUN)
    with machine.daemon(machine.daemon_budget(models.count(model))), contextlib.ExitStack() as stack:
        gpu = GpuOptions(resident_buckets=4, cast="fused")
        optimizer = optimizer_of(model, gpu=gpu)
        stack.callback(optimizer.close)
        measure(model, optimizer.step, steps=1)
        with torch.profiler.profile(activities=activities) as profiler:
            tokens = torch.zeros(BATCH, models.SEQUENCE + 1, dtype=torch.long, device=machine.DEVICE)
            for _ in range(2):
                model(tokens).backward()
                optimizer.step()
                optimizer.zero_grad()
            machine.synchronize()
        note = f"mover {optimizer.gpu_report.mover}"
        profiler.export_chrome_trace(to)  # compressed, by its name
    size = pathlib.Path(to).stat().st_size
    if size > LARGEST_TRACE_BYTES:
        pathlib.Path(to).unlink()
        raise AssertionError(f"the trace is {size >> 20} MiB and was deleted")
    note = "; ".join([note, *kernels_beside.of_trace(to)])
    print(profiler.key_averages().table(sort_by="cpu_time_total", row_limit=25, max_name_column_width=60))
    return {"bytes": size, "note": note}
