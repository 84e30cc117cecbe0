"""superoffload.axolotl.Plugin in Axolotl itself, where it is installed."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import tokenizers
import transformers
import yaml

pytestmark = pytest.mark.skipif(importlib.util.find_spec("axolotl") is None, reason="Axolotl is not installed")
STEPS = 4


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with a model of one layer, its tokenizer, and data."""
    folder = tmp_path_factory.mktemp("axolotl")
    words = {word: at for at, word in enumerate(["<pad>", "<eos>", "<unk>"] + [f"w{at}" for at in range(61)])}
    words_of = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    words_of.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=words_of, **special).save_pretrained(folder / "model")
    transformers.set_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=1)
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "model")
    rows = [{"instruction": f"w{at} w{at + 1}", "input": "", "output": f"w{at + 2} w{at + 3}"} for at in range(40)]
    (folder / "data.json").write_text(json.dumps(rows))
    return folder


def train(files, tmp_path, **fields):
    """Axolotl's exit status, what it says, and its log of losses, if there is one."""
    config = {
        "base_model": str(files / "model"),
        "tokenizer_type": "PreTrainedTokenizerFast",
        "datasets": [{"path": str(files / "data.json"), "ds_type": "json", "type": "alpaca"}],
        "dataset_prepared_path": str(tmp_path / "prepared"),
        "output_dir": str(tmp_path / "out"),
        "sequence_len": 64,
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": STEPS,
        "learning_rate": 1e-3,
        "lr_scheduler": "cosine",
        "weight_decay": 0.1,
        "logging_steps": 1,
        "val_set_size": 0,
        "seed": 7,
        **{name: False for name in ("bf16", "fp16", "tf32")},
        **fields,
    }
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "axolotl.cli.main", "train", str(tmp_path / "train.yaml"), "--launcher", "python"]
    offline = {"AXOLOTL_DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **offline}, cwd=tmp_path)
    state = tmp_path / "out" / f"checkpoint-{STEPS}" / "trainer_state.json"
    history = json.loads(state.read_text())["log_history"] if state.exists() else []
    return done.returncode, done.stdout + done.stderr, [logs for logs in history if "loss" in logs]


def ours(daemon, **options):
    return {"plugins": ["superoffload.axolotl.Plugin"], "superoffload": {"endpoint": daemon.endpoint, **options}}


@pytest.mark.parametrize(("optimizer", "cls"), [("adamw_torch_fused", "AdamW"), ("adamw_bnb_8bit", "AdamW8bit")])
def test_the_optimizer_that_a_file_names_is_hosted(daemon, files, tmp_path, optimizer, cls):
    status, text, hosted = train(files, tmp_path, optimizer=optimizer, **ours(daemon, name="axolotl"))
    assert status == 0, text[-3000:]
    assert [logs["superoffload/committed_steps"] for logs in hosted] == [1, 2, 3, 4]
    (tmp_path / "plain").mkdir()
    status, text, plain = train(files, tmp_path / "plain", optimizer="adamw_torch")
    assert status == 0, text[-3000:]
    within = 1e-6 if cls == "AdamW" else 2e-2
    assert [logs["loss"] for logs in hosted] == pytest.approx([logs["loss"] for logs in plain], rel=within)
    assert [logs["learning_rate"] for logs in hosted] == [logs["learning_rate"] for logs in plain]


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"optimizer": "adamw_torch", "superoffload": {"weigths": "auto"}}, "weigths is no option; there are"),
        ({"optimizer": "muon"}, "it makes groups of parameters itself; choose optim='adamw_torch'"),
        ({"optimizer": "adafactor"}, "optimizer is Adafactor: it has no counterpart"),
    ],
)
def test_what_cannot_be_hosted_is_refused_before_the_first_step(daemon, files, tmp_path, fields, match):
    status, text, logged = train(files, tmp_path, **{**ours(daemon), **fields})
    assert (status != 0, logged) == (True, [])
    assert match in text, text[-3000:]
