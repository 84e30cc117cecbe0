"""What is left of a step when backward has ended on the GPU: until the verdict, and until the next forward computes."""

import statistics
import time

import torch
from tests.device import machine, models, rows

import superoffload.torch

STEPS = 2 if machine.DRY_RUN else 10
PARAMETERS = min(machine.BILLION, 500_000_000)


def tails() -> list[str]:
    """Lines of a table, one per mover."""
    machine.use_gpu()
    model = models.build(PARAMETERS)

    def describe(optimizer: superoffload.torch.AdamW) -> str:
        verdict, forward = _tail(model, optimizer)
        return f"{verdict:8.3f} ms until step() has the verdict, {forward:8.3f} until forward computes"

    return rows.line_per_mover(machine.MOVERS, model, describe)


def _tail(model: torch.nn.Module, optimizer: superoffload.torch.AdamW) -> tuple[float, float]:
    """Medians, in milliseconds. For the first the host waits for backward's end; for the second it does not, so that it
    is ahead of the GPU as in a real loop."""
    tokens = torch.zeros(rows.BATCH, models.SEQUENCE + 1, dtype=torch.long, device=machine.DEVICE)
    forwards: list[object] = []
    # Behind the optimizer's own hook, which is for all modules, and so is called first.
    hook = model.embedding.register_forward_pre_hook(lambda *_: forwards.append(rows.mark()))
    backwards, verdicts = [], []
    try:
        for step in range(rows.WARM_UP + 2 * STEPS + 1):
            model(tokens).backward()
            if step >= rows.WARM_UP + STEPS:
                machine.synchronize()
            begin = time.perf_counter()
            backwards.append(rows.mark())
            optimizer.step()
            verdicts.append((time.perf_counter() - begin) * 1e3)
            optimizer.zero_grad()
        machine.synchronize()
    finally:
        hook.remove()
    between = [rows.between(end, begin) for end, begin in zip(backwards, forwards[1:], strict=False)]
    return statistics.median(verdicts[-STEPS:]), statistics.median(between[rows.WARM_UP : rows.WARM_UP + STEPS])
