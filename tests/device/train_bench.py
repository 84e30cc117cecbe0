"""Step times of transformers on a GPU whose optimizer is in the daemon, as ratios to other ways, measured in one run.

Usage: train_bench.py [--parameters N ...] [--steps N] [--probe]
Without --parameters: 1 billion, and the largest that fits.

Rows, per model, of the same batches:
  forward and backward     no optimizer at all: what can be reached
  superoffload             hidden behind backward and the next forward
  without speculation      every update waits for the verdict
  gradients, then step     a ZeRO-Offload-style schedule: all gradients, then the step, then the parameters
  fused AdamW on the GPU   torch.optim.AdamW(fused=True), where states fit
  torchao CPU offload      torchao.optim.CPUOffloadOptimizer, where it is installed
Exposed: time of a step beyond forward and backward, slower kernels included. MFU: model FLOPs utilization of dense
bf16, 6 FLOPs per parameter and token.
"""

import argparse
import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable

import torch

import superoffload.torch
from superoffload.torch import GpuOptions, Mover

WARM_UP = 4
PROBES = 8  # of client/src/gpu/gpu_plane.cc
PROBE_ELEMENTS = 32 << 20
MATRIX = 8192
PRODUCTS = 500
SEQUENCE = 2048
VOCABULARY = 32768
HEAD = 128
# Dense bf16 FLOP/s by name; what is not here has no MFU.
PEAKS = {"H100": 989e12, "H200": 989e12, "GH200": 989e12, "GB200": 2500e12, "B200": 2250e12, "A100": 312e12}
BYTES_ON_GPU = 6  # per parameter: itself, its gradient, slack
BYTES_ON_HOST = 22  # masters, moments, theta and two gradient slots, if cast to fp32


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // HEAD)
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(2))
        self.qkv = torch.nn.Linear(width, 3 * width, bias=False)
        self.out = torch.nn.Linear(width, width, bias=False)
        self.up = torch.nn.Linear(width, 4 * width, bias=False)
        self.down = torch.nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(torch.nn.functional.gelu(self.up(self.norms[1](x))))


class Transformer(torch.nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, width)
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = torch.nn.LayerNorm(width)
        self.head = torch.nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        logits = self.head(self.norm(x)).flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits.float(), tokens[:, 1:].flatten())


def build(parameters: int, device: str) -> Transformer:
    """About that many; layers are about as many as their width is heads."""
    width = max(HEAD, round((parameters / 12 * HEAD) ** (1 / 3) / HEAD) * HEAD)
    layers = max(1, round((parameters - 2 * VOCABULARY * width) / (12 * width**2)))
    torch.manual_seed(0)
    with torch.device(device):
        return Transformer(width, layers).to(torch.bfloat16)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def step_seconds(model: Transformer, step: Callable[[], None], steps: int, device: str) -> float:
    """Mean of steps that follow each other, so that one's tail may hide behind the next one's head."""
    generator = torch.Generator(device).manual_seed(1)
    tokens = torch.randint(VOCABULARY, (1, SEQUENCE + 1), generator=generator, device=device)
    for number in range(-WARM_UP, steps):
        if number == 0:
            synchronize(device)
            begin = time.perf_counter()
        model(tokens).backward()
        step()
    synchronize(device)
    return (time.perf_counter() - begin) / steps


def superoffload_seconds(model: Transformer, steps: int, device: str, wait: bool = False, **options) -> float:
    optimizer = superoffload.torch.AdamW(model.named_parameters(), lr=1e-5, max_grad_norm=1.0, **options)
    if wait:
        # A hook that held the optimizer would hold its GPU memory, too.
        optimizer.register_step_post_hook(lambda stepped, *_: stepped.synchronize())
    try:
        return step_seconds(model, optimizer.step, steps, device)
    finally:
        optimizer.close()


def drop_gradients(model: Transformer) -> Callable[[], None]:
    return lambda: model.zero_grad(set_to_none=True)


def torch_seconds(model: Transformer, optimizer: torch.optim.Optimizer, steps: int, device: str) -> float:
    def step() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step_seconds(model, step, steps, device)


def torchao_seconds(model: Transformer, steps: int, device: str) -> float:
    from torchao.optim import CPUOffloadOptimizer  # where it is installed

    optimizer = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, fused=True)
    return step_seconds(model, lambda: (optimizer.step(), optimizer.zero_grad()), steps, device)


