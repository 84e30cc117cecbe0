"""What a user sees of a run: a progress bar, and a line in the log for each step."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import torch
import tqdm

from superoffload.finetune.flops import Flops
from superoffload.finetune.ranks import Ranks
from superoffload.finetune.record import Record
from superoffload.finetune.rows import Rows
from superoffload.finetune.training import Trainer


@dataclasses.dataclass
class Measured:
    loss: float = 0.0


class Progress:
    """Measures steps."""

    def __init__(
        self,
        trainer: Trainer,
        rows: Rows,
        flops: Flops,
        optimizer: Any,
        record: Record,
        ranks: Ranks,
        first: int,
    ) -> None:
        """``first``: the step with which the loop begins."""
        self._trainer, self._record, self._optimizer, self._ranks = trainer, record, optimizer, ranks
        self._tokens, self._flops_of_rows, self._flops = rows.used, flops.of_rows(rows), flops
        self._evaluated = ""
        self._bar = tqdm.tqdm(
            total=trainer.steps, initial=first, disable=not ranks.first, unit="step", dynamic_ncols=True
        )
        if ranks.first:
            record.begin_log()

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[Measured]:
        measured = Measured()
        begin, waited = time.perf_counter(), self._optimizer.waited_seconds
        yield measured
        if not self._ranks.first:
            return
        seconds = time.perf_counter() - begin
        result = self._optimizer.last_result
        rows = self._trainer.rows_of(number)
        tokens, flops = int(self._tokens[rows].sum()), float(self._flops_of_rows[rows].sum())
        entry = {
            "step": number,
            "loss": measured.loss,
            "learning_rate": self._optimizer.param_groups[0]["lr"],
            "gradient_norm": result.global_norm,
            "verdict": result.kind.name,
            "seconds": seconds,
            "waited_seconds": self._optimizer.waited_seconds - waited,
            "tokens_per_second": tokens / seconds,
            "tflops": flops / seconds / 1e12,
            "mfu": self._flops.mfu(flops / seconds),
        }
        self._record.add(entry, result.kind.skipped)
        self._bar.update()
        self._bar.set_postfix_str(self._words(entry), refresh=False)

    def evaluated(self, number: int, loss: float) -> None:
        if self._ranks.first:
            self._record.add({"step": number, "evaluation_loss": loss}, skipped=False)
            self._evaluated = f", evaluated {loss:.4f}"

    def close(self) -> None:
        self._bar.close()

    def _words(self, entry: dict[str, Any]) -> str:
        words = f"loss {entry['loss']:.4f}{self._evaluated}, {entry['tokens_per_second']:,.0f} tokens/s"
        if entry["mfu"] is not None:
            words += f", MFU {entry['mfu']:.0%}"
        words += f", optimizer {entry['waited_seconds'] / entry['seconds']:.1%}"
        if self._ranks.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._ranks.device)  # parameters are not in torch's memory
            words += f", {(total - free) / 2**30:.1f} GiB"
        return words
