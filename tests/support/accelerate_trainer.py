"""A Hugging Face Trainer as accelerate's launcher starts it: accelerate_trainer.py begin|resume OUT ENDPOINT...

Ranks have the daemons at the endpoints. OUT and the rank is where the weights of each optimizer go. ``begin`` ends with
a run that saves, and that rank 1 kills with the launcher and all other ranks; ``resume`` goes on with it.
"""

import os
import signal
import sys
import tempfile

import pytest
import torch
import torch.distributed
import transformers
from tests.support import fake_torch_gpu, small_llama

import superoffload.torch
import superoffload.torch.trainer

SAVES_EVERY = 2
DIES_AFTER = 3


class KillJob(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **_) -> None:
        if state.global_step == DIES_AFTER:
            processes = [0] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(processes, os.getpid())
            if torch.distributed.get_rank() == 1:
                for process in (os.getppid(), processes[0], os.getpid()):
                    os.kill(process, signal.SIGKILL)
            signal.pause()


def train(make, steps: int = 5, saves: str | None = None, callbacks=(), resume: bool = False, **options) -> dict:
    model = small_llama.build()
    arguments = small_llama.arguments(  # makes the process group
        saves or tempfile.mkdtemp(),
        max_steps=steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        save_strategy="steps" if saves else "no",
        save_steps=SAVES_EVERY,
        logging_steps=1,
    )
    arguments.device  # noqa: B018
    optimizer = make(model.parameters(), lr=1e-2, weight_decay=0.01, **options)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=0.1, total_iters=5)
    given = {"train_dataset": small_llama.Tokens(), "optimizers": (optimizer, scheduler), "callbacks": list(callbacks)}
    trainer = transformers.Trainer(model, arguments, **given)
    trainer.train(resume_from_checkpoint=resume)
    assert isinstance(trainer.model_wrapped, torch.nn.parallel.DistributedDataParallel)
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    if make is not torch.optim.AdamW:
        assert optimizer.last_result.committed_steps == steps
        optimizer.close()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"weights": weights, "losses": losses}


def main() -> None:
    what, out, *endpoints = sys.argv[1:]
    rank = int(os.environ["RANK"])
    os.environ["SUPEROFFLOAD_ENDPOINT"] = endpoints[rank]
    ours, saving = superoffload.torch.AdamW, superoffload.torch.trainer.SaveOnAllRanks()
    named = {"replicas": True, "name": "job", "sync": "pull_params", "saves": f"{out}-saved"}
    if what == "begin":
        results = {
            "torch": train(torch.optim.AdamW),
            "hosted whole": train(ours),
            "divided": train(ours, replicas=True),
        }
        with pytest.MonkeyPatch.context() as patch:
            fake_torch_gpu.install(patch)
            gpu = superoffload.torch.GpuOptions(mover="trainer")
            results["on a GPU"] = train(ours, replicas=True, gpu=gpu)
        torch.save(results, f"{out}{rank}")
        train(ours, callbacks=[saving, KillJob()], **named)
    else:
        torch.save(train(ours, callbacks=[saving], resume=True, **named), f"{out}{rank}")


if __name__ == "__main__":
    main()
