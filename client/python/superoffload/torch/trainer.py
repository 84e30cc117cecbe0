"""Callbacks for the Hugging Face Trainer.

    trainer = transformers.Trainer(..., callbacks=[superoffload.torch.trainer.LogSteps()])

`LogSteps` puts what the daemon reports into the Trainer's logs. `SaveOnAllRanks` is for several ranks under
DistributedDataParallel, where the Trainer saves on one rank, what one rank has: with ``replicas=`` each rank's daemon
has a part of the state. It has all of them write it into the Trainer's checkpoint just before the Trainer saves; any
number of ranks, or a single process, resumes from it.
"""

import os
import sys
from typing import Any

import transformers


def _innermost(optimizer: Any) -> Any:
    while hasattr(optimizer, "optimizer"):  # accelerate's
        optimizer = optimizer.optimizer
    return optimizer


class LogSteps(transformers.TrainerCallback):
    """Adds to each log of training, for wandb, TensorBoard and whoever else is told, as ``superoffload/...``:

    ``waited_seconds``: that a step has waited for the optimizer, on average since the last log (see
    ``optimizer.waited_seconds``); ``longest_wait_seconds``: in one of them, such as during a daemon's restart;
    ``committed_steps``, and ``skipped_steps`` with their reasons once there are any; ``gradient_norm`` and
    ``clip_coefficient`` of the last step. Adds nothing where the optimizer is none of superoffload's.
    """

    def __init__(self) -> None:
        self._waits: list[float] = []  # of the steps since the last log
        self._waited = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        self._waits, self._waited = [], getattr(_innermost(optimizer), "waited_seconds", 0.0)
        # Reporters are told of a log in the order of the callbacks, and the Trainer has put its own first.
        handler = sys._getframe(1).f_locals.get("self")
        if isinstance(handler, transformers.trainer_callback.CallbackHandler):
            handler.callbacks = [self, *(callback for callback in handler.callbacks if callback is not self)]

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        waited = getattr(_innermost(optimizer), "waited_seconds", None)
        if waited is not None:
            self._waits.append(waited - self._waited)
            self._waited = waited

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any], optimizer: Any = None, **_: Any
    ) -> None:
        optimizer = _innermost(optimizer)
        if not self._waits or optimizer.last_result is None:
            return
        skips = {f"skipped_steps/{kind.name.lower()}": n for kind, n in optimizer.skipped_steps.items() if n}
        values = {
            "waited_seconds": sum(self._waits) / len(self._waits),
            "longest_wait_seconds": max(self._waits),
            "committed_steps": optimizer.committed_steps,
            **skips,
            "gradient_norm": optimizer.last_result.global_norm,
            "clip_coefficient": optimizer.last_result.clip_coefficient,
        }
        self._waits = []
        ours = {f"superoffload/{name}": value for name, value in values.items()}
        logs.update(ours)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(ours)


class SaveOnAllRanks(transformers.TrainerCallback):
    """Does nothing where the optimizer's state is not divided among ranks."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._save(args, state, control, **kwargs)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._save(args, state, control, **kwargs)

    def _save(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        if not control.should_save or args.save_only_model:
            return
        optimizer = _innermost(optimizer)
        if getattr(optimizer, "is_divided", bool)():
            optimizer.save_beside(os.path.join(args.output_dir, f"checkpoint-{state.global_step}", "optimizer.pt"))
