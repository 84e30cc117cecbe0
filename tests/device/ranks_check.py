"""Two ranks on one GPU, each a process with a daemon of its own, against the same ranks on the host: every bit.

NCCL refuses two ranks on one GPU, so what they gather and reduce goes over gloo, which takes the GPU's tensors as
well. As in torch_check.py gradients are the same by construction, and a sum of two is the same in either order.

One rank: python -m tests.device.ranks_check FOLDER RANK
"""

import datetime
import json
import pathlib
import subprocess
import sys
import tempfile

import torch
from tests.device import machine
from tests.device.torch_check import BUCKET_BYTES, MICRO_BATCHES, Piece
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh

import superoffload.torch

RANKS = 2
STEPS = 8
SKIPPED_STEP = 4
SHAPES = [(257, 129), (3,), (1, 70), (512, 300), (64, 64)]  # uneven shards, and one that is empty on the second rank
LAYOUTS = ("sharded", "replicated", "streamed")
LIMIT = datetime.timedelta(seconds=30)  # of a rank that waits for the other one


class Pieces(torch.nn.Module):
    def __init__(self, dtype: torch.dtype, seen: list[torch.Tensor]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.pieces = torch.nn.ModuleList(Piece(shape, dtype, generator, seen) for shape in SHAPES)

    def forward(self, factors: list[torch.Tensor]) -> torch.Tensor:
        return sum(piece(factor) for piece, factor in zip(self.pieces, factors, strict=True))


def distributed(model: Pieces, layout: str, device: str) -> torch.nn.Module:
    if layout == "replicated":
        return torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.1)
    mesh = init_device_mesh(device, (RANKS,))
    for piece in model.pieces:
        fully_shard(piece, mesh=mesh)
    root = fully_shard(model, mesh=mesh)
    root.set_force_sum_reduction_for_comms(True)  # gloo has no average
    return root


def train(rank: int, device: str, layout: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Parameters as each forward pass saw them."""
    seen: list[torch.Tensor] = []
    model = Pieces(dtype, seen).to(device)
    whole = distributed(model, layout, device)
    optimizer = superoffload.torch.AdamW(
        model.named_parameters(),
        lr=1e-2,
        max_grad_norm=100.0,
        bucket_bytes=BUCKET_BYTES,
        replicas=layout == "replicated" or None,
        weights="streamed" if layout == "streamed" else "resident",
    )
    generator = torch.Generator().manual_seed(rank)
    for step in range(STEPS):
        for part in range(MICRO_BATCHES):
            if layout != "replicated":
                whole.set_requires_gradient_sync(part == MICRO_BATCHES - 1)
            factors = [(10.0 ** (step % 3 - 2) * torch.randn(shape, generator=generator)).to(dtype) for shape in SHAPES]
            if step == SKIPPED_STEP and rank == 1:
                factors[0][0] = torch.inf
            on_device = [factor.to(device) for factor in factors]  # until backward has read them
            whole(on_device).backward()
        optimizer.step()
        assert optimizer.last_result.kind.skipped == (step == SKIPPED_STEP), optimizer.last_result
        optimizer.zero_grad()
    optimizer.close()
    return [tensor.cpu() for tensor in seen]


def be_rank(folder: pathlib.Path, rank: int) -> dict[str, str]:
    """What became of each layout."""
    store = f"file://{folder}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS, timeout=LIMIT)
    found = {}
    with machine.daemon(1 << 30):
        expected = {layout: train(rank, "cpu", layout, torch.bfloat16) for layout in LAYOUTS}
        machine.use_gpu()
        for layout in LAYOUTS:
            try:
                seen = train(rank, machine.DEVICE, layout, torch.bfloat16)
            except RuntimeError as error:
                if "gloo" not in str(error).lower():
                    raise
                found[layout] = f"not here: {error}"
                continue
            different = [
                i for i, (a, b) in enumerate(zip(expected[layout], seen, strict=True)) if not torch.equal(a, b)
            ]
            found[layout] = f"OTHER BITS in {len(different)} of {len(seen)} tensors" if different else "same bits"
            print(f"rank {rank}, {layout}: {found[layout]}")
    torch.distributed.destroy_process_group()
    return found


def check() -> dict[str, str]:
    """A step of the session: raises for other bits."""
    with tempfile.TemporaryDirectory(prefix="so-ranks-") as directory:
        ranks = [
            subprocess.Popen([sys.executable, "-m", "tests.device.ranks_check", directory, str(rank)])
            for rank in range(RANKS)
        ]
        codes = [rank.wait() for rank in ranks]
        if any(codes):
            raise AssertionError(f"the ranks ended with {codes}")
        found = [json.loads((pathlib.Path(directory) / f"found{rank}").read_text()) for rank in range(RANKS)]
    together = {layout: "; ".join(dict.fromkeys(each[layout] for each in found)) for layout in LAYOUTS}
    if all(words.startswith("not here") for words in together.values()):
        raise machine.Unavailable(f"gloo does not take the GPU's tensors: {together}")
    if any("OTHER BITS" in words for words in together.values()):
        raise AssertionError(f"other bits than on the host: {together}")
    return together


if __name__ == "__main__":
    where, number = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    (where / f"found{number}").write_text(json.dumps(be_rank(where, number)))
