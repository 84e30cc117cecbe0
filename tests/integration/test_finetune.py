"""`superoffload finetune`: from recipes to Hugging Face directories, and on from wherever a process was killed."""

import functools
import json
import os
import pathlib
import pydoc_data.topics
import random
import signal
import subprocess
import sys
import time

import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file
from tests.support import tiny_checkpoint
from tests.support.fake_torch_gpu import fake_gpu, gpu_daemon, nothing_stays  # noqa: F401

from superoffload._core.control import Connection
from superoffload.finetune import command, job, recipe
from superoffload.finetune.ranks import Ranks
from superoffload.torch import cuda
from superoffload.v1 import optimizer_pb2

STEPS = 12


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """Models, and data of two kinds."""
    directory = tmp_path_factory.mktemp("given")
    tiny_checkpoint.save(directory / "model")
    tiny_checkpoint.save(directory / "tied", tie_word_embeddings=True)
    topics = sorted(pydoc_data.topics.topics.items())[:48]
    with (directory / "chat.jsonl").open("w") as file:
        for name, text in topics:
            asked = {"role": "user", "content": f"What is {name}?"}
            print(json.dumps({"messages": [asked, {"role": "assistant", "content": text[:80]}]}), file=file)
    (directory / "nothing.txt").touch()
    (directory / "topics.txt").write_text("".join(text for _, text in topics)[:9000])
    return directory


def write(path, given, **fields):
    """A recipe."""
    base = {"model": str(given / "model"), "data": str(given / "topics.txt"), "length": 64, "steps": STEPS}
    base |= {"learning_rate": 1e-3, "checkpoint_every": 4}
    path.write_text(yaml.safe_dump(base | fields))
    return path


def of_ranks(given, ranks):
    """They share sequences; the model of two has tied weights."""
    model = str(given / ("model" if ranks == 1 else "tied"))
    return {"model": model, "ranks": ranks, "sequence_parallel": ranks}


@pytest.fixture
def make(given, tmp_path):
    """Writes a recipe and returns its path."""
    return lambda name="run", **fields: write(tmp_path / f"{name}.yaml", given, **fields)


@pytest.fixture(scope="module")
def undisturbed(given, tmp_path_factory):
    """The recipe of a run that nothing has disturbed, by its ranks, which share sequences."""

    @functools.cache
    def trained(ranks):
        path = tmp_path_factory.mktemp("undisturbed") / "run.yaml"
        finished(write(path, given, **of_ranks(given, ranks)))
        return path

    return trained


def weights(path):
    return load_file(path.with_suffix("") / "model" / "model.safetensors")


def log(path):
    lines = (path.with_suffix("") / "log.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def same(a, b):
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(a[name], b[name])] == []


def begin(path, **environment):
    """The command, in a process group of its own."""
    words = [sys.executable, "-m", "superoffload", "finetune", path]
    return subprocess.Popen(
        words,
        env={**os.environ, **environment},
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def finished(path, **environment):
    process = begin(path, **environment)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output.decode()
    return output.decode()


def kill_after(path, step, **environment):
    process = begin(path, **environment)
    written = path.with_suffix("") / "log.jsonl"
    while process.poll() is None and (not written.exists() or len(written.read_text().splitlines()) <= step):
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)


def test_a_recipe_becomes_a_model_that_has_learned(make, given, daemon, monkeypatch, capsys):
    monkeypatch.setenv("SUPEROFFLOAD_ENDPOINT", daemon.endpoint)
    data = str(given / "chat.jsonl")
    path = make(data=data, steps=0, epochs=6, batch_size=2, length=160, evaluation_data=data, evaluate_every=20)
    assert command.main([str(path)]) == 0
    entries = log(path)
    steps = [entry for entry in entries if "loss" in entry]
    assert [entry["step"] for entry in steps] == list(range(len(steps)))
    assert len(steps) % 6 == 0
    evaluated = [entry["evaluation_loss"] for entry in entries if "evaluation_loss" in entry]
    assert len(evaluated) == -(-len(steps) // 20) and sorted(evaluated, reverse=True) == evaluated
    assert {"verdict", "gradient_norm", "waited_seconds", "tokens_per_second", "tflops"} <= steps[0].keys()

    directory = path.with_suffix("") / "model"
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    total = count = 0
    for line in (given / "chat.jsonl").read_text().splitlines():
        messages = json.loads(line)["messages"]
        asked = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True)["input_ids"]
        tokens = torch.tensor([tokenizer.apply_chat_template(messages)["input_ids"][:160]])
        labels = tokens.clone()
        labels[:, : len(asked)] = -100
        labels[:, -1:] = -100  # the line break behind the answer
        learned = int((labels[:, 1:] != -100).sum())
        total += float(model(tokens, labels=labels).loss.detach()) * learned
        count += learned
    assert evaluated[-1] == pytest.approx(total / count, rel=2e-2)

    assert command.main([str(path)]) == 0
    assert "delete it to train again" in capsys.readouterr().out