def measure(parameters: int, steps: int, device: str, peak: float) -> None:
    model = build(parameters, device)
    count = sum(p.numel() for p in model.parameters())
    rows = {
        "forward and backward": lambda: step_seconds(model, drop_gradients(model), steps, device),
        "superoffload": lambda: superoffload_seconds(model, steps, device),
        "without speculation": lambda: superoffload_seconds(model, steps, device, speculation="never"),
        "gradients, then step": lambda: superoffload_seconds(
            model, steps, device, wait=True, overlap=False, gpu=GpuOptions(resident_buckets=0)
        ),
        "fused AdamW on the GPU": lambda: torch_seconds(
            model, torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True), steps, device
        ),
        "torchao CPU offload": lambda: torchao_seconds(model, steps, device),
    }
    print(f"\n{count / 1e9:.2f} billion parameters, 1 x {SEQUENCE} tokens, mean of {steps} steps")
    print(f"{'':24} {'ms/step':>9} {'to superoffload':>16} {'exposed ms':>11} {'MFU':>6}")
    seconds: dict[str, float] = {}
    for name, run in rows.items():
        try:
            seconds[name] = run()
        except (torch.OutOfMemoryError, ImportError) as error:
            print(f"{name:24} {type(error).__name__}: {str(error).splitlines()[0][:80]}")
            model.zero_grad()
            if device == "cuda":
                torch.cuda.empty_cache()
            continue
        now, ours = seconds[name], seconds.get("superoffload", math.nan)
        exposed = (now - seconds["forward and backward"]) * 1e3
        utilization = 6 * count * SEQUENCE / now / peak
        print(f"{name:24} {now * 1e3:9.2f} {now / ours:16.2f} {exposed:11.2f} {utilization:6.1%}", flush=True)


def plain_copy_seconds(elements: int, device: str) -> float:
    """Of as many rounds as an attachment measures, each there and back, in bf16, with nothing else on the GPU."""
    there = torch.empty(elements, dtype=torch.bfloat16, device=device)
    here = torch.empty(elements, dtype=torch.bfloat16, pin_memory=device == "cuda")
    for number in range(-1, PROBES):
        if number == 0:
            synchronize(device)
            begin = time.perf_counter()
        here.copy_(there, non_blocking=True)
        there.copy_(here, non_blocking=True)
        synchronize(device)
    return time.perf_counter() - begin


def probe(device: str) -> None:
    """What an attachment measures: the same copies by each mover, beside the same kernels; and plain copies without.

    And the other way round: how much longer kernels take beside the work for each mover.
    """
    model = build(200_000_000, device)
    optimizer = superoffload.torch.AdamW(
        model.named_parameters(), gpu=GpuOptions(cast="fused"), bucket_bytes=PROBE_ELEMENTS * 2
    )
    report = optimizer.gpu_report
    plain = plain_copy_seconds(PROBE_ELEMENTS, device)
    print(f"{report.gpu}, shared: {report.sharing or 'no'}, coherent: {report.coherent}; {report.notes}")
    print(f"{'plain copies alone':24} {plain * 1e3:9.2f} ms")
    for mover, seconds in sorted(report.seconds.items()):
        taken = "  <- taken" if mover == report.mover else ""
        print(f"{mover + ' beside kernels':24} {seconds * 1e3:9.2f} ms  {plain / seconds:5.2f} of plain copies{taken}")
    optimizer.close()
    alone = products_seconds(device)
    for mover in sorted(report.seconds):
        beside, steps = products_beside_steps(model, mover, device)
        print(f"{mover + ' under products':24} {beside / alone:9.2f} times their duration alone, beside {steps} steps")


def products_seconds(device: str) -> float:
    """Of matrix products on a stream of their own."""
    matrix = torch.randn(MATRIX, MATRIX, device=device).to(torch.bfloat16)
    with torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else contextlib.nullcontext():
        synchronize(device)
        begin = time.perf_counter()
        for _ in range(PRODUCTS):
            torch.mm(matrix, matrix)
        if device == "cuda":
            torch.cuda.current_stream().synchronize()
        return time.perf_counter() - begin


def products_beside_steps(model: Transformer, mover: Mover, device: str) -> tuple[float, int]:
    """How long the products take a trainer while the daemon works for it all the time, and how many steps that was."""
    optimizer = superoffload.torch.AdamW(model.named_parameters(), overlap=False, gpu=GpuOptions(mover=mover))
    gradients = [torch.zeros_like(parameter) for parameter in model.parameters()]
    done = threading.Event()
    steps = 0

    def step() -> None:
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()

    def step_until_done() -> None:
        nonlocal steps
        while not done.is_set():
            step()
            steps += 1

    step()
    worker = threading.Thread(target=step_until_done)
    worker.start()
    try:
        return products_seconds(device), steps
    finally:
        done.set()
        worker.join()
        optimizer.close()


def largest(device: str) -> int:
    """Parameters for which there is memory on either side."""
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    gpu = torch.cuda.mem_get_info()[0] if device == "cuda" else host
    return int(0.8 * min(host / BYTES_ON_HOST, gpu / BYTES_ON_GPU))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, nargs="*")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--probe", action="store_true", help="only copies and kernels beside each other")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("torch finds no GPU; this measures GPUs only")
    device = "cuda"
    if arguments.probe:
        probe(device)
        return
    name = torch.cuda.get_device_name()
    peak = next((flops for key, flops in sorted(PEAKS.items(), reverse=True) if key in name), math.nan)
    for parameters in arguments.parameters or [1e9, largest(device)]:
        measure(int(parameters), arguments.steps, device, peak)


if __name__ == "__main__":
    main()
