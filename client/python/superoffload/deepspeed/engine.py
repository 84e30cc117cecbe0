"""DeepSpeed's engine: passes, steps of so many passes, and what a script asks about them."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed
from torch.utils._pytree import tree_leaves, tree_map_only

from superoffload._core import warn
from superoffload.deepspeed import checkpoints, loader, sequences, stages
from superoffload.deepspeed.answers import Answers
from superoffload.deepspeed.config import Config
from superoffload.deepspeed.loss_scale import LossScale
from superoffload.deepspeed.reports import Reports
from superoffload.deepspeed.saved import Saved
from superoffload.torch.guards.grad_scale import ATTRIBUTES
from superoffload.torch.optimizer import Optimizer


class Engine(Answers):
    """What `initialize` returns. It is called as the model, which is ``module``.

        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()

    ``optimizer`` is superoffload's own; ``global_steps`` counts steps, skipped ones included, ``micro_steps`` passes.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        config: Config,
        optimizer: Optimizer,
        scheduler: Any,
        parallel: Any,
        device: torch.device,
        collate_fn: Any,
    ) -> None:
        """``parallel``: the SequenceParallel of the model, or None."""
        super().__init__(config, optimizer)
        self.module, self.lr_scheduler = module, scheduler
        self.device, self.collate_fn = device, collate_fn
        self.global_rank, self.world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self.dp_world_size = self.world_size // config.sequence_parallel_size
        self.training_dataloader: Any = None
        self.global_steps = self.global_samples = self.micro_steps = self.skipped_steps = 0
        self._parallel = parallel
        self._loss_scale = None if config.loss_scale is None else LossScale(config.loss_scale)
        self._boundary: bool | None = None  # as the script says; None: it is counted
        self._in_step = self._in_backward = self._without_sync = False
        self._step_applied = False
        self._passes = 0  # since the last step
        self._reports = Reports(self.global_rank == 0, config.steps_per_print, config.times_steps, device)

    # A step.

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The module's. With sequences that several ranks share, ``named`` is a batch that all of them have.

        ``input_ids`` and ``labels`` are [rows, tokens] then; the output has their mean loss, and this rank's logits.
        """
        with self._reports.timed("forward"), self._autocast():
            if self._parallel is not None:
                output = sequences.forward(self.module, self._parallel, *inputs, **named)
            else:
                if self.config.casts_inputs:
                    inputs, named = tree_map_only(torch.Tensor, _to_half, (inputs, named))
                output = self.module(*inputs, **named)
        if self.config.batches.passes > 1 or self._factor() != 1.0:
            for leaf in tree_leaves(output):
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    leaf.register_hook(self._check_backward)
        return output

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Computes gradients; returns the loss divided by the passes of a step, of which each takes a part.

        ``scale_wrt_gas``: False where the script has divided it already.
        """
        if loss.numel() != 1 or not loss.requires_grad:
            raise ValueError("backward() takes a loss of one element that depends on the model's parameters")
        if scale_wrt_gas:
            loss = loss / self.config.batches.passes
        with self._reports.timed("backward"):
            self._in_backward = True
            try:
                self._scaled(loss).backward(retain_graph=retain_graph)
            finally:
                self._in_backward = False
        self._passes += 1
        return loss

    def _scaled(self, loss: torch.Tensor) -> torch.Tensor:
        factor = self._factor()
        return loss if factor == 1.0 else loss.float() * factor

    def _factor(self) -> float:
        """Of the loss whose gradients are computed; ranks take their mean."""
        return self.loss_scale * (self.dp_world_size if self.config.sums_gradients else 1)

    def _check_backward(self, gradient: torch.Tensor) -> None:
        if not self._in_backward:
            raise RuntimeError(
                "loss.backward() knows neither the loss scale nor the passes of a step; call engine.backward(loss)"
            )

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Takes a step if this was the last pass of one. Steps whose gradients are not finite are skipped."""
        if self._without_sync:
            raise RuntimeError("step() was called inside no_sync(), where no gradients are exchanged")
        self._step_applied = False
        self._in_step = True
        try:
            if self.is_gradient_accumulation_boundary():
                with self._reports.timed("step"):
                    self._take_step(lr_kwargs or {})
                self._reports.after_step(
                    self.global_steps, skipped=self.skipped_steps, lr=self.get_lr(), mom=self.get_mom()
                )
        finally:
            self._in_step = False
        self.micro_steps += 1

    def _take_step(self, lr_kwargs: Mapping[str, Any]) -> None:
        before = self.optimizer.last_result
        with self._unscaling():
            self.optimizer.step()
        self.optimizer.zero_grad()
        result = self.optimizer.last_result
        overflow = result is not None and result is not before and result.kind.skipped
        self._step_applied = not overflow
        if self._loss_scale is not None:
            self._loss_scale.update(overflow, says=self.global_rank == 0)
        if overflow:
            self.skipped_steps += 1
        elif self.lr_scheduler is not None:
            self.lr_scheduler.step(**lr_kwargs)
        self.global_steps += 1
        rows = self.config.batches.micro * self.dp_world_size
        self.global_samples += self.config.batches.total if self.config.counts_passes else rows * self._passes
        self._passes = 0

    @contextlib.contextmanager
    def _unscaling(self) -> Iterator[None]:
        """The optimizer takes the scale from its gradients, as torch.amp.GradScaler tells it to."""
        if self._loss_scale is None:
            yield
            return
        scaled: Any = self.optimizer
        scaled.grad_scale, scaled.found_inf = torch.tensor(self._loss_scale.scale), torch.tensor(0.0)
        try:
            yield
        finally:
            for name in ATTRIBUTES:
                self.optimizer.__dict__.pop(name, None)

    def _autocast(self) -> Any:
        if self.config.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.config.autocast)

    # Passes.

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the step is taken after this pass."""
        if self._boundary is not None:
            return self._boundary
        if not self.config.counts_passes:
            return self._in_step
        return (self.micro_steps + 1) % self.config.batches.passes == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """The script says from now on."""
        if not self.config.counts_passes:
            raise ValueError("with managed_gradient_accumulation: false, each step() is a step")
        self._boundary = is_boundary

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """In it gradients are added up without being exchanged with other ranks."""
        if self.config.stage >= 2:
            raise AssertionError(
                "no_sync() needs ZeRO stage 0 or 1, as in DeepSpeed: others divide gradients among ranks"
            )
        self._without_sync = True
        stages.set_gradient_sync(self.module, False)
        try:
            yield
        finally:
            stages.set_gradient_sync(self.module, True)
            self._without_sync = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    # What a script asks; more of it: answers.py.

    def was_step_applied(self) -> bool:
        """Whether the last step() has changed parameters."""
        return self._step_applied

    @property
    def loss_scale(self) -> float:
        return 1.0 if self._loss_scale is None else self._loss_scale.scale

    def get_sequence_parallel_group(self) -> Any:
        return None if self._parallel is None else self._parallel.group

    # Data.

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Any = None,
        num_local_io_workers: int | None = None,
    ) -> Any:
        """A loader of this rank's rows; ``route``: "train", or "eval" and "predict", which do not shuffle."""
        return loader.make(
            dataset,
            batch_size or self.config.batches.micro,
            rank=self.global_rank // self.config.sequence_parallel_size,
            ranks=self.dp_world_size,
            drop_last=self.config.drops_last_batch,
            shuffle=route == "train",
            on_gpu=pin_memory and self.device.type == "cuda",
            sampler=data_sampler,
            collate_fn=collate_fn or self.collate_fn,
            workers=num_local_io_workers or 0,
        )

    # Saving.

    def save_checkpoint(
        self,
        save_dir: str,
        tag: Any = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Writes ``save_dir``/``tag``, by default global_step and its number; all ranks call it.

        A checkpoint of that name that is there already stays whole until the new one is.
        """
        tag = checkpoints.agreed_tag(f"global_step{self.global_steps}" if tag is None else str(tag), self.config)
        checkpoints.save(self, save_dir, tag, dict(client_state or {}), not exclude_frozen_parameters)
        if save_latest:
            checkpoints.set_latest(save_dir, tag)
        return True

    def load_checkpoint(
        self,
        load_dir: str,
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Goes to a checkpoint of an engine, or to DeepSpeed's own; all ranks call it.

        Without ``tag``, to the one that the file ``latest`` names. Returns its path and the client's state; None, None
        where there is none.
        """
        if custom_load_fn is not None:
            raise ValueError("custom_load_fn has no counterpart: parameters come from the masters of the checkpoint")
        found = checkpoints.find(load_dir, None if tag is None else str(tag), self.config.loads_universal)
        if found is None:
            warn.warn(
                f"{load_dir} has no checkpoint: there is no file latest, and no tag was given; nothing was loaded"
            )
            return None, None
        with_state = load_optimizer_states and not load_module_only
        self.optimizer.zero_grad()  # what passes before have left belongs to other parameters
        saved = checkpoints.load(self, found, load_module_strict, with_state)
        if not load_module_only:
            self.go_on(saved, load_lr_scheduler_states)
            if with_state and load_lr_scheduler_states:
                for group, values in zip(self.optimizer.param_groups, saved.groups, strict=False):
                    group.update(values)
        return str(found.directory), saved.client_state

    def go_on(self, saved: Saved, with_scheduler: bool = True) -> None:
        """Counts from there."""
        self.global_steps, self.skipped_steps = saved.global_steps, saved.skipped_steps
        self.global_samples = saved.global_samples
        self.micro_steps, self._passes = saved.global_steps * self.config.batches.passes, 0
        if self._loss_scale is not None and saved.loss_scale is not None:
            self._loss_scale.load_state_dict(saved.loss_scale)
        if with_scheduler and self.lr_scheduler is not None and saved.scheduler is not None:
            self.lr_scheduler.load_state_dict(saved.scheduler)

    def counts(self) -> dict[str, Any]:
        """What a checkpoint has beside the optimizer, the module and the client's state."""
        return {
            "global_steps": self.global_steps,
            "global_samples": self.global_samples,
            "skipped_steps": self.skipped_steps,
            "scheduler": None if self.lr_scheduler is None else self.lr_scheduler.state_dict(),
            "loss_scale": None if self._loss_scale is None else self._loss_scale.state_dict(),
            "groups": [
                {name: value for name, value in group.items() if name not in ("params", "param_names")}
                for group in self.optimizer.param_groups
            ],
        }

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, torch.Tensor]:
        """Whole tensors on the CPU, of rank 0; of other ranks none. All ranks call it."""
        self.optimizer.synchronize()
        state = checkpoints.whole_state(self.module)
        if exclude_frozen_parameters:
            for name, parameter in self.module.named_parameters():
                if not parameter.requires_grad:
                    state.pop(name, None)
        return state

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Rank 0 writes the parameters, in their dtype, and buffers, with torch.save; all ranks call it.

        As in DeepSpeed False, and nothing is written, with stage 3 and without
        ``stage3_gather_16bit_weights_on_model_save``.
        """
        if self.config.stage == 3 and not self.config.gathers_on_save:
            self._reports.say(f"{save_filename} was not saved: stage3_gather_16bit_weights_on_model_save is not true")
            return False
        checkpoints.write(save_dir, save_filename, self.module_state_dict(exclude_frozen_parameters))
        return True

    save_fp16_model = save_16bit_model

    def destroy(self) -> None:
        """Ends the optimizer's attachment; parameters stay."""
        self.optimizer.close()


def _to_half(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.half() if tensor.is_floating_point() else tensor
