"""superoffload.torch against torch.optim, GradScaler, schedulers, accelerate and the Hugging Face Trainer."""

import copy
import warnings

import grpc
import pytest
import torch

import superoffload.torch
from superoffload.torch import VerdictKind


def build(dtype=torch.float32):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    return model.to(dtype)


def loss_of(model, seed):
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(seed)).to(next(model.parameters()).dtype)
    return ((model(x) - x) ** 2).mean()


def difference(a, b):
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return max((p - q).abs().max().item() for p, q in pairs)


def identical(a, b):
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("kind", ["AdamW", "Adam"])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_agrees_with_torch_in_fp32(kind, clip):
    ours, theirs = build(), build()
    arguments = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
    a = getattr(superoffload.torch, kind)(ours.parameters(), **arguments, max_grad_norm=clip, bucket_bytes=16384)
    b = getattr(torch.optim, kind)(theirs.parameters(), **arguments)
    schedulers = [torch.optim.lr_scheduler.OneCycleLR(o, max_lr=1e-3, total_steps=60) for o in (a, b)]
    for step in range(50):
        loss_of(ours, step).backward()
        loss_of(theirs, step).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(theirs.parameters(), clip)
        for optimizer in (a, b):
            optimizer.step()
            optimizer.zero_grad()
        for scheduler in schedulers:
            scheduler.step()
    assert a.last_result.committed_steps == 50
    # Weights are below 0.25, whose ulp is 1.5e-8; a rounding or two of difference per ten steps.
    assert difference(ours, theirs) < 2e-7


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this release of torch has no grad_dtype")
@pytest.mark.parametrize("overlap", [True, False])
def test_fp32_gradients_of_bf16_parameters_keep_their_bits(overlap):
    model = build(torch.bfloat16)
    for parameter in list(model.parameters())[1:]:
        parameter.grad_dtype = torch.float32
    optimizer = superoffload.torch.AdamW(model.named_parameters(), lr=1e-3, overlap=overlap)
    for seed in range(3):
        loss_of(model, seed).backward()
    optimizer.step()
    state = optimizer.state_tensors()
    for index, (name, parameter) in enumerate(model.named_parameters()):
        assert parameter.grad.dtype == (torch.float32 if index > 0 else torch.bfloat16)
        torch.testing.assert_close(state[name]["exp_avg"], 0.1 * parameter.grad.float(), rtol=1e-6, atol=0)
    optimizer.close()


def train(policy, overlap, clip=0.05, accumulation=1, dtype=torch.bfloat16):
    model = build(dtype)
    optimizer = superoffload.torch.AdamW(
        model.parameters(),
        max_grad_norm=clip,
        speculation=policy,
        overlap=overlap,
        bucket_bytes=4096,
    )
    for step in range(40):
        for micro in range(accumulation):
            loss = loss_of(model, step * accumulation + micro)
            (loss * (float("nan") if step % 10 == 7 else 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.skipped_steps[VerdictKind.SKIP_NON_FINITE] == 4
    optimizer.close()
    return model


@pytest.mark.parametrize("accumulation", [1, 3])
def test_speculation_and_overlap_never_change_a_bit(accumulation):
    reference = train("never", overlap=False, accumulation=accumulation)
    for policy in ("always", "adaptive", "never"):
        assert identical(train(policy, overlap=True, accumulation=accumulation), reference), policy


def test_clip_grad_norm_returns_the_daemons_norm():
    ours, theirs = build(), build()
    a = superoffload.torch.AdamW(ours.parameters())
    b = torch.optim.AdamW(theirs.parameters())
    for step in range(5):
        norms = []
        for model, optimizer in ((ours, a), (theirs, b)):
            loss_of(model, step).backward()
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01).item())
            optimizer.step()
            optimizer.zero_grad()
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)
        assert a.last_result.kind == VerdictKind.CLIP
    assert difference(ours, theirs) < 1e-7


def test_edited_gradients_are_submitted_again():
    ours, theirs = build(), build()
    a = superoffload.torch.AdamW(ours.parameters(), bucket_bytes=4096)
    b = torch.optim.AdamW(theirs.parameters())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(6):
            for model, optimizer in ((ours, a), (theirs, b)):
                loss_of(model, step).backward()
                for p in model.parameters():
                    p.grad.mul_(0.5 if step % 2 else 2.0)
                optimizer.step()
                optimizer.zero_grad()
    assert sum("changed between backward and step" in str(w.message) for w in caught) == 1
    assert difference(ours, theirs) < 1e-7