@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_anywhere_it_goes_on_to_the_same_weights(make, given, undisturbed, ranks):
    fields = of_ranks(given, ranks)
    whole, killed = undisturbed(ranks), make(**fields)
    seed = random.randrange(1 << 30)
    print("seed", seed)
    kill_after(killed, random.Random(seed).randrange(1, STEPS - 1))
    finished(killed)
    assert same(weights(killed), weights(whole))
    assert [entry["loss"] for entry in log(killed)] == [entry["loss"] for entry in log(whole)]
    assert weights(whole).keys() == load_file(pathlib.Path(fields["model"]) / "model.safetensors").keys()


def test_a_daemon_that_stays_has_the_steps_after_the_last_checkpoint_and_nothing_when_all_is_done(
    make, undisturbed, daemon
):
    killed, environment = make(checkpoint_every=0), {"SUPEROFFLOAD_ENDPOINT": daemon.endpoint}
    kill_after(killed, STEPS // 2, **environment)
    finished(killed, **environment)
    assert same(weights(killed), weights(undisturbed(1)))
    assert not (killed.with_suffix("") / "checkpoints").exists()
    connection = Connection(daemon.endpoint)
    assert not connection.call("ListOptimizers", optimizer_pb2.ListOptimizersRequest()).optimizers
    connection.close()


@pytest.mark.parametrize("ranks", [1, 2])
def test_adapters_are_trained_and_nothing_else(make, daemon, ranks):
    peft = pytest.importorskip("peft")
    path = make(lora={"rank": 4}, learning_rate=1e-2, ranks=ranks)
    finished(path, SUPEROFFLOAD_ENDPOINT=daemon.endpoint)
    losses = [entry["loss"] for entry in log(path)]
    assert losses[-1] < losses[0] - 0.1
    directory = path.with_suffix("") / "model"
    assert not (directory / "model.safetensors").exists()
    trained = peft.AutoPeftModelForCausalLM.from_pretrained(directory)
    adapters = {name: p for name, p in trained.named_parameters() if "lora_B" in name}
    assert len(adapters) == 14 and all(bool(adapter.any()) for adapter in adapters.values())


def test_on_a_gpu_blocks_stream_in_and_the_weights_are_the_same(make, gpu_daemon, nothing_stays, monkeypatch):  # noqa: F811
    monkeypatch.setenv("SUPEROFFLOAD_ENDPOINT", gpu_daemon.endpoint)
    path = make(weights="streamed", micro_batch_size=2)
    assert job.run(recipe.read(path), Ranks(0, 1, torch.device("cpu"), on_gpu=True)) == 0
    with monkeypatch.context() as patch:
        patch.setattr(cuda, "is_on_gpu", lambda tensor: False)
        on_host = make("host", micro_batch_size=2)
        assert job.run(recipe.read(on_host), Ranks(0, 1, torch.device("cpu"), on_gpu=False)) == 0
    assert same(weights(path), weights(on_host))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"lenght": 64}, "there is no field lenght; did you mean length?"),
        ({"batch_size": "four"}, "batch_size is 'four' but must be a whole number"),
        (
            {"batch_size": 3, "ranks": 2},
            "batch_size is 3, which 2 ranks with sequences of their own cannot share evenly",
        ),
        ({"data": "/nowhere.txt"}, "/nowhere.txt"),
        ({"data": "nothing.txt"}, "nothing.txt has nothing to learn from"),
        ({"model": "/nowhere"}, "the model /nowhere cannot be read"),
        ({"batch_size": 1000}, "but a step takes batch_size = 1000"),
        ({"lora": {"rang": 4}}, "there is no field lora.rang; did you mean lora.rank?"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_loaded(make, given, fields, said, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(given)
    path = make(**fields)
    assert command.main(["--dry-run", str(path)]) in (1, 2)
    printed = capsys.readouterr()
    assert said in printed.out + printed.err


def test_a_run_goes_on_with_the_data_that_it_began_with_or_not_at_all(
    make, given, tmp_path, daemon, monkeypatch, capsys
):
    monkeypatch.setenv("SUPEROFFLOAD_ENDPOINT", daemon.endpoint)
    data = tmp_path / "data.txt"
    data.write_text((given / "topics.txt").read_text())
    path = make(data=str(data))
    kill_after(path, 2, SUPEROFFLOAD_ENDPOINT=daemon.endpoint)
    data.write_text(data.read_text().replace("e", "E", 1))
    assert command.main([str(path)]) == 2
    assert "has a run on other data" in capsys.readouterr().err


def test_another_number_of_ranks_than_the_recipe_has_is_refused(make, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert command.main([str(make())]) == 2
    assert "the launcher has started 2 ranks, but the recipe has ranks: 1" in capsys.readouterr().err


def test_a_dry_run_says_what_there_is(make, capsys):
    assert command.main(["--dry-run", str(make())]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["model", "files", "data", "ranks", "memory", "output"]
    assert "140 rows of 64 tokens, 100% of them used, 35 steps per epoch" in lines[2]


def test_an_output_directory_belongs_to_one_recipe(make, capsys, daemon, monkeypatch):
    monkeypatch.setenv("SUPEROFFLOAD_ENDPOINT", daemon.endpoint)
    assert command.main([str(make(steps=1, checkpoint_every=0))]) == 0
    assert command.main([str(make(steps=1, checkpoint_every=0, evaluate_every=3))]) == 0
    assert command.main([str(make(steps=2))]) == 2
    assert "has a run with steps: 1, and the recipe has steps: 2" in capsys.readouterr().err
