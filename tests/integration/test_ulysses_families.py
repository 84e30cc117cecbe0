"""Sequence parallelism serves the families of models that it is right for, and refuses the others when it is made."""

import pytest
import torch
import torch.testing._internal.distributed.fake_pg
import transformers

import superoffload
from superoffload.torch.ulysses import SequenceParallel

LONG = {"rope_type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48, "rope_theta": 1e4}
SERVED = {
    "Llama": {},
    "Llama with dynamic rope": {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}},
    "Qwen3": {},
    "Qwen3 with windows": {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 16},
    "Phi3": {},
    "Phi3 with long rope": {"rope_parameters": LONG, "original_max_position_embeddings": 4096},
    "GptOss": {},
    "SeedOss": {},
    "Qwen3Moe": {},
    "MiMoV2Flash": {},  # whose values are narrower than its keys
    "OPT": {},
}
LAYERS = "did not call the attention of SequenceParallel"
REFUSED = {
    "Qwen3Next": ({}, f"model.layers.0 (Qwen3NextDecoderLayer, linear_attention) {LAYERS}"),
    "Qwen3_5": ({}, f"model.layers.0 (Qwen3_5DecoderLayer, linear_attention) {LAYERS}"),
    "Lfm2": (
        {"layer_types": ["full_attention", "conv"], "num_hidden_layers": 2},
        f"model.layers.1 (Lfm2DecoderLayer, conv) {LAYERS}",
    ),
    "Mamba2": ({}, f"backbone.layers.0 (Mamba2Block, linear_attention) {LAYERS}"),
    "Jamba": ({}, f"model.layers.0 (JambaMambaDecoderLayer, linear_attention) {LAYERS}"),
    "GraniteMoeHybrid": ({}, f"model.layers.0 (GraniteMoeHybridDecoderLayer, linear_attention) {LAYERS}"),
    "FalconH1": ({"mamba_d_head": 64, "mamba_n_heads": 16}, "model.layers.0.mamba (FalconH1Mixer) needs other ranks'"),
    "Bamba": ({}, f"model.layers.0 (BambaDecoderLayer, linear_attention) {LAYERS}"),
    "NemotronH": ({}, f"model.layers.0 (NemotronHBlock, linear_attention) {LAYERS}"),
    "MiniMax": ({}, f"(MiniMaxDecoderLayer, linear_attention) {LAYERS}"),
    "RecurrentGemma": ({}, f"model.layers.0 (RecurrentGemmaDecoderLayer, linear_attention) {LAYERS}"),
    "Falcon": (
        {"hidden_size": 4096, "num_attention_heads": 64, "alibi": True},
        f"transformer.h.0 (FalconDecoderLayer) {LAYERS}",
    ),
    "Bloom": ({}, f"transformer.h.0 (BloomBlock) {LAYERS}"),
    "Mpt": ({}, f"transformer.blocks.0 (MptBlock) {LAYERS}"),
    "Llama4": ({}, "model.layers.0.self_attn (Llama4TextAttention) needs other ranks'"),
    "Gemma2": ({}, "attention with softcap is not supported across ranks"),
    "DeepseekV4": ({}, "(DeepseekV4Attention) needs other ranks'"),
}


@pytest.fixture
def two_ranks():
    store = torch.testing._internal.distributed.fake_pg.FakeStore()
    torch.distributed.init_process_group("fake", store=store, rank=0, world_size=2)
    yield
    torch.distributed.destroy_process_group()


def build(family, options):
    """One of the size that the family's configuration has by itself, without memory."""
    kind = getattr(transformers, f"{family}ForCausalLM")
    with torch.device("meta"):
        return kind(kind.config_class(**options))


@pytest.mark.parametrize("name", SERVED)
def test_a_model_that_is_right_on_parts_of_sequences_is_served(two_ranks, name):
    random, threads = torch.get_rng_state(), torch.get_num_threads()
    SequenceParallel(build(name.partition(" ")[0], SERVED[name]), 2)
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("family", REFUSED)
def test_a_model_that_is_wrong_on_parts_of_sequences_is_refused_by_name(two_ranks, family):
    options, said = REFUSED[family]
    with pytest.raises(superoffload.Error) as refused:
        SequenceParallel(build(family, options), 2)
    assert f"{family}ForCausalLM" in str(refused.value)
    assert said in str(refused.value)
    assert "train it with ranks=1" in str(refused.value)
