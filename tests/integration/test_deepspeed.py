"""superoffload.deepspeed: an engine computes what the configuration says, and goes on from its checkpoints."""

import argparse
import functools
import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch
from tests.support import deepspeed_checkpoints as written
from tests.support import process_group
from tests.support.deepspeed_trainer import ROWS, llama, rows
from tests.support.fake_torch_gpu import fake_gpu, gpu_daemon, nothing_stays  # noqa: F401
from tests.unit.client.python.deepspeed.test_config import published

import superoffload.torch
from superoffload import deepspeed
from superoffload._core.control import Connection
from superoffload._core.error import Error
from superoffload._core.step_result import VerdictKind
from superoffload.torch import cuda
from superoffload.v1 import optimizer_pb2 as pb


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """No test leaves its process group to others."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    yield
    if torch.distributed.is_initialized():
        process_group.leave()


def network(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))


def inputs(step, dtype=torch.float32):
    return torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(step)).to(dtype)


def build(daemon, model, optimizer="AdamW", **fields):
    """An engine of a configuration with these fields; ``optimizer``: the section's type, or the script's own."""
    config = {"train_batch_size": ROWS, "gradient_clipping": 0.0, **fields}
    given = {}
    if isinstance(optimizer, str):
        config["optimizer"] = {"type": optimizer, "params": {"lr": 1e-2}}
    else:
        given["optimizer"] = optimizer
    return deepspeed.initialize(model=model, config=config, optimizer_options={"endpoint": daemon.endpoint}, **given)[0]


def run(engine, steps):
    """Each pass has its part of the step's rows."""
    dtype = next(engine.module.parameters()).dtype
    for step in steps:
        for part in inputs(step, dtype).chunk(engine.gradient_accumulation_steps()):
            engine.backward(engine(part).float().pow(2).mean())
            engine.step()
    return weights(engine.module)


def weights(module):
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def equal(a, b):
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert torch.equal(tensor, b[name]), name


