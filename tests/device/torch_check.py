"""superoffload.torch on a GPU against superoffload.torch on the host: every bit of every step.

The gradients of both are the same by construction: a loss is a sum of parameters times given numbers. Kernels that do
nothing but take their time stand for a model's work, on two streams, so that a wait that is missing shows.
"""

import contextlib
import sys

import torch

import superoffload
import superoffload.torch
from superoffload._gpu_attachment import MOVERS
from superoffload.torch import GpuOptions

STEPS = 12
MICRO_BATCHES = 2
SKIPPED_STEP = 5
SHAPES = [(257, 129), (3,), (512, 300), (64, 64), (), (1000, 77)]
BUCKET_BYTES = 1 << 16
DELAY_CYCLES = 200_000


class Delayed(torch.autograd.Function):
    @staticmethod
    def forward(_, weight: torch.Tensor) -> torch.Tensor:
        delay(weight)
        return weight.view_as(weight)

    @staticmethod
    def backward(_, gradient: torch.Tensor) -> torch.Tensor:
        delay(gradient)
        return gradient


def delay(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda._sleep(DELAY_CYCLES)


class Piece(torch.nn.Module):
    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))

    def forward(self, factors: torch.Tensor, seen: list[torch.Tensor]) -> torch.Tensor:
        seen.append(self.weight.detach().clone())
        return (Delayed.apply(self.weight) * factors).sum()


def loss_of(pieces: torch.nn.ModuleList, factors: list[torch.Tensor], seen: list[torch.Tensor]) -> torch.Tensor:
    """Every other piece computes on a stream of its own."""
    if not factors[0].is_cuda:
        return sum(piece(factor, seen) for piece, factor in zip(pieces, factors, strict=True))
    here, beside = torch.cuda.current_stream(), torch.cuda.Stream()
    beside.wait_stream(here)
    losses = []
    for number, (piece, factor) in enumerate(zip(pieces, factors, strict=True)):
        with torch.cuda.stream(beside) if number % 2 else contextlib.nullcontext():
            losses.append(piece(factor, seen))
    here.wait_stream(beside)
    return sum(losses)


def train(device: str, dtype: torch.dtype, **options) -> list[torch.Tensor]:
    """Parameters as each forward pass saw them, and as the last step left them."""
    generator = torch.Generator().manual_seed(3)
    pieces = torch.nn.ModuleList(Piece(shape, dtype, generator) for shape in SHAPES).to(device)
    optimizer = superoffload.torch.AdamW(
        pieces.named_parameters(), lr=1e-2, weight_decay=0.1, max_grad_norm=100.0, bucket_bytes=BUCKET_BYTES, **options
    )
    seen: list[torch.Tensor] = []
    try:
        for step in range(STEPS):
            scale = 10.0 ** (step % 3 - 2)  # some steps are clipped
            for _ in range(MICRO_BATCHES):
                factors = [(scale * torch.randn(shape, generator=generator)).to(dtype) for shape in SHAPES]
                if step == SKIPPED_STEP:
                    factors[0][0] = torch.inf
                on_device = [factor.to(device) for factor in factors]  # until either stream has read them
                loss_of(pieces, on_device, seen).backward()
            optimizer.step()
        optimizer.synchronize()
        seen += [piece.weight.detach().clone() for piece in pieces]
        return [tensor.cpu() for tensor in seen]
    finally:
        optimizer.close()


def compare(expected: list[torch.Tensor], device: str, dtype: torch.dtype) -> tuple[int, int]:
    """Trains in every way that works here; returns how many ways, and how many of them gave other bits."""
    checks = failures = 0
    for mover in MOVERS:
        for residents in (0, 2, "auto"):
            way = f"{dtype}, mover {mover}, {residents} resident buckets"
            try:
                seen = train(device, dtype, gpu=GpuOptions(mover=mover, resident_buckets=residents))
            except superoffload.Error as error:
                if error.code.name not in ("FAILED_PRECONDITION", "UNIMPLEMENTED"):
                    raise
                print(f"{way}: not here: {error}")
                break
            checks += 1
            if not all(torch.equal(a, b) for a, b in zip(expected, seen, strict=True)):
                failures += 1
                print(f"{way}: OTHER BITS than on the host")
    return checks, failures


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("torch finds no GPU")
    totals = [0, 0]
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for i, count in enumerate(compare(train("cpu", dtype), "cuda", dtype)):
            totals[i] += count
    print(f"checks={totals[0]} failures={totals[1]}")
    sys.exit(totals[1] > 0 or totals[0] == 0)


if __name__ == "__main__":
    main()
