"""Trains a small Llama on the text of Python's reference with each format of AdamW's state, and compares the losses.

Usage: python client/bench/state_quality.py [--steps N] [--seeds N] [--picture FILE.svg]

Of one seed all formats begin with the same weights and see the same batches. Prints, as Markdown, the loss on text that
no run has seen, and its distance from that of fp32. A run that begins one ulp away shows how far apart runs come that
are equally good.
"""

import argparse
import math
import pathlib
import pydoc_data.topics
import statistics
import time

import torch
import transformers

import superoffload.torch

SEQUENCE, BATCH, WARM_UP, LR, MAX_GRAD_NORM = 96, 8, 100, 2e-3, 1.0
FORMATS = {
    "fp32": {},
    "fp32, one weight an ulp away": {"nudge": True},
    "bf16, stochastic": {"state_dtype": torch.bfloat16},
    "bf16, to nearest": {"state_dtype": torch.bfloat16, "rounding": "nearest"},
    "8 bits": {"kind": superoffload.torch.AdamW8bit},
    "bf16 parameters": {"dtype": torch.bfloat16},
    "bf16 parameters and masters": {"dtype": torch.bfloat16, "master_dtype": torch.bfloat16},
    "bf16 parameters, torch.optim": {"dtype": torch.bfloat16, "kind": torch.optim.AdamW},
}
COLOURS = ("#f5a623", "#1a4fa0", "#c00000", "#2a7d2a", "#7b3fa0", "#8a8a8a", "#00868b", "#000000")


def text() -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes to train on, and the last tenth to judge by."""
    whole = "\n\n".join(pydoc_data.topics.topics[topic] for topic in sorted(pydoc_data.topics.topics))
    tokens = torch.tensor(list(whole.encode()), dtype=torch.long)
    return tokens[: -len(tokens) // 10], tokens[-len(tokens) // 10 :]


def model() -> torch.nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=96, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4
    )
    return transformers.LlamaForCausalLM(config)


def batch(tokens: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    first = torch.randint(len(tokens) - SEQUENCE, (BATCH,), generator=generator)
    return torch.stack([tokens[i : i + SEQUENCE] for i in first.tolist()])


@torch.no_grad()
def judge(llama: torch.nn.Module, tokens: torch.Tensor) -> float:
    rows = tokens[: len(tokens) // SEQUENCE // BATCH * SEQUENCE * BATCH].view(-1, BATCH, SEQUENCE)
    return statistics.fmean(llama(input_ids=row, labels=row).loss.item() for row in rows)


def train(
    seed: int,
    steps: int,
    learned: torch.Tensor,
    unseen: torch.Tensor,
    kind: type[torch.optim.Optimizer] = superoffload.torch.AdamW,
    dtype: torch.dtype = torch.float32,
    nudge: bool = False,
    **options,
) -> list[tuple[int, float]]:
    """Losses on ``unseen``, by step."""
    torch.manual_seed(seed)
    llama = model().to(dtype)
    if nudge:
        weight = llama.lm_head.weight.data
        weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(1.0))
    hosted = issubclass(kind, superoffload.torch.AdamW)
    if hosted:
        options |= {"max_grad_norm": MAX_GRAD_NORM, "seed": seed}
    optimizer = kind(llama.named_parameters(), lr=LR, weight_decay=0.1, **options)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda t: min(1, (t + 1) / WARM_UP) * (0.55 + 0.45 * math.cos(math.pi * min(1, t / steps)))
    )
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for step in range(1, steps + 1):
        tokens = batch(learned, generator)
        llama(input_ids=tokens, labels=tokens).loss.backward()
        if not hosted:
            torch.nn.utils.clip_grad_norm_(llama.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % (steps // 20) == 0:
            losses.append((step, judge(llama, unseen)))
    if hosted:
        optimizer.close()
    return losses


def table(found: dict[str, list[list[tuple[int, float]]]]) -> str:
    exact = [losses[-1][1] for losses in found["fp32"]]
    rows = [
        "| format | loss, by seed | mean | distance from fp32, by seed | mean |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, runs in found.items():
        last = [losses[-1][1] for losses in runs]
        away = [a - b for a, b in zip(last, exact, strict=True)]
        words = ", ".join(f"{loss:.4f}" for loss in last), ", ".join(f"{distance:+.4f}" for distance in away)
        rows.append(
            f"| {name} | {words[0]} | {statistics.fmean(last):.4f} | {words[1]} | {statistics.fmean(away):+.4f} |"
        )
    return "\n".join(rows)


def draw(found: dict[str, list[list[tuple[int, float]]]]) -> str:
    """The mean over seeds by step, from the first quarter on. SVG without a library."""
    width, height, left, bottom = 720, 320, 56, 40
    curves = {
        name: [(runs[0][i][0], statistics.fmean(run[i][1] for run in runs)) for i in range(len(runs[0]))]
        for name, runs in found.items()
    }
    curves = {name: curve[len(curve) // 4 :] for name, curve in curves.items()}
    every = [point for curve in curves.values() for point in curve]
    (first, *_, last), (low, *_, high) = (sorted(values) for values in zip(*every, strict=True))
    x = lambda step: left + (width - left - 16) * (step - first) / (last - first)  # noqa: E731
    y = lambda loss: 16 + (height - 16 - bottom) * (high - loss) / (high - low)  # noqa: E731
    marks = [
        f'<text x="{left - 8}" y="{y(loss) + 4:.1f}" text-anchor="end">{loss:.2f}</text>'
        for loss in (low + (high - low) * i / 4 for i in range(5))
    ]
    marks += [
        f'<text x="{x(step):.1f}" y="{height - bottom + 18}" text-anchor="middle">{step}</text>'
        for step, _ in next(iter(curves.values()))[::3]
    ]
    for place, ((name, curve), colour) in enumerate(zip(curves.items(), COLOURS, strict=False)):
        path = " ".join(f"{'L' if i else 'M'}{x(step):.1f},{y(loss):.1f}" for i, (step, loss) in enumerate(curve))
        line = f'fill="none" stroke="{colour}" stroke-width="{max(1, 7 - 2 * place)}" stroke-linejoin="round"'
        at = 32 + 20 * place
        marks += [
            f'<path d="{path}" {line}/><path d="M{width - 220},{at} h28" {line}/>',
            f'<text x="{width - 184}" y="{at + 4}">{name}</text>',
        ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="12"><rect width="100%" height="100%" fill="white"/>{"".join(marks)}'
        f'<text x="{width / 2}" y="{height - 6}" text-anchor="middle">step</text></svg>\n'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--picture", type=pathlib.Path, help="where the mean losses by step are drawn")
    arguments = parser.parse_args()
    learned, unseen = text()
    found = {name: [] for name in FORMATS}
    for seed in range(arguments.seeds):
        for name, options in FORMATS.items():
            begin = time.monotonic()
            found[name].append(train(seed, arguments.steps, learned, unseen, **options))
            print(f"seed {seed}, {name}: {found[name][-1][-1][1]:.4f}, {time.monotonic() - begin:.0f} s", flush=True)
    print(f"\n{sum(p.numel() for p in model().parameters())} parameters, {BATCH * SEQUENCE} tokens a step\n")
    print(table(found))
    if arguments.picture is not None:
        arguments.picture.write_text(draw(found))


if __name__ == "__main__":
    main()
