"""A Hugging Face Trainer whose own optimizer the daemon hosts: superoffload.stand_ins.trainer."""

import pytest
import torch
import transformers
from tests.support import small_llama

import superoffload.torch
from superoffload.stand_ins.trainer import host

STEPS = 4


def make(tmp_path, *, optimizer=None, **fields):
    arguments = {"max_steps": STEPS, "save_strategy": "no", "logging_steps": 1, "learning_rate": 1e-2, **fields}
    return transformers.Trainer(
        small_llama.build(),
        small_llama.arguments(tmp_path, weight_decay=0.1, adam_beta2=0.98, **arguments),
        train_dataset=small_llama.Tokens(),
        optimizer_cls_and_kwargs=optimizer,
    )


def weights(trainer):
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def equal(a, b):
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert torch.equal(tensor, b[name]), name


@pytest.mark.parametrize(
    ("optim", "ours"), [("adamw_torch", "AdamW"), ("adamw_torch_fused", "AdamW"), ("adamw_bnb_8bit", "AdamW8bit")]
)
def test_its_arguments_are_the_optimizers(daemon, tmp_path, optim, ours):
    trainer = make(tmp_path, optim=optim)
    host(trainer, endpoint=daemon.endpoint, bucket_bytes=8192)
    trainer.train()
    optimizer = trainer.optimizer.optimizer
    assert isinstance(optimizer, getattr(superoffload.torch, ours))
    assert optimizer.committed_steps == STEPS
    decayed, others = optimizer.param_groups
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert decayed["betas"] == others["betas"] == (0.9, 0.98)
    assert {*decayed["param_names"], *others["param_names"]} == {name for name, _ in trainer.model.named_parameters()}
    logged = [logs for logs in trainer.state.log_history if "loss" in logs]
    assert [logs["superoffload/committed_steps"] for logs in logged] == [1, 2, 3, 4]
    optimizer.close()

    named = {"lr": 1e-2, "betas": (0.9, 0.98), "endpoint": daemon.endpoint}
    plain = make(tmp_path, optimizer=(getattr(superoffload.torch, ours), named))
    plain.train()
    assert plain.state.log_history[0]["loss"] == logged[0]["loss"]
    equal(weights(trainer), weights(plain))
    plain.optimizer.optimizer.close()


def test_a_run_goes_on_from_the_trainers_checkpoint(daemon, tmp_path):
    trained = []
    for resume in (None, str(tmp_path / "checkpoint-2")):
        trainer = make(tmp_path, save_strategy="steps", save_steps=2)
        host(trainer, endpoint=daemon.endpoint)
        trainer.train(resume_from_checkpoint=resume)
        trained.append(weights(trainer))
        trainer.optimizer.optimizer.close()
    equal(*trained)


@pytest.mark.parametrize("optim", ["sgd", "adafactor"])
def test_an_optimizer_without_a_counterpart_is_refused(tmp_path, optim):
    trainer = make(tmp_path, optim=optim)
    with pytest.raises(ValueError, match="it has no counterpart; choose optim='adamw_torch' or 'adamw_bnb_8bit'"):
        host(trainer)
    assert isinstance(trainer.create_optimizer(), trainer.get_optimizer_cls_and_kwargs(trainer.args)[0])


class Factory:
    """As Axolotl's for Muon: it is given the model."""


def test_what_the_trainer_would_not_use_is_refused(tmp_path):
    for optimizer in ((Factory, {}), (torch.optim.AdamW, {"params": []})):
        with pytest.raises(ValueError, match="it makes groups of parameters itself"):
            host(make(tmp_path, optimizer=optimizer))
    trainer = make(tmp_path)
    trainer.create_optimizer()
    with pytest.raises(ValueError, match="has an optimizer already: call host"):
        host(trainer)
    trainer = make(tmp_path)
    trainer.is_deepspeed_enabled = True
    with pytest.raises(ValueError, match="leave deepspeed= out"):
        host(trainer)
