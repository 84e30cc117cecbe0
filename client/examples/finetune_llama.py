"""Fine-tunes a small Llama on text with superoffload and with torch.optim.AdamW on fp32 masters, and compares.

The model is a Hugging Face LlamaForCausalLM built from its configuration, with bf16 parameters, on bytes of text.
"""

import argparse
import pathlib
import pydoc_data.topics
import time
import urllib.request

import torch
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

import superoffload.torch

SEQUENCE, BATCH = 128, 8


class TorchWithMasters:
    """What one writes by hand without superoffload: fp32 masters, AdamW on them, a cast back."""

    def __init__(self, parameters, lr, max_grad_norm):
        self.parameters = list(parameters)
        self.masters = [torch.nn.Parameter(p.detach().float()) for p in self.parameters]
        self.optimizer = torch.optim.AdamW(self.masters, lr=lr)
        self.max_grad_norm = max_grad_norm

    @torch.no_grad()
    def step(self):
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            master.grad = parameter.grad.float()
        torch.nn.utils.clip_grad_norm_(self.masters, self.max_grad_norm)
        self.optimizer.step()
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            parameter.copy_(master)

    def zero_grad(self):
        for parameter in self.parameters:
            parameter.grad = None


def build_model(seed):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=3,
        max_position_embeddings=SEQUENCE,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16)


def train(name, make_optimizer, data, steps, seed):
    model = build_model(seed)
    optimizer = make_optimizer(model.parameters())
    batches = torch.Generator().manual_seed(seed)
    losses, start = [], time.perf_counter()
    for _ in (progress := tqdm(range(steps), desc=f"{name:>12}")):
        offsets = torch.randint(0, len(data) - SEQUENCE, (BATCH,), generator=batches).tolist()
        tokens = torch.stack([data[i : i + SEQUENCE] for i in offsets])
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        progress.set_postfix(loss=f"{losses[-1]:.3f}")
    return losses, (time.perf_counter() - start) / steps, optimizer


def draw(curves, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    for name, losses in curves.items():
        plt.plot(losses, label=name, alpha=0.7)
    plt.xlabel("step")
    plt.ylabel("loss")
    plt.legend()
    plt.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=pathlib.Path, help="train on this file instead of Python's documentation")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--endpoint", help="of a running daemon; default: the usual places, else a private one")
    parser.add_argument("--plot", type=pathlib.Path, default=pathlib.Path("superoffload-quickstart.png"))
    arguments = parser.parse_args()

    text = arguments.text.read_bytes() if arguments.text else "".join(pydoc_data.topics.topics.values()).encode()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    if len(data) <= SEQUENCE:
        parser.error(f"--text holds {len(data)} bytes but must hold more than {SEQUENCE}")
    hyperparameters = {"lr": 1e-3, "max_grad_norm": 1.0}
    runs = {
        "superoffload": lambda p: superoffload.torch.AdamW(
            p, endpoint=arguments.endpoint, name=None, **hyperparameters
        ),
        "torch AdamW": lambda p: TorchWithMasters(p, **hyperparameters),
    }
    results = {name: train(name, make, data, arguments.steps, arguments.seed) for name, make in runs.items()}

    print(f"\n{'step':>6} {'superoffload':>14} {'torch AdamW':>14}")
    for step in sorted({*range(0, arguments.steps, max(1, arguments.steps // 10)), arguments.steps - 1}):
        print(f"{step + 1:6} {results['superoffload'][0][step]:14.4f} {results['torch AdamW'][0][step]:14.4f}")
    print(f"{'s/step':>6} {results['superoffload'][1]:14.3f} {results['torch AdamW'][1]:14.3f}")
    draw({name: losses for name, (losses, _, _) in results.items()}, arguments.plot)
    print(f"\nboth curves: {arguments.plot}")
    if arguments.endpoint:  # the optimizer is still alive, and so are its metrics
        address = results["superoffload"][2].metrics_address
        print(f"step statistics, as Prometheus reads them at http://{address}/metrics:")
        for line in urllib.request.urlopen(f"http://{address}/metrics").read().decode().splitlines():
            if line.startswith("superoffload") and "_bucket{" not in line:
                print("  ", line)


if __name__ == "__main__":
    main()
