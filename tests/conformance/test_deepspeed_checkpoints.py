"""What DeepSpeed saves is imported as DeepSpeed has it, where DeepSpeed is installed (0.19.8 was tried).

Another environment that has it can be one of .venv's packages and DeepSpeed's: see tests/README.md.
"""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from tests.support.deepspeed_saver import SCENARIOS, STEPS

from superoffload._core.error import Error
from superoffload.import_checkpoint.command import import_checkpoint

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")

ROOT = pathlib.Path(__file__).parents[2]
RANKS = 2
ENVIRONMENT = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}


def python(*words: object) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, *map(str, words)], env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def end(process: subprocess.Popen) -> None:
    log, _ = process.communicate(timeout=900)  # DeepSpeed compiles its optimizers at first
    assert process.returncode == 0, log


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("deepspeed")
    ranks = [
        python("-m", "tests.support.deepspeed_saver", directory / "store", rank, RANKS, directory)
        for rank in range(RANKS)
    ]
    try:
        for process in ranks:
            end(process)
    finally:
        for process in ranks:
            process.kill()
    return directory


def universal(directory: pathlib.Path, output: pathlib.Path) -> pathlib.Path:
    """What DeepSpeed's own tool makes of a checkpoint."""
    made = output / f"global_step{STEPS}"
    words = ["--input_folder", directory / f"global_step{STEPS}", "--output_folder", made]
    workers = ["--num_extract_workers", 1, "--num_merge_workers", 1]
    end(python("-m", "deepspeed.checkpoint.ds_to_universal", *words, *workers, "--inject_missing_state"))
    return made


def masters(directory: pathlib.Path, path: pathlib.Path) -> dict[str, torch.Tensor]:
    """As DeepSpeed's zero_to_fp32 puts them together."""
    script = (
        "import sys, torch\nfrom deepspeed.utils import zero_to_fp32\n"
        "masters = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(sys.argv[1])\n"
        "torch.save({name: tensor.clone() for name, tensor in masters.items()}, sys.argv[2])"
    )
    end(python("-c", script, directory, path))
    return torch.load(path)


def read(output: pathlib.Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in output.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("name", SCENARIOS)
def test_masters_steps_and_groups_are_deepspeeds(saved, tmp_path, name):
    imported = import_checkpoint(saved / name, tmp_path / "out")
    algorithms = {"stage_2_cpu_adam": "adam", "stage_2_lion": "lion"}
    assert imported.algorithm == algorithms.get(name, "adamw")
    assert imported.committed_steps == STEPS
    assert (imported.left_out.frozen, imported.left_out.buffers, imported.left_out.tied) == (1, 1, 1)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert [group["weight_decay"] for group in index["groups"]] == [0.1, 0.0]
    assert [group["lr"] for group in index["groups"]] == [1e-3, 1e-3]
    assert {name for name, group in index["parameter_groups"].items() if group == 1} == {"first.bias"}
    if name == "stage_1_bf16":
        return  # zero_to_fp32 refuses it; see below
    wanted = masters(saved / name, tmp_path / "masters.pt")
    for tensor_name, tensor in read(tmp_path / "out").items():
        array, _, parameter = tensor_name.partition(".")
        assert tensor.shape == wanted[parameter].shape and tensor.any(), tensor_name
        assert array != "model" or torch.equal(tensor, wanted[parameter]), tensor_name


@pytest.mark.parametrize("name", ["stage_1", "stage_1_bf16", "stage_2_cpu_adam", "stage_3"])
def test_masters_and_moments_are_those_of_a_universal_checkpoint(saved, tmp_path, name):
    made = universal(saved / name, tmp_path / "universal")
    import_checkpoint(saved / name, tmp_path / "out")
    assert import_checkpoint(tmp_path / "universal", tmp_path / "of universal").committed_steps == STEPS
    tensors, of_universal = read(tmp_path / "out"), read(tmp_path / "of universal")
    assert tensors.keys() == of_universal.keys() and len(tensors) == 3 * 5
    for tensor_name, tensor in tensors.items():
        array, _, parameter = tensor_name.partition(".")
        there = torch.load(made / "zero" / parameter / f"{'fp32' if array == 'model' else array}.pt")
        wanted = there["param"] if isinstance(there, dict) else there.view(tensor.shape)  # of stage 3, flat
        assert torch.equal(tensor, wanted) and torch.equal(of_universal[tensor_name], wanted), tensor_name


def test_the_order_of_round_robin_gradients_is_undone(saved, tmp_path):
    for name in ("stage_1", "stage_2_round_robin"):
        import_checkpoint(saved / name, tmp_path / name)
    in_order, round_robin = read(tmp_path / "stage_1"), read(tmp_path / "stage_2_round_robin")
    for name, tensor in in_order.items():
        torch.testing.assert_close(round_robin[name], tensor, msg=f"{name}: {{}}".format)


def test_a_universal_checkpoint_whose_numbers_deepspeed_mixed_up_is_refused(saved, tmp_path):
    made = universal(saved / "stage_2_round_robin", tmp_path / "universal")
    wanted = masters(saved / "stage_2_round_robin", tmp_path / "masters.pt")
    mixed_up = torch.load(made / "zero" / "second.weight" / "fp32.pt")["param"]
    assert not torch.equal(mixed_up, wanted["second.weight"])  # as DeepSpeed does it; if it does not, take it
    with pytest.raises(Error, match="name the checkpoint of which it was made"):
        import_checkpoint(tmp_path / "universal", tmp_path / "out")
