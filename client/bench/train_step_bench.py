"""A training step with superoffload against the same step with torch.optim.AdamW(fused=True) in the trainer's process.

Both train the same bf16 Llama-architecture model of transformers on random tokens, step by step in turn, in one
process; the in-process optimizer holds fp32 masters (bf16 parameters are cast from them after each step), as the
daemon does. Prints medians of the whole step and of its optimizer part (from the end of backward to usable
parameters), ratios, and what the guards take, which look for parameters and gradients that others wrote: the seconds
in them, and how much longer a step is with them than without, in steps taken in turn, since the daemon works meanwhile.
They read every parameter once per step, however many tokens it has: their share falls as --tokens grows.

    python client/bench/train_step_bench.py [--endpoint unix:/path] [--steps 20] [--hidden 512] [--layers 6]
"""

import argparse
import statistics
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import superoffload.torch

WARM_UP = 5  # superoffload watches the first steps, with nothing submitted early


def make_model(hidden: int, layers: int) -> torch.nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16)


class InProcess:
    """torch.optim.AdamW(fused=True) on fp32 masters."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._parameters = list(model.parameters())
        self._masters = [torch.nn.Parameter(p.detach().float()) for p in self._parameters]
        self._optimizer = torch.optim.AdamW(self._masters, lr=1e-4, fused=True)

    def step(self) -> None:
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            master.grad = parameter.grad.float()
            parameter.grad = None
        self._optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(self._parameters, self._masters, strict=True):
                parameter.copy_(master)


def timed_step(model: torch.nn.Module, optimizer, tokens: torch.Tensor) -> tuple[float, float]:
    begin = time.perf_counter()
    model(input_ids=tokens, labels=tokens).loss.backward()
    backward_end = time.perf_counter()
    optimizer.step()
    for parameter in model.parameters():
        parameter.grad = None
    end = time.perf_counter()
    return end - begin, end - backward_end


class Guards:
    """Times an optimizer's guards, and leaves them out where they are not ``on``."""

    def __init__(self, optimizer: superoffload.torch.AdamW) -> None:
        self.on = True
        self.seconds: list[float] = []
        self._wrap(optimizer._hosting.live, "changed", [])
        self._wrap(optimizer.submitter(), "find_edited", None)

    def _wrap(self, owner: object, name: str, nothing_found: object) -> None:
        guard = getattr(owner, name)

        def timed():
            if not self.on:
                return nothing_found
            begin = time.perf_counter()
            result = guard()
            self.seconds.append(time.perf_counter() - begin)
            return result

        setattr(owner, name, timed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--endpoint")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=256)
    arguments = parser.parse_args()

    models = {name: make_model(arguments.hidden, arguments.layers) for name in ("superoffload", "torch fused")}
    optimizers = {
        "superoffload": superoffload.torch.AdamW(
            models["superoffload"].parameters(), lr=1e-4, endpoint=arguments.endpoint
        ),
        "torch fused": InProcess(models["torch fused"]),
    }
    tokens = torch.randint(0, 8192, (1, arguments.tokens))
    times = {name: [] for name in models}
    guards = Guards(optimizers["superoffload"])
    unguarded = []
    for step in range(2 * arguments.steps + WARM_UP):
        if step == WARM_UP:
            guards.seconds.clear()
        guards.on = step < WARM_UP or (step - WARM_UP) % 2 == 0
        for name, model in models.items():
            sample = timed_step(model, optimizers[name], tokens)
            if not guards.on and name == "superoffload":
                unguarded.append(sample[0])
            elif step >= WARM_UP:
                times[name].append(sample)
    count = sum(p.numel() for p in models["superoffload"].parameters())
    print(f"{count / 1e6:.1f} M parameters, medians of {arguments.steps} steps taken in turn")
    medians = {
        name: [statistics.median(part) for part in zip(*samples, strict=True)] for name, samples in times.items()
    }
    print(f"{'':14} {'step ms':>10} {'optimizer part ms':>20}")
    for name, (whole, part) in medians.items():
        print(f"{name:14} {whole * 1e3:10.1f} {part * 1e3:20.1f}")
    ours, theirs = medians["superoffload"], medians["torch fused"]
    print(f"{'ratio':14} {ours[0] / theirs[0]:10.2f} {ours[1] / theirs[1]:20.2f}")
    whole = sum(sample[0] for sample in times["superoffload"])
    print(f"guards take {100 * sum(guards.seconds) / whole:.2f} % of superoffload's step; ", end="")
    print(f"with them it is {100 * (ours[0] / statistics.median(unguarded) - 1):+.2f} % longer than without")
    optimizers["superoffload"].close()


if __name__ == "__main__":
    main()
