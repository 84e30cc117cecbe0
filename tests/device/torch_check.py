"""superoffload.torch on a GPU against superoffload.torch on the host: every bit of every step.

The gradients of both are the same by construction: a loss is a sum of parameters times given numbers. Kernels that do
nothing but take their time stand for a model's work, on two streams, so that a wait that is missing shows.
"""

import contextlib
from collections.abc import Mapping

import torch
from tests.device import machine

import superoffload
import superoffload.torch
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
    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, seen: list[torch.Tensor]
    ) -> None:
        """`seen` gets what the parameter is in each forward pass. It is no argument of that: wrappers copy those."""
        super().__init__()
        self.seen = seen
        self.weight = torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))

    def forward(self, factors: torch.Tensor) -> torch.Tensor:
        self.seen.append(self.weight.detach().clone())
        return (Delayed.apply(self.weight) * factors).sum()


def loss_of(pieces: torch.nn.ModuleList, factors: list[torch.Tensor]) -> torch.Tensor:
    """Every other piece computes on a stream of its own."""
    if not factors[0].is_cuda:
        return sum(piece(factor) for piece, factor in zip(pieces, factors, strict=True))
    here, beside = torch.cuda.current_stream(), torch.cuda.Stream()
    beside.wait_stream(here)
    losses = []
    for number, (piece, factor) in enumerate(zip(pieces, factors, strict=True)):
        with torch.cuda.stream(beside) if number % 2 else contextlib.nullcontext():
            losses.append(piece(factor))
    here.wait_stream(beside)
    return sum(losses)


def train(
    device: str, dtype: torch.dtype, steps: int = STEPS, algorithm: str = "AdamW", **options
) -> list[torch.Tensor]:
    """Parameters as each forward pass saw them, and as the last step left them."""
    generator = torch.Generator().manual_seed(3)
    seen: list[torch.Tensor] = []
    pieces = torch.nn.ModuleList(Piece(shape, dtype, generator, seen) for shape in SHAPES).to(device)
    optimizer = getattr(superoffload.torch, algorithm)(
        pieces.named_parameters(), lr=1e-2, weight_decay=0.1, max_grad_norm=100.0, bucket_bytes=BUCKET_BYTES, **options
    )
    try:
        for step in range(steps):
            scale = 10.0 ** (step % 3 - 2)  # some steps are clipped
            for _ in range(MICRO_BATCHES):
                factors = [(scale * torch.randn(shape, generator=generator)).to(dtype) for shape in SHAPES]
                if step == SKIPPED_STEP:
                    factors[0][0] = torch.inf
                on_device = [factor.to(device) for factor in factors]  # until either stream has read them
                loss_of(pieces, on_device).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        seen += [piece.weight.detach().clone() for piece in pieces]
        return [tensor.cpu() for tensor in seen]
    finally:
        optimizer.close()


def compare(
    expected: list[torch.Tensor], dtype: torch.dtype, mover: str, slots: int | str = "auto", **options
) -> tuple[int, int]:
    """Trains in every way that works here; returns how many ways, and how many of them gave other bits."""
    checks = failures = 0
    for residents in (0, 2, "auto"):
        way = f"{dtype}, mover {mover}, {residents} resident buckets"
        try:
            gpu = GpuOptions(mover=mover, resident_buckets=residents, gradient_slots=slots)
            seen = train(machine.DEVICE, dtype, gpu=gpu, **options)
        except superoffload.Error as error:
            if not machine.lacks_what_it_needs(error):
                raise
            print(f"{way}: not here: {error}")
            break
        checks += 1
        different = [i for i, (a, b) in enumerate(zip(expected, seen, strict=True)) if not torch.equal(a, b)]
        failures += bool(different)
        print(f"{way}: {f'OTHER BITS in {len(different)} of {len(seen)} tensors' if different else 'same bits'}")
        if different:
            a, b = expected[different[0]], seen[different[0]]
            print(f"    first: tensor {different[0]}, {(a != b).sum()} of {a.numel()} elements")
    return checks, failures


def check(
    dtype_name: str,
    mover: str,
    slots: int | str = "auto",
    algorithm: str = "AdamW",
    dtypes: Mapping[str, str] | None = None,
    steps: int = STEPS,
    **options,
) -> dict[str, int]:
    """A step of the session: raises for other bits. `slots`: GpuOptions.gradient_slots; `options`: the GPU's only."""
    dtype = getattr(torch, dtype_name)
    common = {"algorithm": algorithm, "steps": steps}
    common |= {option: getattr(torch, name) for option, name in (dtypes or {}).items()}
    with machine.daemon(1 << 30):
        expected = train("cpu", dtype, **common)
        machine.use_gpu()
        checks, failures = compare(expected, dtype, mover, slots, **common, **options)
    if checks == 0:
        raise machine.Unavailable(f"mover {mover} does not work here; the log says why")
    if failures:
        raise AssertionError(f"{failures} of {checks} ways gave other bits than the host")
    return {"ways": checks}
