"""Recipes: what they may say, and what is wrong."""

import pathlib

import pytest
import torch

from superoffload.finetune import hosting, recipe, reference
from superoffload.finetune.training import rate

BASE = "model: m\ndata: d\n"


def read(tmp_path, text):
    path = tmp_path / "mine.yaml"
    path.write_text(BASE + text)
    return recipe.read(path)


def test_fields_have_the_types_that_are_stated(tmp_path):
    made = read(tmp_path, "learning_rate: 1e-4\nlora: {rank: 8, targets: [q_proj]}\nmax_grad_norm: null")
    assert (made.learning_rate, made.max_grad_norm) == (1e-4, None)
    assert made.lora == recipe.Lora(rank=8, targets=["q_proj"])
    assert made.output == str(tmp_path / "mine")
    assert read(tmp_path, "output: there").output == str(tmp_path / "there")


def test_rows_are_shared_by_groups_of_ranks_and_passes(tmp_path):
    made = read(tmp_path, "batch_size: 16\nranks: 4\nsequence_parallel: 2\nmicro_batch_size: 2")
    assert (made.groups, made.rows, made.rows_per_pass, made.passes) == (2, 8, 2, 4)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("length: 0", "length is 0 but must be at least 1"),
        ("length: true", "length is True but must be a whole number"),
        ("epochs: 0", "epochs is 0.0 but must be more than 0"),
        ("warmup: 2", "warmup is 2.0 but must be a part of the steps"),
        ("schedule: step", "schedule is 'step' but must be one of cosine, linear, constant"),
        ("optimizer_options: 3", "optimizer_options is 3 but must be fields by name"),
        ("ranks: 3\nsequence_parallel: 2", "sequence_parallel is 2, which does not divide ranks (3)"),
        ("micro_batch_size: 3", "micro_batch_size is 3, which does not divide the 4 rows"),
        ("lora: {rank: 0}", "lora.rank is 0 but must be at least 1"),
        ("recompute: 1", "recompute is 1 but must be true or false"),
        ("weights: [", "is not YAML"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, text, said):
    with pytest.raises(ValueError) as error:
        read(tmp_path, text)
    assert "mine.yaml" in str(error.value) and said in str(error.value)


def test_a_recipe_needs_a_model_and_data(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("length: 8")
    with pytest.raises(ValueError, match="model and data must be given"):
        recipe.read(path)
    with pytest.raises(ValueError, match="cannot read"):
        recipe.read(tmp_path / "none.yaml")


def test_a_published_recipe_is_found_by_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert recipe.read(pathlib.Path("phi-4")).model == "microsoft/phi-4"
    assert recipe.read(pathlib.Path("phi-4")).output == "phi-4"
    (tmp_path / "phi-4").write_text(BASE)
    assert recipe.read(pathlib.Path("phi-4")).model == "m"


def test_learning_rates_grow_and_fall(tmp_path):
    made = read(tmp_path, "learning_rate: 1.0\nwarmup: 0.2\nschedule: linear")
    assert [rate(made, step, 10) for step in (0, 1, 2, 6)] == pytest.approx([1 / 3, 2 / 3, 1.0, 0.5])
    cosine = read(tmp_path, "learning_rate: 1.0\nwarmup: 0")
    assert [rate(cosine, step, 4) for step in (0, 2)] == pytest.approx([1.0, 0.5])


def test_options_are_arguments_of_the_optimizer(tmp_path):
    made = read(tmp_path, "optimizer_options: {weight_decay: 0.1, betas: [0.9, 0.95], state_dtype: bfloat16}")
    assert hosting.hyperparameters(made) == {"lr": 1e-5, "weight_decay": 0.1, "betas": (0.9, 0.95)}
    assert hosting.options_of(made) == {"state_dtype": torch.bfloat16}
    assert reference.counterpart(made) is None and reference.counterpart(read(tmp_path, "")) is torch.optim.AdamW
    with pytest.raises(ValueError, match="optimizer is 'Adan' but must be one of Adam, "):
        hosting.kind_of(read(tmp_path, "optimizer: Adan"))
    with pytest.raises(ValueError, match="optimizer_options: state_dtype is 'int4' but must be one of"):
        hosting.options_of(read(tmp_path, "optimizer_options: {state_dtype: int4}"))
