"""A checkpoint of DeepSpeed goes on in the daemon as the same state does that torch brought."""

import pathlib
import subprocess

import grpc
import pytest
import torch
from tests.integration.test_checkpoint import build, refused, states_equal, train
from tests.integration.test_run_checkpoint import run
from tests.support import deepspeed_checkpoints as written
from tests.support.build_directory import BUILD
from tests.support.sharded_trainer import Model

import superoffload.torch
from superoffload._core.control import Connection
from superoffload.import_checkpoint.command import import_checkpoint
from superoffload.v1 import optimizer_pb2 as pb

STEPS = 7
WRITERS = {
    "stage 2": lambda directory, made: written.write_stage_1(directory, made, 3, stage=2, between=True),
    "stage 3": lambda directory, made: written.write_stage_3(directory, made, 4),
    "universal": lambda directory, made: written.write_universal(directory, made),
}


def groups_of(model):
    parameters = list(model.named_parameters())
    matrices = [(name, parameter) for name, parameter in parameters if parameter.ndim > 1]
    return [{"params": matrices}, {"params": [pair for pair in parameters if pair not in matrices]}]


def made_of(model, moments=("exp_avg", "exp_avg_sq")):
    return written.make(
        [{name: tuple(p.shape) for name, p in group["params"]} for group in groups_of(model)],
        moments=moments,
        steps=STEPS,
    )


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("cls", [superoffload.torch.AdamW, superoffload.torch.Lion])
def test_a_restored_optimizer_goes_on_as_one_that_got_the_state_from_torch(daemon, tmp_path, kind, cls):
    moments = cls.algorithm.moments
    model, other = build(), build(seed=2)
    made = made_of(model, moments)
    made.steps[1] = STEPS - 2
    WRITERS[kind](tmp_path / "step7", made)
    imported = import_checkpoint(tmp_path / "step7", tmp_path / "ckpt")
    assert imported.committed_steps == STEPS

    options = {"endpoint": daemon.endpoint, "max_grad_norm": 0.05, "bucket_bytes": 16384}
    restored = cls(groups_of(model), name="restored", restore=tmp_path / "ckpt", lr=1.0, **options)
    assert [group["lr"] for group in restored.param_groups] == [1e-3, 2e-3]
    assert [group["weight_decay"] for group in restored.param_groups] == [0.0, 0.1]
    assert restored.committed_steps == STEPS
    for name, state in restored.state_tensors().items():
        for array, wanted in (("master", "model"), *((moment, moment) for moment in moments)):
            assert torch.equal(state[array], made.tensors[f"{wanted}.{name}"]), (name, array)

    arrays = {name: of_name for group in made.groups for name, of_name in group.items()}
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            parameter.copy_(arrays[name]["model"])
    reference = cls(groups_of(other), name="reference", **options)
    state_dict = reference.torch_state_dict()
    state_dict["state"] = {}
    for index, (group, name) in enumerate((i, name) for i, of_group in enumerate(made.groups) for name in of_group):
        step = torch.tensor(float(made.steps[group]))
        state_dict["state"][index] = {"step": step, "master": arrays[name]["model"]}
        state_dict["state"][index] |= {moment: arrays[name][moment] for moment in moments}
    for group, saved in zip(state_dict["param_groups"], made.param_groups, strict=True):
        group.update({key: saved[key] for key in group.keys() & saved.keys()})
    reference.load_torch_state_dict(state_dict)
    assert states_equal(restored.state_tensors(), reference.state_tensors())
    train(model, restored, 0, 4)
    train(other, reference, 0, 4)
    assert restored.committed_steps == STEPS + 4
    assert states_equal(restored.state_tensors(), reference.state_tensors())
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))

    train(model, restored, 4, 5)
    restored.restore_checkpoint(tmp_path / "ckpt")
    assert restored.committed_steps == STEPS


def test_superoffloadctl_finds_it_whole_until_a_bit_flips(tmp_path, daemon):
    written.write_stage_1(tmp_path / "step7", made_of(build()), 2)
    import_checkpoint(tmp_path / "step7", tmp_path / "ckpt")
    inspect = lambda: subprocess.run(  # noqa: E731
        [BUILD / "client" / "superoffloadctl", "inspect", "--verify", tmp_path / "ckpt"], capture_output=True, text=True
    )
    whole = inspect()
    assert whole.returncode == 0, whole.stderr
    assert "optimizer step7, step 7, adamw, 1 of 1 parts" in whole.stdout and "bytes, whole" in whole.stdout
    assert "  2.bias  [64]  7 steps  1 shards" in whole.stdout

    optimizer = superoffload.torch.AdamW(groups_of(build()), endpoint=daemon.endpoint, name="damaged")
    for file in sorted((tmp_path / "ckpt").iterdir()):
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        was = file.read_bytes()
        file.write_bytes(data)
        refused(
            lambda: optimizer.restore_checkpoint(tmp_path / "ckpt"),
            grpc.StatusCode.DATA_LOSS,
            "restore an earlier checkpoint",
        )
        assert inspect().returncode != 0, file
        file.write_bytes(was)
    optimizer.restore_checkpoint(tmp_path / "ckpt")


def test_a_daemon_restores_it_that_no_trainer_is_attached_to(daemon, tmp_path):
    written.write_universal(tmp_path / "step7", made_of(build()))
    import_checkpoint(tmp_path / "step7", tmp_path / "ckpt")
    optimizer = superoffload.torch.AdamW(groups_of(build()), endpoint=daemon.endpoint, name="alone")
    optimizer.close()
    control = Connection(daemon.endpoint)
    control.call("RestoreOptimizer", pb.RestoreOptimizerRequest(name="alone", directories=[str(tmp_path / "ckpt")]))
    (row,) = control.call("ListOptimizers", pb.ListOptimizersRequest()).optimizers
    assert row.committed_steps == STEPS
    control.close()


def test_two_ranks_of_fsdp2_restore_their_shards(daemons, tmp_path: pathlib.Path):
    model = Model()
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    made = written.make([shapes], steps=STEPS)
    written.write_stage_3(tmp_path / "step7", made, 3)
    import_checkpoint(tmp_path / "step7", tmp_path / "ckpt")
    restore = {"steps": STEPS + 2, "restore": str(tmp_path / "ckpt")}
    results = run(
        daemons,
        tmp_path,
        {"name": "two", "ranks": 2, **restore},
        {"name": "one", "ranks": 1, "sharded": False, **restore},
    )
    two, one = results["two"], results["one"]
    assert two["begun"] == one["begun"] == STEPS
    for name in shapes:
        for array in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(two["states"][STEPS][f"{name}.{array}"], made.tensors[f"{array}.{name}"]), name
        assert torch.equal(two["states"][STEPS][name], made.tensors[f"model.{name}"]), name
    for step, loss in one["losses"].items():
        assert two["losses"][step] == pytest.approx(loss, rel=1e-5)
