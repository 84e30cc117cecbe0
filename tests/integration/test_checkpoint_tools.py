"""superoffloadctl inspect and export: what is in a checkpoint, and its weights as a Hugging Face model directory."""

import json
import os
import pathlib
import shutil
import subprocess

import pytest
import torch
import transformers

import superoffload.torch

CTL = pathlib.Path(os.environ["SUPEROFFLOAD_BUILD"]) / "client" / "superoffloadctl"


def ctl(*words):
    return subprocess.run([CTL, *map(str, words)], capture_output=True, text=True, timeout=120)


def build(tied):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=48,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    return transformers.LlamaForCausalLM(config)


def trained(daemon, model, directory, name="run", parameters=None, kind=superoffload.torch.AdamW):
    optimizer = kind(parameters or model.named_parameters(), lr=1e-2, endpoint=daemon.endpoint, name=name)
    for seed in range(2):
        tokens = torch.randint(48, (2, 8), generator=torch.Generator().manual_seed(seed))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.save_checkpoint(directory)
    optimizer.close()


@pytest.mark.parametrize("tied", [False, True])
def test_what_is_exported_loads_with_from_pretrained(daemon, tmp_path, tied):
    model = build(tied)
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)  # only the source has it
    model.save_pretrained(tmp_path / "source")
    (tmp_path / "source" / "tokenizer.json").write_text("{}")
    trained(daemon, model, tmp_path / "ckpt")
    done = ctl(
        "export",
        tmp_path / "ckpt",
        tmp_path / "fp32",
        f"--source={tmp_path}/source",
        "--dtype=fp32",
        "--shard_bytes=8192",
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "fp32" / "tokenizer.json").exists()
    assert len(list((tmp_path / "fp32").glob("*.safetensors"))) > 1
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "fp32", dtype=torch.float32)
    for (name, ours), theirs in zip(model.named_parameters(), loaded.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    done = ctl("export", tmp_path / "ckpt", tmp_path / "bf16", f"--source={tmp_path}/source")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "bf16" / "model.safetensors").exists()
    narrow = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "bf16", dtype=torch.float32)
    for (name, ours), theirs in zip(model.named_parameters(), narrow.parameters(), strict=True):
        if ours.requires_grad:
            assert torch.equal(ours.to(torch.bfloat16).float(), theirs), name
    again = ctl("export", tmp_path / "ckpt", tmp_path / "bf16")
    assert again.returncode == 1 and "ALREADY_EXISTS" in again.stderr


def test_a_tie_that_the_source_has_written_out_gets_the_trained_value(daemon, tmp_path):
    from safetensors.torch import load_file, save_file

    model = build(tied=True)
    model.save_pretrained(tmp_path / "source")
    weights = load_file(tmp_path / "source" / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, tmp_path / "source" / "model.safetensors", {"format": "pt"})
    trained(daemon, model, tmp_path / "ckpt")
    done = ctl("export", tmp_path / "ckpt", tmp_path / "out", f"--source={tmp_path}/source", "--dtype=fp32")
    assert done.returncode == 0 and "1 tied" in done.stdout, done.stderr
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(exported["lm_head.weight"], model.lm_head.weight)


def test_another_model_is_refused(daemon, tmp_path):
    model = build(tied=False)
    trained(daemon, model, tmp_path / "ckpt")
    transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=48, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
        )
    ).save_pretrained(tmp_path / "other")
    done = ctl("export", tmp_path / "ckpt", tmp_path / "out", f"--source={tmp_path}/other")
    assert done.returncode == 1 and "FAILED_PRECONDITION" in done.stderr
    assert not (tmp_path / "out").exists() and not (tmp_path / ".out.partial").exists()
    optimizer = superoffload.torch.AdamW(torch.nn.Linear(4, 4).parameters(), endpoint=daemon.endpoint)
    optimizer.save_checkpoint(tmp_path / "nameless")
    done = ctl("export", tmp_path / "nameless", tmp_path / "out")
    assert done.returncode == 1 and "named_parameters()" in done.stderr


def test_moments_of_several_dtypes_are_inspected_and_weights_exported(daemon, tmp_path):
    model = build(tied=False)
    model.save_pretrained(tmp_path / "source")
    matrices = [named for named in model.named_parameters() if named[1].dim() > 1]
    vectors = [named for named in model.named_parameters() if named[1].dim() == 1]
    groups = [{"params": matrices, "optim_bits": 8}, {"params": vectors}]
    trained(daemon, model, tmp_path / "ckpt", parameters=groups, kind=superoffload.torch.AdamW8bit)
    found = json.loads(ctl("inspect", tmp_path / "ckpt", "--json", "--verify").stdout)
    dtypes = {array["name"]: array["dtype"] for array in found["arrays"]}
    assert dtypes == {"model": "F32", "exp_avg": "F32, U8", "exp_avg_sq": "F32, U8"}
    done = ctl("export", tmp_path / "ckpt", tmp_path / "out", f"--source={tmp_path}/source", "--dtype=fp32")
    assert done.returncode == 0, done.stderr
    exported = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out")
    for name, parameter in exported.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name))


def test_inspect_says_what_is_there_and_what_is_damaged(daemon, tmp_path):
    model = build(tied=False)
    trained(daemon, model, tmp_path / "ckpt")
    said = ctl("inspect", tmp_path / "ckpt", "--json", "--verify")
    assert said.returncode == 0, said.stderr
    found = json.loads(said.stdout)
    assert (found["whole"], found["kind"], found["committed_steps"], found["algorithm"]) == (
        True,
        "optimizer",
        2,
        "adamw",
    )
    assert {array["name"]: array["dtype"] for array in found["arrays"]} == {
        "model": "F32",
        "exp_avg": "F32",
        "exp_avg_sq": "F32",
    }
    parameters = {parameter["name"]: parameter for parameter in found["parameters"]}
    assert parameters.keys() == dict(model.named_parameters()).keys()
    assert parameters["lm_head.weight"]["shape"] == [48, 16] and parameters["lm_head.weight"]["steps"] == 2
    assert "step 2" in ctl("inspect", tmp_path / "ckpt").stdout
    assert ctl("inspect", tmp_path).returncode == 1
    assert "NOT_FOUND" in ctl("inspect", tmp_path / "nowhere").stderr

    shard = next((tmp_path / "ckpt").glob("exp_avg-*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert ctl("inspect", tmp_path / "ckpt").returncode == 0
    damaged = ctl("inspect", tmp_path / "ckpt", "--json", "--verify")
    assert damaged.returncode == 1 and "CRC-32" in json.loads(damaged.stdout)["problems"][0]
    shutil.rmtree(tmp_path / "ckpt")


def test_a_terminal_obeys_nothing_that_stands_in_a_checkpoint(daemon, tmp_path):
    trained(daemon, build(tied=False), tmp_path / "ckpt")
    index = tmp_path / "ckpt" / "model.safetensors.index.json"
    written = json.loads(index.read_text())
    written["metadata"]["optimizer"] = "\x1b[31mred\nrank 7  forged"
    written["metadata"]["version"] = 2  # of which none is summed up
    del written["text_crc32"]
    index.write_text(json.dumps(written))
    shown = ctl("inspect", tmp_path / "ckpt").stdout
    assert "\\x1b[31mred\\x0arank 7  forged" in shown and "\x1b" not in shown and "\nrank 7" not in shown
    refused = ctl("inspect", f"{tmp_path}/\x1b[31mnone")
    assert refused.returncode == 1 and refused.stderr and "\x1b" not in refused.stderr