@pytest.mark.parametrize(
    ("states", "options"),
    [
        ({}, {}),
        (
            {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
            {"master_dtype": torch.bfloat16, "state_dtype": torch.bfloat16},
        ),
    ],
)
def test_an_engine_computes_what_a_loop_does(daemon, states, options):
    fields = {"bf16": {"enabled": True, **states}, "gradient_accumulation_steps": 2, "gradient_clipping": 0.1}
    fields["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "warmup_type": "linear"}}
    engine = build(daemon, network(), "Adam", zero_optimization={"stage": 3}, **fields)
    ours = run(engine, range(6))
    assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (6, 12, 6 * ROWS)
    assert engine.optimizer.last_result.kind == VerdictKind.CLIP
    engine.destroy()

    model = network().to(torch.bfloat16)
    optimizer = superoffload.torch.AdamW(
        model.named_parameters(), lr=1e-2, weight_decay=0.0, max_grad_norm=0.1, endpoint=daemon.endpoint, **options
    )  # DeepSpeed's Adam is AdamW, without weight decay
    for step, part in enumerate((0, 0, 1 / 3, 2 / 3, 1, 1)):
        optimizer.param_groups[0]["lr"] = 1e-2 * part
        for half in inputs(step, torch.bfloat16).chunk(2):
            (model(half).float().pow(2).mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    equal(ours, weights(model))
    optimizer.close()


def test_passes_are_summed_in_fp32_where_the_configuration_says_so(daemon):
    halves = {"bf16": {"enabled": True}, "gradient_accumulation_steps": 2}
    engine = build(daemon, network(), data_types={"grad_accum_dtype": "fp32"}, **halves)
    ours = run(engine, range(3))
    engine.destroy()

    model = network().to(torch.bfloat16)
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32
    optimizer = superoffload.torch.AdamW(model.named_parameters(), lr=1e-2, weight_decay=0.0, endpoint=daemon.endpoint)
    for step in range(3):
        halves_of_step = inputs(step, torch.bfloat16).chunk(2)
        losses = [model(half).float().pow(2).mean() / 2 for half in halves_of_step]
        found = [torch.autograd.grad(loss, list(model.parameters())) for loss in losses]
        for parameter, first, second in zip(model.parameters(), *found, strict=True):
            parameter.grad = first.float() + second.float()
        optimizer.step()
    equal(ours, weights(model))
    optimizer.close()
    rounded = build(daemon, network(), **halves)
    assert not torch.equal(run(rounded, range(3))["0.weight"], ours["0.weight"])
    rounded.destroy()


def test_an_engine_answers_as_deepspeeds(daemon):
    engine = build(daemon, network(), bf16={"enabled": True}, gradient_accumulation_steps=2, gradient_clipping=0.5)
    assert engine.get_global_grad_norm() is None
    assert (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()) == (ROWS, ROWS // 2)
    assert (engine.gradient_accumulation_steps(), engine.gradient_clipping()) == (2, 0.5)
    assert (engine.zero_optimization_stage(), engine.zero_optimization()) == (0, False)
    assert (engine.bfloat16_enabled(), engine.fp16_enabled(), engine.loss_scale) == (True, False, 1.0)
    assert (engine.get_lr(), engine.get_mom()) == ([1e-2], [(0.9, 0.999)])
    assert engine.get_sequence_parallel_group() is None
    engine.destroy()


def test_it_is_close_to_torchs_on_fp32(daemon):
    engine = build(daemon, network(), "AdamW", gradient_clipping=0.5)
    ours = run(engine, range(8))
    engine.destroy()
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for step in range(8):
        model(inputs(step)).pow(2).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    for name, tensor in weights(model).items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-5, atol=1e-6)


def test_an_fp16_loss_is_scaled_and_steps_that_overflow_are_skipped(daemon, capfd):
    fp16 = {"enabled": True, "initial_scale_power": 10, "hysteresis": 1, "loss_scale_window": 2}
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 100}}
    engine = build(daemon, network(), fp16=fp16, scheduler=scheduler, gradient_clipping=0.05)
    run(engine, range(2))
    norm, before, rate = engine.get_global_grad_norm(), weights(engine.module), engine.get_lr()
    assert 0 < norm < 100  # of gradients that are not scaled
    engine.backward(engine(inputs(2, torch.float16)).float().pow(2).mean() * float("inf"))
    engine.step()
    assert (engine.skipped_steps, engine.global_steps, engine.loss_scale) == (1, 3, 512.0)
    assert not engine.was_step_applied()
    assert engine.get_lr() == rate
    equal(before, weights(engine.module))
    assert "gradients overflow, the step is skipped; loss scale 1024, then 512" in capfd.readouterr().err
    ours = run(engine, (2, 3, 4, 5))
    assert engine.was_step_applied()
    assert engine.loss_scale == 1024.0
    engine.destroy()

    other = build(
        daemon, network(), fp16={"enabled": True, "loss_scale": 64}, scheduler=scheduler, gradient_clipping=0.05
    )
    for name, tensor in run(other, range(6)).items():  # scales are powers of two
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=2e-3)
    other.destroy()


def test_a_step_that_is_not_finite_in_bf16_is_skipped(daemon):
    engine = build(daemon, network(), bf16={"enabled": True})
    before = weights(engine.module)
    engine.backward(engine(inputs(0, torch.bfloat16)).float().sum() * float("nan"))
    with pytest.warns(RuntimeWarning, match="skipped"):
        engine.step()
    assert (engine.skipped_steps, engine.global_steps) == (1, 1)
    equal(before, weights(engine.module))
    engine.destroy()


