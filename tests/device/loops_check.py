"""Loops whose memory and graphs only a GPU's own allocator has, against the same loops that wait: every bit.

The same kernels on the same GPU give the same bits. So the reference hands its gradients over in step(), and then waits
for all parameters; the other run does neither. Its matrix products are large, its buckets 64 MiB.
"""

import contextlib
import gc
import os
from collections.abc import Callable, Iterator, Mapping

import torch
from tests.device import machine
from tests.device.checks import LOOPS

import superoffload.torch
from superoffload.torch import GpuOptions

STEPS = 8  # of which three are watched, without overlap
WIDTH = 32 if machine.DRY_RUN else 4096
LAYERS = 3 if machine.DRY_RUN else max(4, machine.parameters_that_fit(16 * WIDTH**2) // WIDTH**2)
ROWS = 1024 if machine.DRY_RUN else 8192
BUCKET_BYTES = 4096 if machine.DRY_RUN else 64 << 20
SPARE_BYTES = 512 << 20  # near full memory: beyond a quarter more than what the reference has used
PARAMETERS = LAYERS * WIDTH**2
FULL, EXPANDABLE, AVERAGES, GRAPHED, COMPILED, STREAMED, ADAPTED, BEYOND, FROZEN, LEAVING, PASSES = LOOPS
WEIGHTS = {STREAMED: "streamed", ADAPTED: "auto", BEYOND: "streamed"}
LACKS_ROOM = STEPS - 2  # the step of ADAPTED in which blocks leave again, after some that have room


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.nn.functional.gelu(layer(x))
        return x


class Checkpointed(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.utils.checkpoint.checkpoint(lambda x, of=layer: of(x).sin(), x, use_reentrant=False)
        return x


class Adapted(Model):
    """Its layers are frozen; what is trained scales what they give."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.scales = torch.nn.ParameterList(torch.ones(WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, scale in zip(self.layers, self.scales, strict=True):
            x = x + torch.nn.functional.gelu(layer(x) * scale)
        return x


MODELS = {FROZEN: Adapted, LEAVING: Checkpointed}


class _Values(Mapping):
    """Of a model on meta."""

    def __getitem__(self, name: str) -> torch.Tensor:
        generator = torch.Generator().manual_seed(int(name.split(".")[1]))
        return (torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH).bfloat16()

    def __iter__(self) -> Iterator[str]:
        return (f"layers.{layer}.weight" for layer in range(LAYERS))

    def __len__(self) -> int:
        return LAYERS


def _input(seed: int) -> torch.Tensor:
    generator = torch.Generator(machine.DEVICE).manual_seed(seed)
    return torch.randn(ROWS, WIDTH, generator=generator, device=machine.DEVICE).bfloat16().requires_grad_()


def _as_called(model: Model, way: str) -> Callable[[torch.Tensor], torch.Tensor]:
    if way == GRAPHED:
        return torch.cuda.make_graphed_callables(model, (_input(0),))
    if way == COMPILED:
        torch._dynamo.reset()
        return (
            torch.compile(model, backend="eager") if machine.DRY_RUN else torch.compile(model, mode="reduce-overhead")
        )
    return model


def train(way: str, waits: bool, most_gpu_bytes: int = 0) -> tuple[list[torch.Tensor], int]:
    """Losses, parameters and averages, and the GPU memory that steps took. `most_gpu_bytes`: what is left to them; 0:
    everything."""
    torch.manual_seed(0)
    with torch.device("meta" if way == BEYOND else machine.DEVICE):
        model = MODELS.get(way, Model)().bfloat16()
    before_model = _leave(most_gpu_bytes) if way == BEYOND else None
    frozen = superoffload.torch.stream_frozen(model, "cuda:0") if way == FROZEN and not waits else None
    gpu = GpuOptions(cast="fused", resident_share=1)
    if way == PASSES and not waits:
        gpu = GpuOptions(cast="fused", accumulate="daemon")
    if way == BEYOND:
        gpu = GpuOptions(cast="fused", device="cuda:0", weights=_Values())
    average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    averages = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=average) if way == AVERAGES else None
    optimizer = superoffload.torch.AdamW(
        [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad],
        lr=1e-3,
        max_grad_norm=1e-3,
        bucket_bytes=BUCKET_BYTES,
        overlap=not waits,
        gpu=gpu,
        weights="resident" if waits else WEIGHTS.get(way, "resident"),
    )
    with contextlib.closing(optimizer):
        rest = before_model if way == BEYOND else _leave(most_gpu_bytes)
        offload = None
        if way == LEAVING and not waits:
            offload = superoffload.torch.offload_activations(model, optimizer, "cuda:0", resident_share=1)
        called = _as_called(model, way)
        before = _reset_peak()
        losses = []
        for step in range(STEPS):
            if way == COMPILED:
                torch.compiler.cudagraph_mark_step_begin()
            for part in range(3 if way == PASSES else 1):
                loss = called(_input(step + part * STEPS)).square().mean()
                loss.backward()
            optimizer.step()
            if waits:
                optimizer.synchronize()
            if averages is not None:
                averages.update_parameters(model)
            losses.append(loss.detach().clone())
            if way == ADAPTED and step == LACKS_ROOM:
                _find_no_memory(PARAMETERS)
            optimizer.zero_grad()
            if frozen is not None:
                print(f"step {step}: {frozen.report or 'all blocks stream'}")
            if offload is not None:
                print(f"step {step}: {offload.report}")
                if step == 0 and offload.report.startswith("0.0 of"):
                    raise AssertionError("no activation has left")
            if way == ADAPTED and not waits:
                print(f"step {step}: {optimizer.gpu_report.weights or 'all blocks stream'}")
        optimizer.synchronize()
        taken = _peak() - before
        seen = [*losses, *model.state_dict().values(), *(averages.parameters() if averages is not None else ())]
        values = [tensor.detach().cpu().clone() for tensor in seen]
    del rest
    return values, taken


def _left(way: str, taken: int) -> int:
    """What of the GPU's memory is left to the loop, whose steps take so much; 0: everything."""
    if way in (FULL, EXPANDABLE):
        return taken * 5 // 4 + SPARE_BYTES
    if way == ADAPTED:  # half of the parameters fit, and what is always left free
        return taken + PARAMETERS + (0 if machine.DRY_RUN else torch.cuda.mem_get_info()[1] // 50)
    if way == LEAVING:
        return taken + SPARE_BYTES - LAYERS * ROWS * WIDTH  # bytes: half of the layers' inputs
    if way == PASSES:
        return taken + SPARE_BYTES - PARAMETERS  # bytes: half of the gradients
    return taken + SPARE_BYTES + PARAMETERS if way in (BEYOND, FROZEN) else 0  # half of their bytes


def _leave(gpu_bytes: int) -> torch.Tensor | None:
    """A tensor that leaves so much of the GPU's memory to others."""
    if gpu_bytes == 0 or machine.DRY_RUN:
        return None
    machine.release_cached()
    free = torch.cuda.mem_get_info()[0]
    return torch.empty(max(0, free - gpu_bytes), dtype=torch.uint8, device=machine.DEVICE)


def _find_no_memory(gpu_bytes: int) -> None:
    """An allocation of so much more than is free."""
    if machine.DRY_RUN:
        superoffload.torch.cuda.on_failed_allocation(0, 80 << 30, 0, 0)
        return
    with contextlib.suppress(torch.OutOfMemoryError):
        torch.empty(torch.cuda.mem_get_info()[0] + gpu_bytes, dtype=torch.uint8, device=machine.DEVICE)


def _reset_peak() -> int:
    if machine.DRY_RUN:
        return 0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _peak() -> int:
    return 0 if machine.DRY_RUN else torch.cuda.max_memory_allocated()


def _expand_segments() -> None:
    if machine.DRY_RUN:
        return
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    probe = torch.empty(64 << 20, dtype=torch.uint8, device=machine.DEVICE)
    if not any(segment.get("is_expandable") for segment in torch.cuda.memory_snapshot()):
        raise machine.Unavailable("torch's allocator has no expandable segments here")
    del probe


def compare(expected: list[torch.Tensor], seen: list[torch.Tensor]) -> None:
    """Raises for other bits."""
    different = [i for i, (a, b) in enumerate(zip(expected, seen, strict=True)) if not torch.equal(a, b)]
    if different:
        a, b = expected[different[0]], seen[different[0]]
        raise AssertionError(
            f"{len(different)} of {len(seen)} tensors have other bits than the loop that waits; first tensor "
            f"{different[0]}, {(a != b).sum()} of {a.numel()} elements"
        )


def check(way: str) -> dict[str, int]:
    """A step of the session."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # otherwise products may choose by what memory is free
    machine.use_gpu()
    if way == EXPANDABLE:
        _expand_segments()
    if way == GRAPHED and machine.DRY_RUN:
        import pytest
        from tests.support import fake_cuda_graphs

        fake_cuda_graphs.install(pytest.MonkeyPatch())
    with machine.daemon(machine.daemon_budget(PARAMETERS)):
        expected, taken = train(way, waits=True)
        gc.collect()
        seen, _ = train(way, False, _left(way, taken))
    compare(expected, seen)
    return {"parameters": PARAMETERS, "bytes_of_steps": taken}
