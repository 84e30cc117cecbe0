"""The Hugging Face Trainer in several ranks: under DistributedDataParallel it saves on one rank, what one rank has.

    trainer = transformers.Trainer(..., callbacks=[superoffload.torch.trainer.SaveOnAllRanks()])
    trainer.train(resume_from_checkpoint=True)

With ``replicas=`` each rank's daemon has a part of the state. The callback has all of them write it into the Trainer's
checkpoint just before the Trainer saves; any number of ranks, or a single process, resumes from it.
"""

import os
from typing import Any

import transformers


class SaveOnAllRanks(transformers.TrainerCallback):
    """Does nothing where the optimizer's state is not divided among ranks."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._save(args, state, control, **kwargs)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._save(args, state, control, **kwargs)

    def _save(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        if not control.should_save or args.save_only_model:
            return
        while hasattr(optimizer, "optimizer"):  # accelerate's
            optimizer = optimizer.optimizer
        if getattr(optimizer, "is_divided", bool)():
            optimizer.save_beside(os.path.join(args.output_dir, f"checkpoint-{state.global_step}", "optimizer.pt"))