def test_backward_past_the_engine_is_refused_where_it_would_be_another(daemon):
    engine = build(daemon, network(), gradient_accumulation_steps=2)
    with pytest.raises(RuntimeError, match=r"call engine.backward\(loss\)"):
        engine(inputs(0)).sum().backward()
    assert all(parameter.grad is None for parameter in engine.module.parameters())
    engine.destroy()
    engine = build(daemon, network())
    engine(inputs(0)).pow(2).mean().backward()
    engine.step()
    ours = weights(engine.module)
    engine.destroy()
    engine = build(daemon, network())
    equal(ours, run(engine, [0]))
    engine.destroy()


def test_a_script_may_count_passes_itself(daemon):
    counted = build(daemon, network(), gradient_accumulation_steps=2)
    expected = run(counted, range(3))
    assert not counted.is_gradient_accumulation_boundary()
    counted.destroy()

    def by_hand(engine):
        for step in range(3):
            for number, part in enumerate(inputs(step).chunk(2)):
                if engine.config.counts_passes:
                    engine.set_gradient_accumulation_boundary(number == 1)
                engine.backward(engine(part).pow(2).mean() / 2, scale_wrt_gas=False)
                if engine.config.counts_passes:
                    engine.step()
            if not engine.config.counts_passes:
                engine.step()
        equal(expected, weights(engine.module))
        assert (engine.global_steps, engine.global_samples) == (3, 3 * ROWS)
        engine.destroy()

    by_hand(build(daemon, network(), gradient_accumulation_steps=2))
    by_hand(build(daemon, network(), gradient_accumulation_steps=2, managed_gradient_accumulation=False))


def test_a_scripts_optimizer_keeps_its_groups_and_its_scheduler(daemon):
    model = network()
    asked = torch.optim.AdamW(
        [
            {"params": [model[0].weight, model[2].weight]},
            {"params": [model[0].bias, model[2].bias], "weight_decay": 0.0},
        ],
        lr=1e-2,
        weight_decay=0.3,
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(asked, lambda step: 1 / (1 + step))
    engine, optimizer, _, same = deepspeed.initialize(
        model=model,
        optimizer=asked,
        lr_scheduler=scheduler,
        config={"train_batch_size": ROWS, "gradient_clipping": 0.0, "bf16": {"enabled": True}},
        optimizer_options={"endpoint": daemon.endpoint},
    )
    assert same is scheduler
    assert isinstance(optimizer, superoffload.torch.AdamW)
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 2]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
    ours = run(engine, range(4))
    assert engine.get_lr() == [1e-2 / 5] * 2
    engine.destroy()

    other = network().to(torch.bfloat16)
    named = dict(other.named_parameters())
    loop = superoffload.torch.AdamW(
        [
            {"params": [(name, named[name]) for name in ("0.weight", "2.weight")]},
            {"params": [(name, named[name]) for name in ("0.bias", "2.bias")], "weight_decay": 0.0},
        ],
        lr=1e-2,
        weight_decay=0.3,
        endpoint=daemon.endpoint,
    )
    for step in range(4):
        for group in loop.param_groups:
            group["lr"] = 1e-2 / (1 + step)
        other(inputs(step, torch.bfloat16)).float().pow(2).mean().backward()
        loop.step()
        loop.zero_grad()
    equal(ours, weights(other))
    loop.close()


def test_functions_make_optimizers_and_schedulers(daemon):
    lion = functools.partial(superoffload.torch.Lion, lr=1e-3, endpoint=daemon.endpoint)
    engine, _, _, scheduler = deepspeed.initialize(
        model=network(),
        optimizer=lion,
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
        config={"train_batch_size": ROWS, "bf16": {"enabled": True}},
    )
    assert isinstance(engine.optimizer, superoffload.torch.Lion)
    assert engine.optimizer.max_grad_norm == 1.0  # DeepSpeed's default
    run(engine, range(2))
    assert scheduler.get_last_lr() == [2.5e-4]
    engine.destroy()
    engine = build(daemon, network(), lambda parameters: torch.optim.Adam(parameters, lr=1e-3))
    assert type(engine.optimizer) is superoffload.torch.Adam
    engine.destroy()
    model = network()
    for given in (model[2].parameters(), [{"params": [model[2].weight, model[2].bias], "weight_decay": 0.5}]):
        engine, optimizer, _, _ = deepspeed.initialize(
            model=model,
            optimizer=lion,
            model_parameters=given,
            config={"train_batch_size": ROWS, "gradient_clipping": 1.0},
        )
        assert optimizer.hosted_parameters() == [model[2].weight, model[2].bias]
        engine.destroy()
    assert optimizer.param_groups[0]["weight_decay"] == 0.5


