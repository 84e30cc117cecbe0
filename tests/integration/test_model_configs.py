"""superoffloadctl plan and superoffload plan read the same model of a config.json: names, shapes, blocks, numbers."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
from tests.support.model_configs import LATENT

from superoffload import plan
from superoffload.v1 import plan_pb2

CTL = pathlib.Path(os.environ["SUPEROFFLOAD_BUILD"]) / "client" / "superoffloadctl"
RUN = ("--machine=gh200-96-480", "--batch=1", "--sequence=512", "--quick")

SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 100,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 32, "vocab_size": 100}
FALCON = {"model_type": "falcon", **SMALL}
ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
QWEN_MOE = {"model_type": "qwen3_moe", **SMALL, **ROUTED, "num_experts": 4}
GPT_OSS = {"model_type": "gpt_oss", **SMALL, "num_local_experts": 4, "num_experts_per_tok": 2}
DEEPSEEK = {**SMALL, **LATENT, "n_group": 2, "topk_group": 1}
WINDOWED = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}

# Small, with each switch that changes what a model is made of.
SWITCHES = {
    "llama": {"model_type": "llama", **SMALL},
    "llama-biases": {"model_type": "llama", **SMALL, "attention_bias": True, "mlp_bias": True, "head_dim": 32},
    "llama-heads": {"model_type": "llama", **SMALL, "num_key_value_heads": None, "tie_word_embeddings": True},
    "llama-fp16": {"model_type": "llama", **SMALL, "torch_dtype": "float16"},
    "llama-fp32": {"model_type": "llama", **SMALL, "dtype": "float32", "sliding_window": 8},
    "mistral": {"model_type": "mistral", **SMALL},
    "mistral-window": {"model_type": "mistral", **SMALL, "sliding_window": 16, "head_dim": 32},
    "mistral-null": {"model_type": "mistral", **SMALL, "sliding_window": None},
    "qwen2": {"model_type": "qwen2", **SMALL, "sliding_window": 8},
    "qwen2-window": {"model_type": "qwen2", **SMALL, **WINDOWED, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", **SMALL},
    "qwen3-types": {
        "model_type": "qwen3",
        **SMALL,
        **WINDOWED,
        "layer_types": ["full_attention", "full_attention", "sliding_attention"],
        "attention_bias": True,
        "head_dim": 24,
    },
    "qwen3_moe": QWEN_MOE,
    "qwen3_moe-dense": {**QWEN_MOE, "mlp_only_layers": [0], "decoder_sparse_step": 2, "attention_bias": True},
    "qwen3_moe-window": {**QWEN_MOE, **WINDOWED, "head_dim": 32},
    "phi3": {"model_type": "phi3", **SMALL},
    "phi3-window": {"model_type": "phi3", **SMALL, "sliding_window": 16, "tie_word_embeddings": True},
    "gpt_oss": GPT_OSS,
    "gpt_oss-switches": {**GPT_OSS, "attention_bias": False, "head_dim": 16, "layer_types": ["full_attention"] * 3},
    "seed_oss": {"model_type": "seed_oss", **SMALL},
    "seed_oss-biases": {
        "model_type": "seed_oss",
        **SMALL,
        "mlp_bias": True,
        "attention_out_bias": True,
        "head_dim": 16,
    },
    "gpt2": GPT2,
    "gpt2-untied": {**GPT2, "n_inner": 100, "tie_word_embeddings": False},
    "falcon-7b": FALCON,
    "falcon-40b": {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
    "falcon-11b": {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    "falcon-rw": {
        **FALCON,
        "num_kv_heads": 4,
        "multi_query": False,
        "parallel_attn": False,
        "tie_word_embeddings": False,
    },
    "falcon-wide": {**FALCON, "ffn_hidden_size": 200},
    "deepseek_v3": DEEPSEEK,
    "deepseek_v3-queries": {**DEEPSEEK, "q_lora_rank": None, "attention_bias": True, "first_k_dense_replace": 0},
}

# As published, as far as it tells what a model is made of.
PUBLISHED = {
    "Llama-3.1-8B": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 128256,
        "attention_bias": False,
        "mlp_bias": False,
    },
    "Mistral-7B-v0.1": {
        "model_type": "mistral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 32000,
    },
    "Qwen2.5-7B": {
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "max_window_layers": 28,
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "sliding_window": 131072,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 152064,
    },
    "Qwen3-30B-A3B": {
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "falcon-40b": {
        "model_type": "falcon",
        "alibi": False,
        "bias": False,
        "hidden_size": 8192,
        "multi_query": True,
        "new_decoder_architecture": True,
        "num_attention_heads": 128,
        "num_hidden_layers": 60,
        "num_kv_heads": 8,
        "parallel_attn": True,
        "torch_dtype": "bfloat16",
        "vocab_size": 65024,
    },
    "DeepSeek-V3": {
        "model_type": "deepseek_v3",
        "attention_bias": False,
        "first_k_dense_replace": 3,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "v_head_dim": 128,
        "vocab_size": 129280,
        "quantization_config": {"quant_method": "fp8"},
    },
}
BILLIONS = {
    "Llama-3.1-8B": 8.03,
    "Mistral-7B-v0.1": 7.24,
    "Qwen2.5-7B": 7.62,
    "Qwen3-30B-A3B": 30.53,
    "falcon-40b": 41.3,
    "DeepSeek-V3": 671.0,
}


def write_config(directory: pathlib.Path, config: dict) -> pathlib.Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def asked(tmp_path: pathlib.Path, model: pathlib.Path, *words: str) -> plan_pb2.PlanRequest:
    """What superoffloadctl asks the planner; a program that keeps the question stands for it."""
    planner, question = tmp_path / "superoffload-plan", tmp_path / "question"
    planner.write_text(f"#!/bin/sh\ncat > '{question}'\nexit 2\n")
    planner.chmod(0o755)
    run = subprocess.run(
        [CTL, "plan", f"--model={model}", *RUN, *words],
        env={**os.environ, "SUPEROFFLOAD_DAEMON": str(tmp_path / "superoffloadd")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert not run.stderr, run.stderr
    return plan_pb2.PlanRequest.FromString(question.read_bytes())


@pytest.mark.parametrize("name", [*SWITCHES, *PUBLISHED])
def test_both_commands_read_the_same_model_of_a_configuration(tmp_path, name):
    directory = write_config(tmp_path / name, (SWITCHES | PUBLISHED)[name])
    described = plan.describe_config(directory)
    read = asked(tmp_path, directory).model
    assert read.architecture == described.architecture
    assert [parameter.name for parameter in read.parameters] == [parameter.name for parameter in described.parameters]
    assert read == described
    if name in BILLIONS:
        elements = 0
        for parameter in read.parameters:
            count = 1
            for extent in parameter.shape:
                count *= extent
            elements += count
        assert elements / 1e9 == pytest.approx(BILLIONS[name], rel=2e-3)


def test_a_configuration_is_read_without_torch_in_both_forms_of_its_path(tmp_path):
    directory = write_config(tmp_path / "Llama-3.1-8B", PUBLISHED["Llama-3.1-8B"])
    reports = []
    for model in (directory, directory / "config.json"):
        words = [CTL, "plan", f"--model={model}", *RUN]
        run = subprocess.run(words, env={**os.environ, "PATH": ""}, capture_output=True, text=True, timeout=120)
        assert run.returncode == 0, run.stderr
        reports.append(run.stdout)
    assert reports[0] == reports[1]
    assert reports[0].startswith("Llama-3.1-8B on gh200-96-480: 8.03 B parameters")
    python = [sys.executable, "-m", "superoffload", "plan", f"--model={directory}", *RUN]
    assert subprocess.run(python, capture_output=True, text=True, timeout=300).stdout == reports[0]


def test_a_dtype_that_is_asked_for_is_that_of_the_parameters(tmp_path):
    directory = write_config(tmp_path / "small", SWITCHES["llama-fp16"])
    for words in (("--dtype=float32",), ()):
        read = asked(tmp_path, directory, *words).model
        assert read == plan.describe_config(directory, "float32" if words else "")


def test_latent_attention_is_planned_by_its_own_sizes(tmp_path):
    narrow = write_config(tmp_path / "narrow", DEEPSEEK)
    wide = write_config(tmp_path / "wide", {**DEEPSEEK, "v_head_dim": 24})
    answers = [plan.ask(asked(tmp_path, directory)) for directory in (narrow, wide)]
    assert answers[0].largest.batch > answers[1].largest.batch  # a block's activations are smaller
    request = asked(tmp_path, narrow)
    del request.model.parameters[:]
    with pytest.raises(plan.Error, match="must be listed"):
        plan.ask(request)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"model_type": "gemma3"}', "`superoffload plan`"),
        ('{"model_type": "llama", "num_hidden_layers": 1e9}', "num_hidden_layers is 1000000000 but must be"),
        ('{"model_type": ' + "[" * 100_000, "more than 30 levels"),
        (" " * (1 << 20) + "{}", "more than 1048576 bytes"),
        ("not JSON", "no JSON object"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused_in_a_sentence(tmp_path, text, sentence):
    (tmp_path / "config.json").write_text(text)
    run = subprocess.run([CTL, "plan", f"--model={tmp_path}", *RUN], capture_output=True, text=True, timeout=60)
    assert run.returncode == 2 and not run.stdout
    assert sentence in run.stderr and run.stderr.count("\n") == 1, run.stderr
