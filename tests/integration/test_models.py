"""Small ones of the models that the planner knows by name: experts, tied weights, sinks, dropout."""

import pytest
import torch
import transformers
from tests.support.fake_torch_gpu import fake_gpu, gpu_daemon  # noqa: F401

import superoffload.torch
from superoffload.torch import GpuOptions, cuda

SHAPE = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "use_cache": False,
    "pad_token_id": 0,
}
EXPERTS = {"head_dim": 12, "num_experts_per_tok": 2}
MODELS = {
    "gpt-oss": ("GptOss", EXPERTS | {"num_local_experts": 8, "sliding_window": 8}),
    "qwen3": ("Qwen3", {"head_dim": 12}),
    "qwen3 with tied embeddings": ("Qwen3", {"head_dim": 12, "tie_word_embeddings": True}),
    "phi-4": ("Phi3", {}),
    "llama": ("Llama", {}),
    "seed-oss": ("SeedOss", {"head_dim": 12}),
    "qwen3-a3b": ("Qwen3Moe", EXPERTS | {"num_experts": 8, "moe_intermediate_size": 24, "output_router_logits": True}),
}


def build(kind, dtype, reentrant=False, **shape):
    """``reentrant``: how blocks are recomputed; None: they are not."""
    torch.manual_seed(3)
    name, options = MODELS[kind]
    config = getattr(transformers, f"{name}Config")(**SHAPE | shape, **options)
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(dtype)
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model.train()


def train(model, optimizer, generates=False):
    torch.manual_seed(9)  # Seed-OSS has dropout
    for step in range(5):
        tokens = torch.randint(3, 61, (2, 12), generator=torch.Generator().manual_seed(step))
        model(input_ids=tokens, labels=tokens).loss.backward()
        if generates:
            model.generate(tokens[:, :5], max_new_tokens=2, do_sample=False)
        optimizer.step()
        optimizer.zero_grad()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def train_hosted(kind, dtype, daemon):
    model = build(kind, dtype)
    optimizer = superoffload.torch.AdamW(
        model.named_parameters(), lr=1e-3, endpoint=daemon.endpoint, bucket_bytes=1 << 14
    )
    weights = train(model, optimizer)
    optimizer.close()
    return weights


@pytest.mark.parametrize("kind", MODELS)
def test_weights_are_those_of_torch_optim(daemon, kind):
    model = build(kind, torch.float32)
    expected = train(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    hosted = train_hosted(kind, torch.float32, daemon)
    assert hosted.keys() == expected.keys()
    for name, weight in hosted.items():
        torch.testing.assert_close(weight, expected[name], atol=2e-6, rtol=0, msg=name)


@pytest.mark.parametrize("kind", MODELS)
def test_weights_on_a_gpu_are_those_on_the_host(gpu_daemon, daemon, kind):
    on_gpu = train_hosted(kind, torch.bfloat16, gpu_daemon)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "is_on_gpu", lambda tensor: False)
        on_host = train_hosted(kind, torch.bfloat16, daemon)
    for name, weight in on_gpu.items():
        assert torch.equal(weight, on_host[name]), name


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_blocks_that_stream_train_the_same_weights(gpu_daemon, daemon, kind, reentrant):
    def trained(daemon, **options):
        model = build(kind, torch.bfloat16, reentrant, num_hidden_layers=4)
        optimizer = superoffload.torch.AdamW(model.named_parameters(), lr=1e-3, endpoint=daemon.endpoint, **options)
        weights = train(model, optimizer, generates=True)
        optimizer.close()
        return weights

    streamed = trained(gpu_daemon, weights="streamed", gpu=GpuOptions(stream_slots=2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "is_on_gpu", lambda tensor: False)
        on_host = trained(daemon)
    assert [name for name, weight in streamed.items() if not torch.equal(weight, on_host[name])] == []