def test_optimizers_that_do_not_fit_are_refused(daemon):
    model = network()
    used = torch.optim.AdamW(model.parameters())
    model(inputs(0)).sum().backward()
    used.step()
    other = torch.optim.AdamW(network().parameters())
    ours = superoffload.torch.AdamW(model.named_parameters(), endpoint=daemon.endpoint, max_grad_norm=2.0)
    for optimizer, fields, match in [
        (torch.optim.SGD(model.parameters(), lr=1.0), {}, "torch.optim.sgd.SGD: it has no counterpart; give torch"),
        (torch.optim.AdamW(model.parameters(), amsgrad=True), {}, "amsgrad"),
        (used, {}, "has made steps already"),
        (other, {}, "that is not of the model"),
        (ours, {"bf16": {"enabled": True}}, "was built on parameters in torch.float32"),
        (lambda parameters: None, {}, "which is no torch.optim.Optimizer"),
        ("SGD", {}, "optimizer.type is 'SGD'"),
        ("Muon", {}, "must be Adam, AdamW or Lion"),
    ]:
        with pytest.raises((ValueError, Error), match=match):
            build(daemon, model, optimizer, **fields)
    model = network()
    ours.close()
    ours = superoffload.torch.AdamW(model.named_parameters(), endpoint=daemon.endpoint, max_grad_norm=2.0)
    with pytest.raises(ValueError, match=r"max_grad_norm=2.0, and gradient_clipping is 0.0"):
        build(daemon, model, ours)
    ours.max_grad_norm = None
    build(daemon, model, ours, gradient_clipping=3.0)
    assert ours.max_grad_norm == 3.0
    ours.close()
    make = functools.partial(superoffload.torch.AdamW, endpoint=daemon.endpoint)
    with pytest.raises(ValueError, match=r"build the optimizer with master_dtype=torch.bfloat16"):
        build(daemon, network(), make, bf16={"enabled": True, "bf16_master_weights_and_grads": True})
    with pytest.raises(ValueError, match="has no optimizer section, and no optimizer= was given"):
        deepspeed.initialize(model=network(), config={"train_batch_size": ROWS})
    with pytest.raises(ValueError, match="mpu= and mesh_param= have no counterpart"):
        deepspeed.initialize(model=network(), config={"train_batch_size": ROWS}, mpu=object())