def test_grad_scaler_skips_and_unscales():
    ours, theirs = build(), build()
    a = superoffload.torch.AdamW(ours.parameters())
    b = torch.optim.AdamW(theirs.parameters())
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3) for _ in range(2)]
    for step in range(20):
        for model, optimizer, scaler in (
            (ours, a, scalers[0]),
            (theirs, b, scalers[1]),
        ):
            loss = scaler.scale(loss_of(model, step))
            (loss * float("inf") if step == 5 else loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert scalers[0].get_scale() == scalers[1].get_scale()
    assert a.skipped_steps[VerdictKind.SKIP_NON_FINITE] == 1
    assert difference(ours, theirs) < 1e-7


def test_parameters_changed_behind_the_optimizer_are_refused_with_remedies():
    model = build()
    optimizer = superoffload.torch.AdamW(model.parameters())
    with torch.no_grad():
        model[0].weight.zero_()
    loss_of(model, 0).backward()
    with pytest.raises(superoffload.Error, match="push_params.*pull_params"):
        optimizer.step()
    optimizer.push_params()
    assert optimizer.state_tensors()["group0.param0"]["master"].abs().max() == 0
    with torch.no_grad():
        model[0].weight.fill_(7)
    optimizer.pull_params()
    assert model[0].weight.abs().max() == 0


def test_reattaching_checks_the_parameters(daemon):
    model = build()
    optimizer = superoffload.torch.AdamW(model.parameters(), endpoint=daemon.endpoint, name="run")
    loss_of(model, 0).backward()
    optimizer.step()
    handle = optimizer.state_dict()
    optimizer.close()
    with pytest.raises(superoffload.Error, match="push_params.*pull_params"):
        superoffload.torch.AdamW(build().parameters(), endpoint=daemon.endpoint, name="run")
    again = superoffload.torch.AdamW(model.parameters(), endpoint=daemon.endpoint, name="run")
    again.load_state_dict(handle)
    again.close()
    fresh = build()
    superoffload.torch.AdamW(fresh.parameters(), endpoint=daemon.endpoint, name="run", sync="pull_params").close()
    assert identical(fresh, model)


def test_tied_frozen_scalar_and_unused_parameters():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a = torch.nn.Linear(8, 8, bias=False)
            self.b = torch.nn.Linear(8, 8, bias=False)
            self.b.weight = self.a.weight
            self.frozen = torch.nn.Parameter(torch.ones(8), requires_grad=False)
            self.scale = torch.nn.Parameter(torch.tensor(1.0))
            self.unused = torch.nn.Parameter(torch.ones(5))

        def forward(self, x):
            return self.b(self.a(x)) * self.scale + self.frozen

    torch.manual_seed(0)
    ours = Model()
    theirs = copy.deepcopy(ours)
    a = superoffload.torch.AdamW(ours.parameters(), weight_decay=0)
    b = torch.optim.AdamW(theirs.parameters(), weight_decay=0)
    for _ in range(10):
        for model, optimizer in ((ours, a), (theirs, b)):
            model(torch.ones(2, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert difference(ours, theirs) < 1e-6
    assert torch.equal(ours.frozen, torch.ones(8)) and torch.equal(ours.unused, torch.ones(5))


def test_groups_closure_and_named_parameters():
    ours, theirs = build(), build()

    def groups(model):
        return [
            {
                "params": [("w0", model[0].weight), ("w2", model[2].weight)],
                "weight_decay": 0.1,
            },
            {
                "params": [("b0", model[0].bias), ("b2", model[2].bias)],
                "lr": 1e-2,
                "weight_decay": 0.0,
            },
        ]

    a, b = superoffload.torch.AdamW(groups(ours)), torch.optim.AdamW(groups(theirs))
    for step in range(10):
        losses = []
        for model, optimizer in ((ours, a), (theirs, b)):

            def closure(model=model, optimizer=optimizer, step=step):
                optimizer.zero_grad()
                loss = loss_of(model, step)
                loss.backward()
                return loss

            losses.append(optimizer.step(closure).item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert set(a.state_tensors()) == {"w0", "w2", "b0", "b2"}
    assert difference(ours, theirs) < 1e-6


def test_a_model_that_cannot_be_hosted_is_refused():
    with pytest.raises(superoffload.Error) as error:
        superoffload.torch.AdamW([torch.nn.Parameter(torch.ones(2, dtype=torch.float64))])
    assert error.value.code == grpc.StatusCode.INVALID_ARGUMENT


def test_accelerate_and_hugging_face_trainer(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    def run(make):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=128,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        )
        model = LlamaForCausalLM(config)
        tokens = torch.randint(0, 128, (64, 16), generator=torch.Generator().manual_seed(3))
        data = [{"input_ids": row, "labels": row} for row in tokens]
        optimizer = make(model.parameters())
        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            max_steps=10,
            max_grad_norm=0.5,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            logging_steps=5,
        )
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=data,
            optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer)),
        )
        trainer.train()
        return model, trainer.state.log_history

    ours, our_log = run(lambda p: superoffload.torch.AdamW(p, lr=1e-3))
    theirs, their_log = run(lambda p: torch.optim.AdamW(p, lr=1e-3))
    assert difference(ours, theirs) < 1e-6
    assert our_log[0]["grad_norm"] == pytest.approx(their_log[0]["grad_norm"], rel=1e-4)
