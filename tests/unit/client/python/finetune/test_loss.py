"""The loss in chunks is that of whole logits, with its gradients; and documents in one row do not see each other."""

import numpy as np
import pytest
import torch
import transformers

from superoffload.finetune import apart, loss, rows
from superoffload.finetune.documents import Document
from superoffload.torch import ulysses

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "pad_token_id": 0}
SIZES |= {"num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}


def build(kind="llama", attention="sdpa", **more):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**{"model_type": kind} | SIZES | more)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def batch_of(length=24, count=3):
    tokens = torch.randint(64, (count, length), generator=torch.Generator().manual_seed(1))
    labels = tokens.masked_fill(torch.arange(length) % 7 == 3, rows.IGNORED)
    positions = torch.arange(length).expand_as(tokens)
    return {"input_ids": tokens, "position_ids": positions}, ulysses.targets_of(labels, positions)


def gradients(model, total):
    model.zero_grad()
    total.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("chunk", [5, 1024])
def test_chunks_give_the_loss_and_the_gradients_of_whole_logits(monkeypatch, chunk, tied):
    monkeypatch.setattr(loss, "_CHUNK", chunk)
    model = build(tie_word_embeddings=tied)
    inputs, targets = batch_of()
    logits = model(**inputs).logits
    whole = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    expected = gradients(model, 0.25 * whole)
    total, balance = loss.TokenLoss(model).sums(model, inputs, targets)
    assert balance is None
    torch.testing.assert_close(total, whole)
    found = gradients(model, 0.25 * total)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, msg=name)


def test_in_bf16_sums_are_as_exact_as_those_of_whole_logits(monkeypatch):
    monkeypatch.setattr(loss, "_CHUNK", 16)
    generator = torch.Generator().manual_seed(2)
    hidden, weight = (
        (scale * torch.randn(rows_of, 32, generator=generator)).bfloat16().requires_grad_()
        for scale, rows_of in ((1.0, 300), (0.2, 500))
    )
    targets = torch.randint(500, (300,), generator=generator)
    in_double = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    expected = torch.nn.functional.cross_entropy(in_double[0] @ in_double[1].T, targets, reduction="sum")
    total = loss._ChunkedLoss.apply(hidden, weight, None, targets)
    assert float(total.detach()) == pytest.approx(float(expected.detach()), rel=1e-4)
    logits = torch.nn.functional.linear(hidden, weight).float()
    whole = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
    exact = torch.autograd.grad(expected, in_double)
    found, of_whole = (torch.autograd.grad(each, (hidden, weight)) for each in (total, whole))
    for mine, theirs, right in zip(found, of_whole, exact, strict=True):
        assert (mine.double() - right).norm() <= 1.05 * (theirs.double() - right).norm()


def test_a_head_with_a_bias_and_one_that_is_frozen():
    model = build("phi")  # has a bias
    model.lm_head.weight.requires_grad_(False)
    inputs, targets = batch_of()
    whole = torch.nn.functional.cross_entropy(model(**inputs).logits.flatten(0, 1), targets.flatten(), reduction="sum")
    expected = gradients(model, whole)
    total, _ = loss.TokenLoss(model).sums(model, inputs, targets)
    found = gradients(model, total)
    assert "lm_head.weight" not in found
    torch.testing.assert_close(found["lm_head.bias"], expected["lm_head.bias"])


def test_a_model_that_scales_its_logits_is_found_and_has_its_own_loss():
    model = build("cohere", logit_scale=3.0)
    inputs, targets = batch_of()
    token_loss = loss.TokenLoss(model)
    assert token_loss.compare(model, inputs, targets) is False
    whole = torch.nn.functional.cross_entropy(model(**inputs).logits.flatten(0, 1), targets.flatten(), reduction="sum")
    torch.testing.assert_close(token_loss.sums(model, inputs, targets)[0], whole)


def test_a_model_that_does_not_is_computed_in_chunks():
    model = build()
    assert loss.TokenLoss(model).compare(model, *batch_of()) is True
    assert model(**batch_of()[0]).logits.shape == (3, 24, 64)


def test_experts_are_balanced_where_the_model_says_so():
    model = build(
        "qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, output_router_logits=True
    )
    inputs, targets = batch_of()
    total, balance = loss.TokenLoss(model).sums(model, inputs, targets)
    ours = total / int((targets != rows.IGNORED).sum()) + balance
    labels = torch.nn.functional.pad(targets[:, :-1], (1, 0), value=rows.IGNORED)
    torch.testing.assert_close(ours, model(**inputs, labels=labels).loss)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["llama", "gpt_oss"])
def test_documents_in_one_row_do_not_see_each_other(kind, attention):
    if kind == "gpt_oss" and attention == "sdpa":
        pytest.skip("transformers has no sinks with it")
    model = build(kind, attention, num_local_experts=4, num_experts_per_tok=2)
    generator = torch.Generator().manual_seed(3)
    documents = []
    for length in (9, 13, 5):
        tokens = torch.randint(64, (length,), generator=generator)
        documents.append(Document(tokens.numpy().astype(np.int32), np.arange(length) > 2))
    token_loss, masks = loss.TokenLoss(model), apart.needs_masks(model)
    assert masks == (kind == "gpt_oss")

    def sums(made):
        batch = made.batch(range(len(made)))
        targets = ulysses.targets_of(batch.pop("labels"), batch["position_ids"])
        if masks:
            batch["attention_mask"] = apart.masks_of(model, batch["position_ids"])
        return float(token_loss.sums(model, batch, targets)[0])

    with torch.no_grad():
        together = sums(rows.pack(documents, 30, 0, seed=1))
        alone = sums(rows.pack(documents, 30, 0, seed=1, together=False))
    assert together == pytest.approx(alone, rel=1e-5)


def test_a_model_that_no_mask_keeps_apart_is_refused():
    model = build("lfm2", layer_types=["conv", "full_attention"])
    with pytest.raises(ValueError, match="Lfm2ForCausalLM does not keep documents of one row apart.*: set pack: false"):
        apart.needs_masks(model)


def test_a_model_that_cannot_be_tried_is_refused():
    with pytest.raises(
        ValueError, match="MambaForCausalLM does not keep documents of one row apart .*: set pack: false"
    ):
        apart.needs_masks(build("mamba", "eager", state_size=4))