def test_a_run_goes_on_from_its_checkpoint(daemon, tmp_path):
    fields = {"fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 3, "hysteresis": 1}}
    fields["scheduler"] = {"type": "WarmupDecayLR", "params": {"total_num_steps": 12, "warmup_num_steps": 4}}
    whole = build(daemon, network(), **fields)
    run(whole, range(5))
    whole.save_checkpoint(str(tmp_path), client_state={"epoch": 7})
    expected = run(whole, range(5, 12))
    scale = whole.loss_scale
    whole.destroy()
    engine = build(daemon, network(seed=1), **fields)
    path, client_state = engine.load_checkpoint(str(tmp_path))
    assert (path, client_state) == (str(tmp_path / "global_step5"), {"epoch": 7})
    assert (engine.global_steps, engine.global_samples) == (5, 5 * ROWS)
    equal(expected, run(engine, range(5, 12)))
    assert engine.loss_scale == scale
    engine.destroy()


def test_an_optimizer_that_the_daemon_has_goes_on_at_its_step(daemon):
    def make(seed, **options):
        return deepspeed.initialize(
            model=network(seed),
            config={
                "train_batch_size": ROWS,
                "gradient_clipping": 0.0,
                "bf16": {"enabled": True},
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
                "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 6}},
            },
            optimizer_options={"endpoint": daemon.endpoint, **options},
        )[0]

    whole = make(0)
    expected = run(whole, range(8))
    whole.destroy()
    first = make(0, name="kept")
    run(first, range(3))
    first.destroy()
    second = make(1, name="kept", sync="pull_params")
    assert (second.global_steps, second.micro_steps, second.global_samples) == (3, 3, 3 * ROWS)
    equal(expected, run(second, range(3, 8)))
    second.optimizer.delete()


def test_frozen_parameters_and_buffers_are_in_checkpoints(daemon, tmp_path):
    def make(seed):
        model = torch.nn.Sequential(network(seed), torch.nn.BatchNorm1d(4))
        model[0][0].weight.requires_grad_(False)
        return model

    engine = build(daemon, make(0))
    expected = run(engine, range(3))
    engine.save_checkpoint(str(tmp_path), tag="all")
    engine.save_checkpoint(str(tmp_path), tag="without", exclude_frozen_parameters=True, save_latest=False)
    engine.destroy()
    engine = build(daemon, make(1))
    frozen = engine.module[0][0].weight.clone()
    engine.load_checkpoint(str(tmp_path), tag="without")
    assert torch.equal(engine.module[0][0].weight, frozen)
    engine.load_checkpoint(str(tmp_path))
    equal(expected, weights(engine.module))
    engine.destroy()
    engine = build(daemon, network(seed=1))
    with pytest.raises(ValueError, match="does not exist|is no directory"):
        engine.load_checkpoint(str(tmp_path), tag="none")
    with pytest.warns(RuntimeWarning, match="has no checkpoint"):
        assert engine.load_checkpoint(str(tmp_path / "nothing")) == (None, None)
    engine.destroy()


def test_weights_alone_are_loaded(daemon, tmp_path):
    engine = build(daemon, network(), bf16={"enabled": True})
    expected = run(engine, range(3))
    engine.save_checkpoint(str(tmp_path))
    masters = {name: arrays["master"].clone() for name, arrays in engine.optimizer.state_tensors().items()}
    run(engine, range(3, 5))
    engine.load_checkpoint(str(tmp_path), load_module_only=True)
    assert engine.global_steps == 5
    equal(expected, weights(engine.module))
    for name, arrays in engine.optimizer.state_tensors().items():
        assert torch.equal(arrays["master"], masters[name])
        assert not arrays["exp_avg"].any()
    assert engine.optimizer.committed_steps == 0
    engine.destroy()


def test_a_checkpoint_of_an_optimizer_alone_is_loaded(daemon, tmp_path):
    fields = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 9}}}
    engine = build(daemon, network(), **fields)
    run(engine, range(3))
    engine.optimizer.save_checkpoint(tmp_path / "alone")
    expected = run(engine, range(3, 6))
    engine.destroy()
    engine = build(daemon, network(seed=1), **fields)
    assert engine.load_checkpoint(str(tmp_path / "alone")) == (str(tmp_path / "alone"), {})
    assert engine.global_steps == 3
    equal(expected, run(engine, range(3, 6)))
    engine.destroy()


