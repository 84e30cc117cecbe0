"""What superoffload.plan reads of configurations whose attention is not a Llama's."""

import json
import pathlib

import pytest
import torch
import transformers
from tests.support.model_configs import LATENT

from superoffload import plan
from superoffload.v1 import plan_pb2

SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 100,
}


def described(directory: pathlib.Path, **config) -> plan_pb2.ModelDescription:
    (directory / "config.json").write_text(json.dumps({**SMALL, **config}))
    return plan.describe_config(directory)


def made(directory: pathlib.Path, **config) -> transformers.PreTrainedModel:
    described(directory, **config)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**SMALL, **config))


@pytest.mark.parametrize("queries", [24, None])
def test_latent_attention_has_heads_of_both_parts_and_values_of_their_own(tmp_path, queries):
    config = {**LATENT, "q_lora_rank": queries}
    architecture = described(tmp_path, **config).architecture
    attention = made(tmp_path, **config).model.layers[0].self_attn
    assert architecture.head_dimension == attention.qk_head_dim == 24
    assert architecture.value_head_dimension == attention.v_head_dim == 12
    assert architecture.query_heads * architecture.value_head_dimension == attention.o_proj.in_features
    assert architecture.key_value_latent == attention.kv_b_proj.in_features
    assert architecture.query_latent == (queries or 0)
    assert architecture.key_value_heads == 4 and architecture.shared_experts == 2


def test_a_window_without_layer_types_is_that_of_all_layers(tmp_path):
    for kind in ("mistral", "phi3"):
        windowed = described(tmp_path, model_type=kind, num_key_value_heads=2, sliding_window=16, pad_token_id=0)
        assert (windowed.architecture.window, windowed.architecture.windowed_layers) == (16, 2), kind
        whole = described(tmp_path, model_type=kind, num_key_value_heads=2, sliding_window=None, pad_token_id=0)
        assert (whole.architecture.window, whole.architecture.windowed_layers) == (0, 0), kind


def test_a_window_that_a_configuration_does_not_use_is_none(tmp_path):
    for words in ({}, {"use_sliding_window": False, "sliding_window": 16}):
        architecture = described(tmp_path, model_type="qwen2", num_key_value_heads=2, **words).architecture
        assert (architecture.window, architecture.windowed_layers) == (0, 0)
    words = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
    architecture = described(tmp_path, model_type="qwen2", num_key_value_heads=2, **words).architecture
    assert (architecture.window, architecture.windowed_layers) == (16, 1)


def test_a_window_that_the_model_does_not_read_is_none(tmp_path):
    architecture = described(tmp_path, model_type="llama", num_key_value_heads=2, sliding_window=16).architecture
    assert (architecture.window, architecture.windowed_layers) == (0, 0)


@pytest.mark.parametrize(
    ("words", "heads"),
    [
        ({"multi_query": True, "num_kv_heads": 4}, 1),  # Falcon-7B
        ({"multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 2}, 2),  # Falcon-40B
        ({"multi_query": False, "num_kv_heads": 4}, 4),  # Falcon-RW
        ({"multi_query": False}, 4),
        ({"ffn_hidden_size": 200}, 1),
    ],
)
def test_falcons_heads_are_those_that_its_attention_has(tmp_path, words, heads):
    architecture = described(tmp_path, model_type="falcon", **words).architecture
    model = made(tmp_path, model_type="falcon", **words)
    assert architecture.key_value_heads == model.transformer.h[0].self_attention.num_kv_heads == heads
    assert architecture.feed_forward == model.transformer.h[0].mlp.dense_h_to_4h.out_features
    assert not architecture.gated_feed_forward
