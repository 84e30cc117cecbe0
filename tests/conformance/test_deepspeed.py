"""Beside DeepSpeed itself, where it is installed: schedules, loss scales, batch sizes, and what an engine trains."""

import importlib.util
import json
import os
import pathlib
import random
import socket
import subprocess
import sys

import pytest
import torch
from tests.support.deepspeed_trainer import ROWS, STEPS, llama, rows
from tests.support.process_group import leave

from superoffload import deepspeed as ours
from superoffload.deepspeed import config, schedules
from superoffload.deepspeed.loss_scale import LossScale

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
ROOT = pathlib.Path(__file__).parents[2]
SCHEDULES = [
    ("WarmupLR", {"warmup_num_steps": 5, "warmup_max_lr": 0.3, "warmup_min_lr": 0.1}),
    ("WarmupLR", {"warmup_num_steps": 1, "warmup_type": "linear"}),
    ("WarmupDecayLR", {"total_num_steps": 20, "warmup_num_steps": 5, "warmup_max_lr": [0.3, 0.1]}),
    ("WarmupDecayLR", {"total_num_steps": 3, "warmup_num_steps": 5, "warmup_type": "linear"}),
    ("WarmupCosineLR", {"total_num_steps": 20, "warmup_num_steps": 4, "warmup_min_ratio": 0.1}),
    ("WarmupCosineLR", {"total_num_steps": 4, "warmup_num_steps": 6, "cos_min_ratio": 0.3, "warmup_type": "linear"}),
    ("LRRangeTest", {"lr_range_test_step_size": 3, "lr_range_test_step_rate": 2.0}),
    ("LRRangeTest", {"lr_range_test_step_size": 3, "lr_range_test_staircase": True}),
    ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 0.5, "cycle_first_step_size": 5}),
    (
        "OneCycle",
        {
            "cycle_min_lr": 0.1,
            "cycle_max_lr": [0.5, 0.7],
            "cycle_first_step_size": 6,
            "cycle_second_step_size": 9,
            "cycle_first_stair_count": 3,
            "cycle_second_stair_count": 2,
            "decay_step_size": 4,
            "decay_lr_rate": 0.5,
            "decay_mom_rate": 0.1,
        },
    ),
    ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 0.5, "cycle_momentum": False, "cycle_second_step_size": 0}),
]


def optimizer():
    return torch.optim.AdamW([{"params": [torch.zeros(1, requires_grad=True)], "lr": rate} for rate in (0.02, 0.04)])


@pytest.mark.parametrize(("kind", "params"), SCHEDULES)
def test_schedules_have_the_same_rates_at_every_step(kind, params):
    from deepspeed.runtime import lr_schedules

    mine, theirs = optimizer(), optimizer()
    made, made_there = schedules.make(kind, mine, params), getattr(lr_schedules, kind)(theirs, **params)
    for _ in range(40):
        for here, there in zip(mine.param_groups, theirs.param_groups, strict=True):
            assert (here["lr"], here["betas"]) == (there["lr"], there["betas"])
        made.step()
        made_there.step()
        assert made.state_dict() == made_there.state_dict()
        assert made.get_last_lr() == made_there.get_last_lr()


def test_the_loss_scale_is_the_same_at_every_step(monkeypatch):
    from deepspeed.runtime.fp16 import loss_scaler

    monkeypatch.setattr(loss_scaler.dist, "get_rank", lambda: 1)
    seed = random.randrange(1 << 30)
    print("seed", seed)
    chance = random.Random(seed)
    for _ in range(200):
        fields = config.LossScaleFields(
            static=0.0,
            initial=2.0 ** chance.randrange(6),
            window=chance.randrange(1, 4),
            hysteresis=chance.randrange(1, 4),
            refills_hysteresis=chance.random() < 0.5,
            least=1.0,
        )
        mine = LossScale(fields)
        theirs = loss_scaler.DynamicLossScaler(
            fields.initial, fields.window, fields.least, fields.hysteresis, fields.refills_hysteresis
        )
        for _ in range(40):
            overflow = chance.random() < 0.3
            try:
                theirs.update_scale(overflow)
            except Exception:  # of no class of its own
                with pytest.raises(RuntimeError, match="still overflow"):
                    mine.update(overflow, says=False)
                break
            mine.update(overflow, says=False)
            assert mine.scale == theirs.cur_scale


def test_batch_sizes_are_the_same():
    from deepspeed.runtime.config import DeepSpeedConfig

    sizes = (None, 1, 2, 3, 8, 24)
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    for given in [(total, micro, passes) for total in sizes for micro in sizes for passes in sizes]:
        fields = {name: size for name, size in zip(names, given, strict=True) if size is not None}
        try:
            theirs = DeepSpeedConfig(dict(fields))
            expected = (
                theirs.train_batch_size,
                theirs.train_micro_batch_size_per_gpu,
                theirs.gradient_accumulation_steps,
            )
        except AssertionError:
            expected = None
        try:
            batches = config.read(fields, 1).batches
            found = batches.total, batches.micro, batches.passes
        except ValueError:
            found = None
        assert found == expected, fields