def test_a_checkpoint_of_deepspeeds_own_is_imported_once(daemon, tmp_path, capfd):
    model = network(seed=1)
    model.register_buffer("buffer", torch.zeros(3))
    made = written.make([{name: tuple(parameter.shape) for name, parameter in model.named_parameters()}])
    written.write_stage_3(tmp_path / "global_step7", made, 2)
    (tmp_path / "latest").write_text("global_step7")
    states = tmp_path / "global_step7" / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    more = {"epoch": 5, "seen": torch.arange(3), "lr_scheduler": {"last_batch_iteration": 6}, "skipped_steps": 2}
    written.save(states, written.load(states) | more)
    engine = build(daemon, model, scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 9}})
    with pytest.warns(RuntimeWarning, match="has objects of other classes as args"):
        path, client_state = engine.load_checkpoint(str(tmp_path))
    assert path == str(tmp_path / "global_step7")
    assert client_state.keys() == {"epoch", "seen"}
    assert client_state["seen"].tolist() == [0, 1, 2]
    assert (engine.global_steps, engine.skipped_steps, engine.optimizer.committed_steps) == (7, 2, 7)
    assert engine.lr_scheduler.last_batch_iteration == 6
    assert engine.get_lr() == engine.lr_scheduler.get_lr()
    assert model.buffer.tolist() == [1, 1, 1]
    for name, arrays in engine.optimizer.state_tensors().items():
        assert torch.equal(arrays["master"], made.tensors[f"model.{name}"])
    assert "is DeepSpeed's, and was imported as" in capfd.readouterr().err
    engine.load_checkpoint(str(tmp_path))
    assert "imported" not in capfd.readouterr().err
    engine.destroy()


def test_a_model_is_saved_as_deepspeed_would(daemon, tmp_path, capfd):
    engine = build(daemon, network(), bf16={"enabled": True}, zero_optimization={"stage": 3})
    assert not engine.save_16bit_model(str(tmp_path / "no"))
    assert "stage3_gather_16bit_weights_on_model_save is not true" in capfd.readouterr().err
    assert not (tmp_path / "no").exists()
    engine.destroy()
    zero = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}
    engine = build(daemon, network(), bf16={"enabled": True}, zero_optimization=zero)
    run(engine, [0])
    assert engine.save_16bit_model(str(tmp_path))
    equal(torch.load(tmp_path / "pytorch_model.bin"), weights(engine.module))
    engine.destroy()


SAVER = """
import sys, torch
from tests.integration import test_deepspeed as t
class Daemon: endpoint = sys.argv[1]
engine = t.build(Daemon, t.network(), bf16={"enabled": True})
for step in range(10 ** 6):
    t.run(engine, [step])
    engine.save_checkpoint(sys.argv[2], tag="best", client_state={"step": step})
    print(step, flush=True)
"""


def test_a_checkpoint_is_whole_whenever_the_one_who_saves_it_is_killed(daemon, tmp_path):
    seed = random.randrange(1 << 30)
    print("seed", seed)
    chance = random.Random(seed)
    reference = build(daemon, network(), bf16={"enabled": True})
    expected, done = [], 0
    for attempt in range(6):
        words = [sys.executable, "-c", SAVER, daemon.endpoint, str(tmp_path / str(attempt))]
        saver = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        seen = -1
        while seen < attempt:
            seen = int(saver.stdout.readline())
        time.sleep(chance.random() * 0.03)
        saver.send_signal(signal.SIGKILL)
        saver.communicate()
        engine = build(daemon, network(seed=1), bf16={"enabled": True})
        _, client_state = engine.load_checkpoint(str(tmp_path / str(attempt)), tag="best")
        step = client_state["step"]
        assert step >= seen
        assert engine.global_steps == step + 1
        while done <= step:
            expected.append(run(reference, [done]))
            done += 1
        equal(expected[step], weights(engine.module))
        engine.destroy()
    reference.destroy()


