"""Checkpoints in DeepSpeed's layouts: every number of them arrives, and what does not fit together is refused."""

import json
import math
import os
import pathlib
import shutil
import subprocess
import sys
import zlib

import grpc
import pytest
import torch
from safetensors import safe_open
from tests.support import deepspeed_checkpoints as written

from superoffload._core import checkpoint_files
from superoffload._core.error import Error
from superoffload.import_checkpoint import command
from superoffload.import_checkpoint.command import import_checkpoint

INDEX = "model.safetensors.index.json"
SHAPES = [
    {"embedding.weight": (33, 5), "a.weight": (7, 3), "scale": (), "b.weight": (1, 1, 3)},
    {"a.bias": (7,), "b.bias": (1,), "norm.weight": (5,)},
]
UNIVERSAL = {
    "universal": lambda directory, made: written.write_universal(directory, made),
    "universal of stage 3": lambda directory, made: written.write_universal(directory, made, of_stage_3=True),
}
ZERO = {
    "stage 1": lambda directory, made: written.write_stage_1(directory, made, 2),
    "stage 2, three ranks, gaps": lambda directory, made: written.write_stage_1(
        directory, made, 3, stage=2, prefix="", between=True
    ),
    "ranks with padding only": lambda directory, made: written.write_stage_1(directory, made, 16),
    "masters with padding": lambda directory, made: written.write_stage_1(directory, made, 4, lean=False),
    "elastic": lambda directory, made: written.write_stage_1(directory, made, 3, elastic=True),
    "stage 3": lambda directory, made: written.write_stage_3(directory, made, 2),
    "stage 3, five ranks": lambda directory, made: written.write_stage_3(directory, made, 5, size=3),
}
KINDS = {**ZERO, **UNIVERSAL}


def read(directory: pathlib.Path) -> tuple[dict, dict[str, torch.Tensor]]:
    """Index and tensors, whose checksums hold."""
    text = (directory / INDEX).read_bytes()
    index = json.loads(text)
    body, _, end = text.rpartition(b',\n "text_crc32": "')
    assert end == b'%08x"\n}\n' % zlib.crc32(body)
    tensors = {}
    for file, crc32 in index["crc32"].items():
        assert zlib.crc32((directory / file).read_bytes()) == crc32
        with safe_open(directory / file, "pt") as shard:
            tensors.update({name: shard.get_tensor(name) for name in shard.keys()})  # noqa: SIM118
    assert tensors.keys() == index["weight_map"].keys()
    assert sorted(os.listdir(directory)) == sorted([INDEX, *index["crc32"]])
    return index, tensors


