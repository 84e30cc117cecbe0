"""One training run of the quick start: a transformer on bytes of text, with one optimizer. Prints JSON.

Usage: python train.py superoffload|torch [--steps N] [--hidden N] [--layers N] [--kill-at STEP --keeper PID]
"""

import argparse
import json
import os
import pathlib
import pydoc_data.topics
import signal
import statistics
import sys
import time

import torch

SEQUENCE, BATCH, HEADS = 64, 2, 8
HYPERPARAMETERS = {"lr": 3e-4}
MAX_GRAD_NORM = 1.0
_WARM_UP = 4  # steps that are not timed


class Block(torch.nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.norms = torch.nn.ModuleList([torch.nn.LayerNorm(hidden) for _ in range(2)])
        self.qkv, self.out = torch.nn.Linear(hidden, 3 * hidden), torch.nn.Linear(hidden, hidden)
        self.up, self.down = torch.nn.Linear(hidden, 4 * hidden), torch.nn.Linear(4 * hidden, hidden)

    def forward(self, x):
        batch, length, _ = x.shape
        heads = self.qkv(self.norms[0](x)).view(batch, length, 3, HEADS, -1).transpose(1, 3)
        attended = torch.nn.functional.scaled_dot_product_attention(*heads.unbind(2), is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        return x + self.down(torch.nn.functional.gelu(self.up(self.norms[1](x))))


class Transformer(torch.nn.Module):
    def __init__(self, hidden, layers):
        super().__init__()
        self.bytes, self.places = torch.nn.Embedding(256, hidden), torch.nn.Embedding(SEQUENCE, hidden)
        self.blocks = torch.nn.Sequential(*[Block(hidden) for _ in range(layers)], torch.nn.LayerNorm(hidden))
        self.head = torch.nn.Linear(hidden, 256)

    def forward(self, tokens):
        x = self.bytes(tokens) + self.places(torch.arange(tokens.shape[1]))
        return self.head(self.blocks(x))


class TorchWithMasters:
    """What one writes without superoffload: fp32 masters, torch's fused AdamW on them, a cast back."""

    def __init__(self, parameters):
        self.parameters = list(parameters)
        self.masters = [torch.nn.Parameter(p.detach().float()) for p in self.parameters]
        for master in self.masters:
            master.grad = torch.zeros_like(master)
        self.optimizer = torch.optim.AdamW(self.masters, fused=True, **HYPERPARAMETERS)

    @torch.no_grad()
    def step(self):
        torch._foreach_copy_([m.grad for m in self.masters], [p.grad for p in self.parameters])
        torch.nn.utils.clip_grad_norm_(self.masters, MAX_GRAD_NORM)
        self.optimizer.step()
        torch._foreach_copy_(self.parameters, self.masters)

    def zero_grad(self):
        for parameter in self.parameters:
            parameter.grad = None


def anonymous_bytes():
    """Memory of this process that is not shared with the daemon."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def kill_child(keeper):
    """The keeper's only child is the daemon."""
    (daemon,) = pathlib.Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()
    os.kill(int(daemon), signal.SIGKILL)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("optimizer", choices=["superoffload", "torch"])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--kill-at", type=int, default=0)
    parser.add_argument("--keeper", type=int)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = Transformer(arguments.hidden, arguments.layers).bfloat16()
    if arguments.optimizer == "torch":
        optimizer = TorchWithMasters(model.parameters())
    else:
        import superoffload.torch

        optimizer = superoffload.torch.AdamW(model.parameters(), max_grad_norm=MAX_GRAD_NORM, **HYPERPARAMETERS)
    data = torch.frombuffer(bytearray("".join(pydoc_data.topics.topics.values()).encode()), dtype=torch.uint8).long()
    batches = torch.Generator().manual_seed(0)
    losses, waits, steps = [], [], []
    for step in range(1, arguments.steps + 1):
        start = time.perf_counter()
        offsets = torch.randint(0, len(data) - SEQUENCE - 1, (BATCH,), generator=batches).tolist()
        text = torch.stack([data[i : i + SEQUENCE + 1] for i in offsets])
        logits = model(text[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), text[:, 1:].flatten())
        if step == arguments.kill_at:
            kill_child(arguments.keeper)
        loss.backward()
        ready = time.perf_counter()
        optimizer.step()
        waits.append(time.perf_counter() - ready)
        optimizer.zero_grad()
        steps.append(time.perf_counter() - start)
        losses.append(loss.item())
        bar = "#" * (30 * step // arguments.steps)
        print(f"\r   {step:3}/{arguments.steps} [{bar:30}] loss {losses[-1]:.2f} ", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    killed = arguments.kill_at
    calm = [i for i in range(_WARM_UP, arguments.steps) if killed == 0 or not killed - 1 <= i <= killed + 2]
    result = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "losses": losses,
        "wait_seconds": statistics.median(waits[i] for i in calm),
        "step_seconds": statistics.median(steps[i] for i in calm),
        "pause_seconds": steps[killed - 1] if killed else 0,
        "anonymous_bytes": anonymous_bytes(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