@pytest.mark.parametrize("mode", ["superoffload", "zerooffload"])
def test_a_script_of_the_published_examples_runs(daemon, tmp_path, mode, capfd):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(published("llama-8b", mode)))
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(path)])
    data = [{"input_ids": row, "labels": row} for step in range(3) for row in rows(step)]
    model = llama()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with pytest.warns(RuntimeWarning, match="clipped to a norm of 1.0, since gradient_clipping is not there"):
        engine, optimizer, loader, scheduler = deepspeed.initialize(
            args=args,
            model=model,
            optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0),
            training_data=data,
            collate_fn=lambda some: {name: torch.stack([each[name] for each in some]) for name in some[0]},
            optimizer_options={"endpoint": daemon.endpoint},
        )
    assert scheduler is None
    assert deepspeed.comm.get_rank() == 0
    engine.train()
    losses = []
    for batch in loader:
        assert batch["input_ids"].shape[0] == 4
        loss = engine(**{name: tensor.to(engine.device) for name, tensor in batch.items()}).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    assert "time of step 3: forward" in capfd.readouterr().err
    assert optimizer.committed_steps == 3
    engine.destroy()


PRIVATE = """
import os, torch
from superoffload import deepspeed
from superoffload._core.control import Connection
from superoffload._core.daemon import resolve_endpoint
offload = {"device": "cpu", "cpuadam_cores_perc": 0.5}
config = {"train_batch_size": 4, "zero_optimization": {"stage": 3, "offload_optimizer": offload}}
config["optimizer"] = {"type": "AdamW"}
deepspeed.initialize(model=torch.nn.Linear(4, 4), config=config)
print(Connection(resolve_endpoint(None)).server_info.worker_threads, len(os.sched_getaffinity(0)))
"""


def test_a_private_daemon_works_on_a_part_of_the_cores(tmp_path, monkeypatch):
    for name in ("SUPEROFFLOAD_ENDPOINT", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    done = subprocess.run([sys.executable, "-c", PRIVATE], capture_output=True, text=True, cwd=tmp_path)
    workers, cores = map(int, done.stdout.split())
    assert workers == max(1, round(0.5 * cores)), done.stderr


def test_on_a_gpu_parameters_stream_and_a_share_of_the_states_stays(gpu_daemon, nothing_stays, monkeypatch):  # noqa: F811
    monkeypatch.setattr(cuda, "of_rank", lambda local: torch.device("cpu"))
    offload = {"device": "cpu", "ratio": 0.5}

    def trained(zero, **fields):
        model = llama()
        options = {"endpoint": gpu_daemon.endpoint, "bucket_bytes": 4096}
        config = {
            "train_batch_size": ROWS,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 3, **zero},
            **fields,
        }
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3}}
        engine = deepspeed.initialize(model=model, config=config, optimizer_options=options)[0]
        for step in range(3):
            for some in rows(step).chunk(engine.gradient_accumulation_steps()):
                engine.backward(engine(input_ids=some, labels=some).loss)
                engine.step()
        engine.optimizer.synchronize()
        found = weights(engine.module)
        connection = Connection(gpu_daemon.endpoint)
        use = connection.call("GetOptimizer", pb.GetOptimizerRequest(name=engine.optimizer.name)).gpu
        connection.close()
        engine.destroy()
        return found, use

    plain, use = trained({"offload_optimizer": {"device": "cpu", "ratio": 1.0}})
    assert (use.resident_buckets, use.streamed_units) == (0, 0)
    half, use = trained({"offload_optimizer": offload})
    assert use.resident_buckets > 1
    equal(plain, half)
    with pytest.warns(RuntimeWarning, match="ratio .the GPU keeps no state of parameters that stream"):
        streamed, use = trained({"offload_optimizer": offload, "offload_param": {"device": "cpu"}})
    assert use.streamed_units == 2
    equal(plain, streamed)
    in_passes, _ = trained({"offload_optimizer": offload}, gradient_accumulation_steps=2)
    sums = {"gradient_accumulation_steps": 2, "data_types": {"grad_accum_dtype": "fp32"}}
    in_fp32, _ = trained({"offload_optimizer": offload}, **sums)
    for name, tensor in in_passes.items():  # means of halves are added in bf16
        assert (tensor.float() - plain[name].float()).abs().mean() < 3e-4, name
    monkeypatch.setattr(cuda, "of_rank", lambda local: None)
    on_cpu, _ = trained({}, **sums)
    equal(on_cpu, in_fp32)