def equal(there: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert there.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert there[name].dtype == torch.float32 and there[name].shape == tensor.shape, name
        assert torch.equal(there[name], tensor) or torch.isnan(tensor).any(), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("moments", [("exp_avg", "exp_avg_sq"), ("exp_avg",)], ids=["adam", "lion"])
def test_every_number_arrives(tmp_path, kind, moments):
    made = written.make(SHAPES, moments=moments)
    made.steps[1] = 5
    KINDS[kind](tmp_path / "step7", made)
    imported = import_checkpoint(tmp_path / "step7", tmp_path / "out")
    index, tensors = read(tmp_path / "out")
    equal(tensors, made.tensors)
    algorithm = "adamw" if len(moments) == 2 else "lion"
    assert index["metadata"]["algorithm"] == imported.algorithm == algorithm
    assert index["metadata"]["committed_steps"] == imported.committed_steps == 7
    assert index["parameter_steps"] == dict.fromkeys(SHAPES[1], 5)
    assert index["parameter_groups"] == {name: i for i, group in enumerate(SHAPES) for name in group}
    names = ("lr", "beta1", "beta2", "eps", "weight_decay") if algorithm == "adamw" else ("lr", "beta1", "beta2")
    for i, group in enumerate(index["groups"]):
        values = dict(zip(("lr", "beta1", "beta2", "eps"), (1e-3 * (i + 1), 0.9, 0.99, 1e-7), strict=True))
        values["weight_decay"] = 0.1 * i
        for name in names if kind != "elastic" else ():
            assert group[name] == values[name]
        assert len(group) == (0 if kind == "elastic" else 5 if algorithm == "adamw" else 4)
    assert imported.elements == sum(math.prod(shape) for group in SHAPES for shape in group.values())
    assert (imported.left_out.frozen, imported.left_out.buffers, imported.left_out.tied) == (1, 1, 1)
    assert [name for name in os.listdir(tmp_path) if name.startswith(".")] == []


def test_universal_parameters_that_ranks_had_divided_are_whole(tmp_path):
    made = written.make(SHAPES)
    written.write_universal(tmp_path / "in", made)
    for rank in range(2):  # of tensor parallelism
        with Changed(tmp_path / "in" / f"mp_rank_0{rank}_model_states.pt") as loaded:
            loaded["param_shapes"][0]["embedding.weight"] = torch.Size((33 // 2 + rank, 5))
        if rank == 0:
            shutil.copy(tmp_path / "in" / "mp_rank_00_model_states.pt", tmp_path / "in" / "mp_rank_01_model_states.pt")
    import_checkpoint(tmp_path / "in", tmp_path / "out")
    equal(read(tmp_path / "out")[1], made.tensors)


def test_shards_hold_whole_tensors_of_one_array(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_files, "_SHARD_BYTES", 4 * 30)
    made = written.make(SHAPES)
    written.write_stage_3(tmp_path / "in", made, 2)
    import_checkpoint(tmp_path / "in", tmp_path / "out")
    index, tensors = read(tmp_path / "out")
    equal(tensors, made.tensors)
    assert index["weight_map"]["model.embedding.weight"] == "model-00001-of-00003.safetensors"
    assert index["weight_map"]["model.norm.weight"] == "model-00003-of-00003.safetensors"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_moments_are_widened_and_numbers_that_are_none_stay(tmp_path, dtype):
    made = written.make([{"w": (5, 3)}])
    arrays = made.groups[0]["w"]
    arrays["exp_avg"][0, :2] = torch.tensor([math.inf, math.nan])
    arrays["exp_avg_sq"][0, 0] = 0.0
    for moment in ("exp_avg", "exp_avg_sq"):
        arrays[moment] = arrays[moment].to(dtype)
    written.write_universal(tmp_path / "in", made)
    import_checkpoint(tmp_path / "in", tmp_path / "out")
    _, tensors = read(tmp_path / "out")
    for moment in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(tensors[f"{moment}.w"].nan_to_num(7.5), arrays[moment].float().nan_to_num(7.5))


def test_the_tag_is_that_of_latest_or_the_one_that_is_asked_for(tmp_path):
    made = [written.make(SHAPES, steps=steps, seed=steps) for steps in (1, 2, 3)]
    written.write_stage_1(tmp_path / "in" / "step1", made[0], 2)
    written.write_stage_3(tmp_path / "in" / "step2", made[1], 2)
    written.write_universal(tmp_path / "in" / "step3", made[2])
    (tmp_path / "in" / "latest_universal").write_text("step3")
    assert import_checkpoint(tmp_path / "in", tmp_path / "u").committed_steps == 3
    (tmp_path / "in" / "latest").write_text("step2\n")
    assert import_checkpoint(tmp_path / "in", tmp_path / "l").committed_steps == 2
    assert import_checkpoint(tmp_path / "in", tmp_path / "t", tag="step1").committed_steps == 1
    equal(read(tmp_path / "t")[1], made[0].tensors)
    (tmp_path / "in" / "latest").write_text("step9")
    refused(tmp_path / "in", grpc.StatusCode.NOT_FOUND, "no directory 'step9', but step1, step2, step3; choose one")
    refused(tmp_path / "in", grpc.StatusCode.NOT_FOUND, "no directory '../in", tag="../in/step1")


def test_names_lose_a_wrappers_prefix_if_all_have_it(tmp_path):
    wrapped = written.make([{"module.a": (3,), "module.b": (2,)}])
    mixed = written.make([{"module.a": (3,), "b": (2,)}])
    written.write_stage_1(tmp_path / "wrapped", wrapped, 2)
    written.write_stage_1(tmp_path / "mixed", mixed, 2)
    import_checkpoint(tmp_path / "wrapped", tmp_path / "a")
    import_checkpoint(tmp_path / "mixed", tmp_path / "b")
    assert list(read(tmp_path / "a")[0]["parameter_groups"]) == ["a", "b"]
    assert list(read(tmp_path / "b")[0]["parameter_groups"]) == ["module.a", "b"]


@pytest.mark.parametrize(
    ("group", "configuration", "algorithm"),
    [
        ({}, {}, "adamw"),
        ({"decoupled_weight_decay": False}, {}, "adam"),
        ({"decoupled_weight_decay": True}, {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, "adamw"),
        ({}, {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, "adam"),
        ({}, {"optimizer": {"type": "Adam", "params": {}}}, "adamw"),  # DeepSpeed's default
        ({}, {"optimizer": {"type": "AdamW", "params": {"adam_w_mode": False}}}, "adamw"),
    ],
)
def test_the_algorithm_is_what_the_files_say(tmp_path, group, configuration, algorithm):
    made = written.make([{"w": (5,)}])
    made.param_groups[0].update(group)
    made.configuration.update(configuration)
    written.write_stage_1(tmp_path / "in", made, 2)
    assert import_checkpoint(tmp_path / "in", tmp_path / "out").algorithm == algorithm
    asked = import_checkpoint(tmp_path / "in", tmp_path / "asked", algorithm="adam")
    assert asked.algorithm == read(tmp_path / "asked")[0]["metadata"]["algorithm"] == "adam"


def test_second_moments_that_lion_has_not_used_are_left_out(tmp_path):
    made = written.make([{"w": (5,)}])
    del made.param_groups[0]["eps"]
    written.write_stage_1(tmp_path / "in", made, 2)
    assert import_checkpoint(tmp_path / "in", tmp_path / "out").algorithm == "lion"
    assert read(tmp_path / "out")[1].keys() == {"model.w", "exp_avg.w"}


# What is refused.


def refused(source: pathlib.Path, code: grpc.StatusCode, words: str, **arguments: str) -> None:
    output = source.parent / "refused"
    with pytest.raises(Error) as raised:
        import_checkpoint(source, output, **arguments)
    assert raised.value.code == code, raised.value
    assert words in raised.value.message, raised.value
    assert not output.exists() and not (source.parent / ".refused.partial").exists()


@pytest.fixture
def zero(tmp_path):
    written.write_stage_1(tmp_path / "in", written.make(SHAPES), 3)
    return tmp_path / "in"


@pytest.fixture
def zero_3(tmp_path):
    written.write_stage_3(tmp_path / "in", written.make(SHAPES), 3)
    return tmp_path / "in"


@pytest.fixture
def universal(tmp_path):
    written.write_universal(tmp_path / "in", written.make(SHAPES))
    return tmp_path / "in"


def part(directory: pathlib.Path, rank: int) -> pathlib.Path:
    return directory / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


class Changed:
    """A file that is loaded with the writer's classes, and saved again at the end."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path

    def __enter__(self):
        self.loaded = written.load(self.path)
        return self.loaded

    def __exit__(self, kind, *_):
        if kind is None:
            written.save(self.path, self.loaded)


LOST, MISSING, NEVER = grpc.StatusCode.DATA_LOSS, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNIMPLEMENTED


def test_files_that_are_missing_or_too_many(zero):
    with Changed(part(zero, 0)) as loaded:
        loaded["optimizer_state_dict"]["partition_count"] = [4, 4]
    refused(zero, LOST, "is of 4 ranks, but files of 3 are there")
    with Changed(part(zero, 0)) as loaded:
        loaded["optimizer_state_dict"]["partition_count"] = 3
    part(zero, 1).rename(zero / "kept")
    refused(zero, LOST, "lacks the optimizer's file of rank 1, and has one of 2")
    (zero / "kept").rename(part(zero, 1))
    shutil.copy(part(zero, 1), zero / "zero_pp_rank_1_mp_rank_00_optim_states.pt")
    refused(zero, LOST, "both of rank 1")
    (zero / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    (zero / "mp_rank_00_model_states.pt").unlink()
    refused(zero, LOST, "lacks the file of rank 0")
    for rank in range(3):
        part(zero, rank).unlink()
    refused(zero, MISSING, "is no checkpoint of DeepSpeed")
    refused(zero / "nowhere", MISSING, "is no directory")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt", "tensor parallelism"),
        ("mp_rank_01_model_states.pt", "tensor parallelism"),
        ("layer_00-model_00-model_states.pt", "is of a pipeline"),
        ("layer_0_expert_3_mp_rank_00_model_states.pt", "MoE"),
        ("expp_rank_0_mp_rank_00_optim_states.pt", "MoE"),
    ],
)
def test_parallelism_of_other_kinds_is_named(zero, name, words):
    (zero / name).write_bytes(b"")
    refused(zero, NEVER, words)


def test_stage_0_is_named(zero):
    with Changed(zero / "mp_rank_00_model_states.pt") as loaded:
        loaded["param_shapes"] = None
    refused(zero, NEVER, 'save one with "zero_optimization": {"stage": 1}')


def test_ranks_of_different_steps(zero):
    with Changed(part(zero, 2)) as loaded:
        loaded["optimizer_state_dict"]["base_optimizer_state"]["state"][1]["step"] = 8
    refused(zero, LOST, "is of step 8, but ")


@pytest.mark.parametrize("steps", [-1, 2.5, math.nan, 1 << 32, 1 << 2000, "7", None, True])
def test_steps_that_are_none(zero, steps):
    for rank in range(3):
        with Changed(part(zero, rank)) as loaded:
            loaded["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["step"] = steps
    refused(zero, LOST, "step of state 0 is ")


def test_flat_tensors_that_do_not_add_up(zero):
    with Changed(part(zero, 0)) as loaded:
        masters = loaded["optimizer_state_dict"]["single_partition_of_fp32_groups"]
        masters[0] = masters[0][:-7].clone()
    refused(zero, LOST, "elements of model in group 0, whose parameters have 190")
    with Changed(part(zero, 0)) as loaded:
        masters = loaded["optimizer_state_dict"]["single_partition_of_fp32_groups"]
        masters[0] = torch.zeros(1000)
    refused(zero, LOST, "elements of model in group 0")
    with Changed(part(zero, 0)) as loaded:
        del loaded["optimizer_state_dict"]["single_partition_of_fp32_groups"][0]
    refused(zero, LOST, "has 1 groups of masters, but param_shapes has 2")


def test_parts_of_stage_3_that_do_not_add_up(zero_3):
    with Changed(part(zero_3, 1)) as loaded:
        state = loaded["optimizer_state_dict"]["optimizer_state_dict"]["state"]
        state[0]["exp_avg"] = state[0]["exp_avg"][:-1].clone()
    refused(zero_3, LOST, "has 61 elements of exp_avg in sub-group 0, where its parts of parameters have 62")


def test_parameters_that_are_there_twice(zero):
    with Changed(zero / "mp_rank_00_model_states.pt") as loaded:
        first, second = loaded["param_shapes"]
        loaded["param_shapes"] = [first, {"a.weight" if n == "a.bias" else n: s for n, s in second.items()}]
    refused(zero, LOST, "has parameter 'a.weight' twice")


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        (lambda s: s[0].update(exp_avg=[1.0]), LOST, "has a list as 'exp_avg', where a tensor must be"),
        (lambda s: s[0].update(exp_avg=written.LossScaler(1.0)), LOST, "loss_scaler.LossScaler as 'exp_avg'"),
        (lambda s: s[0].update(exp_avg=s[0]["exp_avg"].double()), NEVER, "exp_avg is float64, but must be"),
        (lambda s: s[0].update(exp_avg=torch.zeros(4, 16).T), NEVER, "transposed or has gaps"),
        (lambda s: s[0].update(max_exp_avg_sq=s[0]["exp_avg"]), NEVER, "exp_avg, exp_avg_sq, max_exp_avg_sq"),
        (lambda s: s.update({0: {"step": 3, "momentum_buffer": s[0]["exp_avg"]}}), NEVER, "momentum_buffer"),
        (lambda s: s.update({0: {}}), grpc.StatusCode.FAILED_PRECONDITION, "as before the first step"),
        (lambda s: s.pop(1), LOST, "has nothing as 1, where a dict must be"),
    ],
)
def test_states_that_cannot_be_continued(zero, change, code, words):
    for rank in range(3):
        with Changed(part(zero, rank)) as loaded:
            change(loaded["optimizer_state_dict"]["base_optimizer_state"]["state"])
    refused(zero, code, words)


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ({"amsgrad": True}, NEVER, "has amsgrad=True, which the daemon does not have"),
        ({"bias_correction": False}, NEVER, "has bias_correction=False"),
        ({"betas": (0.9, 1.0)}, LOST, "has beta2=1.0, which no optimizer can have"),
        ({"betas": 0.9}, LOST, "lacks two betas"),
        ({"lr": math.inf}, LOST, "has lr=inf"),
        ({"lr": "fast"}, LOST, "lr is no number"),
        ({"eps": None}, LOST, "eps is no number"),
        ({"eps": 1 << 2000, "decoupled_weight_decay": []}, LOST, "eps is no number"),
    ],
)
def test_groups_that_no_optimizer_has(tmp_path, change, code, words):
    made = written.make(SHAPES)
    made.param_groups[1].update(change)
    written.write_stage_3(tmp_path / "in", made, 2)
    refused(tmp_path / "in", code, words)


def test_a_learning_rate_may_be_a_tensor_or_a_number_of_numpy(tmp_path):
    import numpy

    made = written.make(SHAPES)
    made.param_groups[0]["lr"] = numpy.float64(0.25)
    made.param_groups[1]["lr"] = torch.tensor(0.5)
    written.write_stage_1(tmp_path / "in", made, 2)
    import_checkpoint(tmp_path / "in", tmp_path / "out")
    assert [group["lr"] for group in read(tmp_path / "out")[0]["groups"]] == [0.25, 0.5]


def test_an_algorithm_that_the_daemon_or_the_checkpoint_does_not_have(zero, tmp_path):
    refused(zero, grpc.StatusCode.INVALID_ARGUMENT, "must be one of 'adamw', 'adam', 'lion'", algorithm="sgd")
    written.write_stage_1(tmp_path / "lion", written.make([{"w": (5,)}], moments=("exp_avg",)), 2)
    refused(tmp_path / "lion", grpc.StatusCode.INVALID_ARGUMENT, "lacks exp_avg_sq, which adam has;", algorithm="adam")


def test_universal_checkpoints_that_are_not_whole(universal):
    (universal / "zero" / "a.bias" / "exp_avg_sq.pt").unlink()
    refused(universal, LOST, "has exp_avg_sq of some parameters only")
    (universal / "zero" / "a.bias" / "fp32.pt").unlink()
    refused(universal, MISSING, "fp32.pt: No such file or directory")
    shutil.rmtree(universal / "zero" / "a.bias")
    refused(universal, LOST, "lacks moments of parameter 'a.bias'")
    shutil.copytree(universal / "zero" / "b.bias", universal / "zero" / "a.bias")
    shutil.copytree(universal / "zero" / "b.bias", universal / "zero" / "more")
    refused(universal, LOST, "has moments of 'more', which")
    shutil.rmtree(universal / "zero" / "more")
    written.save(universal / "zero" / "b.weight" / "exp_avg.pt", {"param": torch.ones(4)})
    refused(universal, LOST, "has 4 elements, and the parameter 3")
    written.save(universal / "zero" / "b.weight" / "exp_avg.pt", {"param": torch.ones(3), "is_expert_param": True})
    refused(universal, NEVER, "MoE")
    with Changed(universal / "mp_rank_00_model_states.pt") as loaded:
        loaded["ds_config"] = {"zero_optimization": {"stage": 2, "round_robin_gradients": True}}
    refused(universal, grpc.StatusCode.FAILED_PRECONDITION, "name the checkpoint of which it was made")
    (universal / "zero" / "optimizer_state.pt").unlink()
    refused(universal, MISSING, "optimizer_state.pt: No such file or directory")


def test_an_output_that_exists_or_has_no_room(zero, tmp_path, monkeypatch):
    (tmp_path / "there").mkdir()
    with pytest.raises(Error, match="exists; remove it or choose another") as raised:
        import_checkpoint(zero, tmp_path / "there")
    assert raised.value.code == grpc.StatusCode.ALREADY_EXISTS
    with pytest.raises(OSError, match="No such file"):
        import_checkpoint(zero, tmp_path / "no" / "parent")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 1000))
    refused(zero, grpc.StatusCode.RESOURCE_EXHAUSTED, "takes 2436 bytes, but its disk has 1000 left")


def test_what_a_killed_import_has_left_is_removed(zero, tmp_path):
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "model-00001-of-00001.safetensors").write_bytes(b"half")
    import_checkpoint(zero, tmp_path / "out")
    read(tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["in", "out"]


def test_a_file_that_shrinks_meanwhile_leaves_nothing(zero, tmp_path, monkeypatch):
    write = checkpoint_files.write

    def shrink(*arguments):
        os.truncate(part(zero, 2), 3000)
        write(*arguments)

    monkeypatch.setattr(checkpoint_files, "write", shrink)
    refused(zero, LOST, "it has become shorter")


# The command.


def run(*words: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "superoffload", "import-checkpoint", *map(str, words)], capture_output=True, text=True
    )


def test_the_command_prints_one_line_and_needs_neither_deepspeed_nor_torch(zero, tmp_path):
    script = (
        "import sys\nfor name in ('deepspeed', 'torch', 'numpy', 'safetensors'): sys.modules[name] = None\n"
        "from superoffload.import_checkpoint.command import main\nsys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run([sys.executable, "-c", script, zero, tmp_path / "out"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout == (
        f"step 7, 7 parameters with 203 elements, groups: 2, 2436 bytes in {tmp_path}/out (the model has as well, and "
        "the optimizer has not: frozen parameters: 1, buffers: 1, tied names: 1); restore it with "
        f"superoffload.torch.AdamW(the_same_groups, restore='{tmp_path}/out')\n"
    )
    read(tmp_path / "out")


def test_the_command_says_what_is_wrong_in_one_line(zero, tmp_path):
    for words in ([tmp_path / "nowhere", tmp_path / "out"], [zero, zero], [zero, tmp_path / "out", "--tag", "x"]):
        done = run(*words)
        assert done.returncode == 2 and done.stdout == ""
        assert done.stderr.startswith("superoffload import-checkpoint: ") and done.stderr.count("\n") == 1
    done = run(zero, tmp_path / "no" / "parent")
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "No such file" in done.stderr
    assert run(zero).returncode == 2 and run("--help").returncode == 0


def test_the_command_passes_tag_and_algorithm_on(zero, tmp_path):
    assert command.main([str(tmp_path), str(tmp_path / "out"), "--tag=in", "--algorithm=adam"]) == 0
    assert read(tmp_path / "out")[0]["metadata"]["algorithm"] == "adam"