TRAINER = """
import json, sys, torch, deepspeed
from tests.support.deepspeed_trainer import STEPS, llama, rows
fields = json.loads(sys.argv[1])
engine, _, _, _ = deepspeed.initialize(model=llama(), config=fields)
losses = []
for step in range(STEPS):
    if step == 2 and len(sys.argv) > 3:
        engine.save_checkpoint(sys.argv[3], client_state={"epoch": 5, "seen": torch.arange(3)})
    for some in rows(step).chunk(engine.gradient_accumulation_steps()):
        loss = engine(input_ids=some, labels=some).loss
        engine.backward(loss)
        engine.step()
    losses.append(float(loss))
with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
    weights = {name: tensor.detach().float().clone() for name, tensor in engine.module.named_parameters()}
torch.save({"losses": losses, "weights": weights, "lr": engine.get_lr(), "steps": engine.global_steps}, sys.argv[2])
"""
ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1, "torch_adam": True}}}
ADAM = {
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "weight_decay": 0.1, "adam_w_mode": False, "torch_adam": True}}
}
WARMUP = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}}}


def port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.mark.parametrize(
    "fields",
    [
        {**ADAMW, "gradient_clipping": 0.0},
        {**ADAMW, **WARMUP, "gradient_accumulation_steps": 2, "gradient_clipping": 0.3},
        {**ADAMW, "zero_optimization": {"stage": 3}},  # clipped by default
        {**ADAM, "zero_optimization": {"stage": 2}, "gradient_clipping": 0.3},
        {**ADAMW, **WARMUP, "zero_optimization": {"stage": 3}, "bf16": {"enabled": True}, "gradient_clipping": 0.3},
    ],
    ids=lambda fields: ",".join(name for name in fields),
)
def test_engines_train_the_same(fields, daemon, tmp_path):
    fields = {"train_batch_size": ROWS, **fields}
    theirs = deepspeeds(fields, tmp_path / "theirs")
    compare(fields, train(fields, daemon), theirs)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_engine_goes_on_from_deepspeeds_checkpoint(stage, daemon, tmp_path):
    fields = {"train_batch_size": ROWS, **ADAMW, **WARMUP, "zero_optimization": {"stage": stage}}
    fields |= {"bf16": {"enabled": True}, "gradient_clipping": 0.3}
    theirs = deepspeeds(fields, tmp_path / "theirs", tmp_path / "saved")
    ours, client_state = train(fields, daemon, tmp_path / "saved")
    assert client_state["epoch"] == 5
    assert client_state["seen"].tolist() == [0, 1, 2]
    compare(fields, ours, {**theirs, "losses": theirs["losses"][2:]})
    again, _ = train(fields, daemon, tmp_path / "saved")  # imported already
    assert again["losses"] == ours["losses"]


def deepspeeds(fields, out, *more):
    """What TRAINER saves."""
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "2"}
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port())}
    done = subprocess.run(
        [sys.executable, "-c", TRAINER, json.dumps(fields), out, *more],
        cwd=ROOT,
        env={**environment, **alone},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(out)


def train(fields, daemon, load=None):
    """The same of ours; with ``load``, which it goes on from, also the client's state."""
    try:
        engine = ours.initialize(model=llama(), config=fields, optimizer_options={"endpoint": daemon.endpoint})[0]
        client_state = engine.load_checkpoint(str(load))[1] if load else None
        losses = []
        for step in range(engine.global_steps, STEPS):
            for some in rows(step).chunk(engine.gradient_accumulation_steps()):
                loss = engine(input_ids=some, labels=some).loss
                engine.backward(loss)
                engine.step()
            losses.append(loss.item())
        weights = {name: tensor.detach().float().clone() for name, tensor in engine.module.named_parameters()}
        made = {"losses": losses, "weights": weights, "lr": engine.get_lr(), "steps": engine.global_steps}
        engine.destroy()
    finally:
        leave()
    return (made, client_state) if load else made


def compare(fields, found, expected):
    assert (found["lr"], found["steps"]) == (expected["lr"], expected["steps"])
    half = "bf16" in fields
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-3 if half else 1e-5)
    for name, tensor in expected["weights"].items():
        # Where masters differ in their last bit, their roundings to bf16 may be neighbours.
        torch.testing.assert_close(found["weights"][name], tensor, rtol=8e-3 if half else 1e-4, atol=2e-5)


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
