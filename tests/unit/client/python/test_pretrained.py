"""Weights of Hugging Face models, read one by one: those that from_pretrained loads."""

import json

import accelerate
import pytest
import torch
import transformers

import superoffload
from superoffload.torch import pretrained_weights

SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "pad_token_id": 0}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "eos_token_id": 1, "bos_token_id": 1}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_local_experts": 4}
MODELS = {
    "llama": {},
    "llama_tied": {"model_type": "llama", "tie_word_embeddings": True},
    "qwen3": {},
    "qwen3_moe": EXPERTS,
    "gpt_oss": EXPERTS,
    "phi3": {},
    "seed_oss": {},
    "mixtral": EXPERTS,
}


def config_of(name):
    return transformers.AutoConfig.for_model(**{"model_type": name} | SMALL | MODELS[name])


def empty(config, kind=transformers.AutoModelForCausalLM, dtype=torch.bfloat16):
    with accelerate.init_empty_weights():
        model = kind.from_config(config, dtype=dtype)
    model.tie_weights()
    return model


@pytest.fixture(params=MODELS)
def saved(request, tmp_path):
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config_of(request.param), dtype=torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    return tmp_path


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values_are_those_that_from_pretrained_loads(saved, dtype):
    loaded = transformers.AutoModelForCausalLM.from_pretrained(saved, dtype=dtype)
    model = empty(loaded.config, dtype=dtype)
    weights = pretrained_weights(model, saved)
    assert set(weights) == {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for _ in range(2):
        for name, parameter in loaded.named_parameters():
            value = weights[name]
            assert value.dtype == dtype and torch.equal(value, parameter), name
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


def test_a_model_without_its_head_takes_its_part(tmp_path):
    config = config_of("qwen3_moe")
    whole = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    whole.save_pretrained(tmp_path)
    model = empty(config, transformers.AutoModel)
    weights = pretrained_weights(model, tmp_path)
    for name, parameter in whole.model.named_parameters():
        assert torch.equal(weights[name], parameter), name
    assert len(weights) == len(list(model.parameters()))


def test_parameters_that_one_tensor_holds_are_read_in_any_order(tmp_path, monkeypatch):
    from safetensors.torch import save_file
    from transformers import conversion_mapping
    from transformers.core_model_loading import Chunk, WeightConverter

    names = [f"self_attn.{each}_proj.weight" for each in "qkv"]
    split = WeightConverter("self_attn.qkv.weight", names, operations=[Chunk(dim=0)])
    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", lambda model: [split])
    config = config_of("llama")
    config.num_key_value_heads = config.num_attention_heads
    values = torch.randn(96, 32).bfloat16()
    save_file({"model.layers.0.self_attn.qkv.weight": values}, tmp_path / "model.safetensors")
    weights = pretrained_weights(empty(config), tmp_path)
    for each in (0, 0, 2, 1, 1, 2):
        assert torch.equal(weights[f"model.layers.0.{names[each]}"], values[32 * each : 32 * each + 32]), each


def test_experts_in_mxfp4_are_those_that_from_pretrained_makes_of_them(tmp_path):
    from safetensors.torch import save_file

    config = config_of("gpt_oss")
    config.intermediate_size = 32
    values = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).state_dict()
    for name in [name for name in values if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = values.pop(name).shape
        generator = torch.Generator().manual_seed(len(values))
        values[f"{name}_blocks"] = torch.randint(
            256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8, generator=generator
        )
        values[f"{name}_scales"] = torch.randint(
            118, 126, (experts, outputs, inputs // 32), dtype=torch.uint8, generator=generator
        )
    save_file(values, tmp_path / "model.safetensors", {"format": "pt"})
    config.quantization_config = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    config.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, quantization_config=transformers.Mxfp4Config(dequantize=True)
    )
    weights = pretrained_weights(empty(config_of("gpt_oss")), tmp_path)
    assert len(weights) == len(list(loaded.parameters()))
    for name, parameter in loaded.named_parameters():
        assert torch.equal(weights[name], parameter), name


def test_a_model_of_ones_own_has_the_names_of_its_files(tmp_path):
    from safetensors.torch import save_file

    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    values = {name: value.clone() for name, value in model.state_dict().items()}
    save_file({name: value for name, value in values.items() if name.startswith("0")}, tmp_path / "a.safetensors")
    save_file({"1.weight": values["1.weight"], "other": torch.ones(2)}, tmp_path / "b.safetensors")
    weights = pretrained_weights(model.to("meta"), tmp_path)
    assert list(weights) == ["0.weight", "0.bias", "1.weight"] and "1.bias" not in weights
    assert all(torch.equal(weights[name], values[name]) for name in weights)


def test_other_forms_of_the_same_weights_are_left_alone(tmp_path):
    from safetensors.torch import save_file

    save_file({"weight": torch.ones(2, 2)}, tmp_path / "model-00001-of-00001.safetensors")
    save_file({"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}, tmp_path / "consolidated.safetensors")
    weights = pretrained_weights(torch.nn.Linear(2, 2, device="meta"), tmp_path)
    assert list(weights) == ["weight"] and weights["weight"].sum() == 4


def test_what_cannot_be_read_is_named(tmp_path):
    def refused():
        with pytest.raises(superoffload.Error) as error:
            dict(pretrained_weights(torch.nn.Linear(2, 2), tmp_path))
        return str(error.value)

    assert "has no safetensors files; save_pretrained() writes them" in refused()
    (tmp_path / "model-1.safetensors").write_bytes(b"\0" * 7)
    assert "model-1.safetensors" in refused() and "fetch it again" in refused()
    (tmp_path / "config.json").write_text("{")
    assert "is not JSON" in refused()
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "fp8"}}))
    assert "holds quantized weights" in refused()
