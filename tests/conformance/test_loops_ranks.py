"""Two ranks that reduce gradients by hand, as loops without DistributedDataParallel do.

Weights are torch.optim's, and the same bits on both ranks.
"""

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]
LOOP = """
import sys, torch, torch.distributed, superoffload.torch
from tests.support import process_group
store, endpoint, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)

def train(make):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 48), torch.nn.Tanh(), torch.nn.Linear(48, 8))
    optimizer = make(model.parameters(), lr=1e-2)
    for step in range(8):
        batch = torch.randn(16, 8, generator=torch.Generator().manual_seed(2 * step + rank))
        model(batch).square().mean().backward()
        for p in model.parameters():
            torch.distributed.all_reduce(p.grad)  # writes it behind torch's back
            p.grad /= 2
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in model.parameters()])

expected = train(torch.optim.AdamW)
for overlap in ("auto", True, False):
    def make(parameters, **options):
        return superoffload.torch.AdamW(parameters, endpoint=endpoint, overlap=overlap, bucket_bytes=4096, **options)

    actual = train(make)
    assert (actual - expected).abs().max() < 2e-6, (overlap, (actual - expected).abs().max())
    ranks = [torch.empty_like(actual) for _ in range(2)]
    torch.distributed.all_gather(ranks, actual)
    assert torch.equal(*ranks), overlap
process_group.leave()
"""


def test_gradients_reduced_by_hand_on_two_ranks(tmp_path, daemon):
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", LOOP, str(tmp_path / "store"), daemon.endpoint, str(rank)],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [rank.communicate(timeout=240)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(errors)
