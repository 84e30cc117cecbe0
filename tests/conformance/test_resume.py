"""Loops that save and resume as people write them: the weights are bit for bit those of a run in one piece."""

import collections.abc
import copy
import gc
import io
import os
import pickle
import shutil
import subprocess
import sys
import textwrap
import threading

import grpc
import pytest
import torch

import superoffload.torch

CLIP = 0.05


def build(seed=1, dtype=torch.float32):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(16, 40), torch.nn.GELU(), torch.nn.Linear(40, 16))
    return model.to(dtype)


def optimizer_of(model, **options):
    options = {"lr": 1e-2, "max_grad_norm": CLIP, "bucket_bytes": 4096, **options}
    return superoffload.torch.AdamW(model.parameters(), **options)


def train(model, optimizer, first, last, scheduler=None):
    for step in range(first, last):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step)).to(next(model.parameters()).dtype)
        ((model(x) - x) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()


def weights(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def identical(ours, theirs):
    return all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))


def run(first, last, saved=None, dtype=torch.float32, **options):
    """Model and optimizer after training, from a checkpoint's dict if there is one."""
    model = build(seed=1 if saved is None else 2, dtype=dtype)
    optimizer = optimizer_of(model, **options)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30)
    if saved is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
    train(model, optimizer, first, last, scheduler)
    return model, optimizer, scheduler


def checkpoint(model, optimizer, scheduler):
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("directory", [False, True], ids=["in-the-file", "in-a-directory"])
def test_a_dict_saved_with_torch_save_resumes_in_a_run_that_knows_nothing_else(tmp_path, directory, dtype):
    whole, *_ = run(0, 20, dtype=dtype)
    model, optimizer, scheduler = run(0, 10, dtype=dtype, state_directory=tmp_path / "state" if directory else None)
    torch.save(checkpoint(model, optimizer, scheduler), tmp_path / "last.ckpt")
    train(model, optimizer, 10, 13)  # the daemon goes on, and then it is gone
    optimizer.close()
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert ("state" in saved["optimizer"]["superoffload"]) is not directory
    resumed, optimizer, _ = run(10, 20, saved, dtype=dtype)
    assert identical(weights(resumed), weights(whole))
    assert optimizer.last_result.committed_steps == 20


def test_goes_back_and_forth_between_checkpoints(tmp_path):
    whole, *_ = run(0, 20)
    model, optimizer, scheduler = run(0, 5)
    saved = {}
    for step in (5, 10, 15):
        torch.save(checkpoint(model, optimizer, scheduler), tmp_path / f"{step}.pt")
        saved[step] = weights(model)
        train(model, optimizer, step, step + 5, scheduler)
    for step in (15, 5, 10):
        state = torch.load(tmp_path / f"{step}.pt", weights_only=True)
        optimizer.load_state_dict(state["optimizer"])
        assert identical(weights(model), saved[step])
        scheduler.load_state_dict(state["scheduler"])
        train(model, optimizer, step, 20, scheduler)
        assert identical(weights(model), weights(whole)), step


def test_one_number_of_steps_on_two_ways_are_two_moments():
    model, optimizer, _ = run(0, 5)
    early = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, 5, 10)
    late, then = copy.deepcopy(optimizer.state_dict()), weights(model)
    optimizer.load_state_dict(early)
    train(model, optimizer, 100, 105)
    assert not identical(weights(model), then)
    optimizer.load_state_dict(late)
    assert identical(weights(model), then)


@pytest.mark.parametrize("name", [None, "run"])
def test_an_optimizer_with_a_name_goes_back_too(daemon, tmp_path, name):
    model, optimizer, scheduler = run(0, 5, endpoint=daemon.endpoint, name=name)
    torch.save(checkpoint(model, optimizer, scheduler), tmp_path / "5.pt")
    train(model, optimizer, 5, 8)
    optimizer.close()
    saved = torch.load(tmp_path / "5.pt", weights_only=True)
    resumed, _, _ = run(5, 10, saved, endpoint=daemon.endpoint, name=name, sync="pull_params")
    whole, *_ = run(0, 10)
    assert identical(weights(resumed), weights(whole))


def test_a_loop_goes_on_at_the_committed_steps(daemon, tmp_path):
    code = """
        import os, sys
        from tests.conformance.test_resume import build, optimizer_of, train
        model = build()
        optimizer = optimizer_of(model, endpoint=sys.argv[1], name="killed")
        train(model, optimizer, 0, 4)
        optimizer.save_checkpoint(sys.argv[2])
        train(model, optimizer, 4, 7)
        os._exit(1)
    """
    words = [daemon.endpoint, str(tmp_path / "4")]
    assert subprocess.run([sys.executable, "-c", textwrap.dedent(code), *words]).returncode == 1
    whole = build()
    train(whole, optimizer_of(whole), 0, 10)
    model = build(seed=2)
    optimizer = optimizer_of(model, endpoint=daemon.endpoint, name="killed", sync="pull_params")
    assert (optimizer.last_result, optimizer.committed_steps) == (None, 7)
    train(model, optimizer, optimizer.committed_steps, 10)
    assert identical(weights(model), weights(whole)) and optimizer.committed_steps == 10
    optimizer.restore_checkpoint(tmp_path / "4")
    assert (optimizer.last_result, optimizer.committed_steps) == (None, 4)
    train(model, optimizer, optimizer.committed_steps, 10)
    assert identical(weights(model), weights(whole))
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, torch.nan)
    optimizer.step()
    assert optimizer.last_result.kind.skipped and optimizer.committed_steps == 10
    optimizer.close()
    copied = build(seed=3)
    optimizer = optimizer_of(copied, endpoint=daemon.endpoint, restore=tmp_path / "4")
    assert optimizer.committed_steps == 4


def test_state_dict_and_loading_the_present_moment_are_free(daemon, monkeypatch):
    model, optimizer, _ = run(0, 3, endpoint=daemon.endpoint)
    calls = []
    call, stream = optimizer._hosting.connection.call, optimizer._hosting.connection.stream
    monkeypatch.setattr(optimizer._hosting.connection, "call", lambda *a: calls.append(a) or call(*a))
    monkeypatch.setattr(optimizer._hosting.connection, "stream", lambda *a: calls.append(a) or stream(*a))
    optimizer.load_state_dict(optimizer.state_dict())
    assert not calls
    pickled = pickle.dumps(optimizer.state_dict())
    calls.clear()
    optimizer.load_state_dict(pickle.loads(pickled))
    assert not calls
    train(model, optimizer, 3, 6)


def test_a_moment_that_nobody_saved_is_refused():
    model, optimizer, _ = run(0, 3)
    state = optimizer.state_dict()
    train(model, optimizer, 3, 4)
    with pytest.raises(superoffload.Error, match="deepcopy") as raised:
        optimizer.load_state_dict(state)
    assert raised.value.code == grpc.StatusCode.FAILED_PRECONDITION
    with pytest.raises(superoffload.Error, match="has gone on"):
        torch.save(state, io.BytesIO())


def test_a_moment_is_not_pickled_by_another_thread_while_training_may_go_on():
    _, optimizer, _ = run(0, 2)
    state, errors = optimizer.state_dict(), []

    def save():
        try:
            torch.save(state, io.BytesIO())
        except superoffload.Error as error:
            errors.append(error)

    thread = threading.Thread(target=save)
    thread.start()
    thread.join()
    assert "training thread" in str(errors[0])


def test_a_directory_that_moved_is_found_beside_its_file_or_named_in_the_error(tmp_path):
    model, optimizer, _ = run(0, 5, state_directory=tmp_path / "a")
    (tmp_path / "a").mkdir()
    torch.save(optimizer.state_dict(), tmp_path / "a" / "optimizer.pt")
    then = weights(model)
    train(model, optimizer, 5, 7)
    os.rename(tmp_path / "a", tmp_path / "b")
    state = torch.load(tmp_path / "b" / "optimizer.pt", weights_only=True)
    with pytest.raises(superoffload.Error, match="state_directory="):
        optimizer.load_state_dict(state)

    def resume(path):
        optimizer.load_state_dict(torch.load(path, weights_only=True))

    resume(tmp_path / "b" / "optimizer.pt")
    assert identical(weights(model), then)


def test_state_is_looked_at_as_in_torch_and_not_rebuilt_by_whoever_moves_it():
    """Lightning rebuilds each Mapping in optimizer.state at the end of fit(), all its tensors included."""
    model = torch.nn.Linear(4, 4)
    optimizer = superoffload.torch.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    state = optimizer.state[model.weight]
    assert not isinstance(state, collections.abc.Mapping)
    assert set(state) == set(state.keys()) == {"step", "exp_avg", "exp_avg_sq", "master"} and len(state) == 4
    assert "exp_avg" in state and "momentum_buffer" not in state and state.get("momentum_buffer") is None
    assert {key: tensor.shape for key, tensor in state.items()}["master"] == model.weight.shape
    assert len(list(state.values())) == 4 and state["step"] == 1


def test_torch_optim_state_loads_and_the_models_weights_stay():
    model, theirs = build(), build()
    torch_optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    train(theirs, torch_optimizer, 0, 5)
    model.load_state_dict(theirs.state_dict())
    optimizer = optimizer_of(model, max_grad_norm=None)
    optimizer.load_state_dict(torch_optimizer.state_dict())  # the weights that it finds become the masters
    assert identical(weights(model), weights(theirs))
    moments = optimizer.state[model[0].weight]["exp_avg"]
    assert torch.equal(moments, torch_optimizer.state[theirs[0].weight]["exp_avg"])
    train(model, optimizer, 5, 10)
    train(theirs, torch_optimizer, 5, 10)
    assert all((p - q).abs().max() < 1e-6 for p, q in zip(weights(model), weights(theirs), strict=True))


def test_accelerate_saves_into_its_directory_and_loads(tmp_path):
    from accelerate import Accelerator

    def start(seed):
        model = build(seed)
        accelerator = Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(model, optimizer_of(model))
        return accelerator, model, optimizer

    accelerator, model, optimizer = start(1)
    train(model, optimizer, 0, 5)
    accelerator.save_state(str(tmp_path / "five"))
    train(model, optimizer, 5, 10)
    then = weights(model)
    (written,) = (tmp_path / "five").glob("*.superoffload-*")
    assert (tmp_path / "five" / "optimizer.bin").stat().st_size < 10_000
    accelerator.save_state(str(tmp_path / "five-and-five"))
    optimizer.optimizer.close()
    os.rename(tmp_path / "five", tmp_path / "moved")
    accelerator, model, optimizer = start(2)
    accelerator.load_state(str(tmp_path / "moved"))
    train(model, optimizer, 5, 10)
    assert identical(weights(model), then)


def trainer_of(tmp_path, steps, **arguments):
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
        )
    )
    tokens = torch.randint(0, 64, (64, 8), generator=torch.Generator().manual_seed(3))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    optimizer = superoffload.torch.AdamW(model.parameters(), lr=1e-2)
    training = TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=4,
        max_steps=steps,
        max_grad_norm=0.5,
        save_steps=4,
        save_total_limit=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **arguments,
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return Trainer(model=model, args=training, train_dataset=data, optimizers=(optimizer, scheduler))


def test_the_hugging_face_trainer_resumes_and_its_rotation_deletes_the_state(tmp_path):
    trainer = trainer_of(tmp_path, 12)
    trainer.train()
    then = weights(trainer.model)
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-12", "checkpoint-8"]
    assert len(list(tmp_path.glob("checkpoint-8/optimizer.pt.superoffload-*"))) == 1
    del trainer
    gc.collect()
    shutil.rmtree(tmp_path / "checkpoint-12")
    trainer = trainer_of(tmp_path, 12)
    trainer.train(resume_from_checkpoint=True)
    assert identical(weights(trainer.model), then)
    assert len(list(tmp_path.glob("checkpoint-*/*.superoffload-*"))) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"flatten_optimizer_state_dict": True}, {"full_state_dict": True}], ids=str)
def test_torch_distributed_checkpoint_saves_and_loads_the_state(tmp_path, options, dtype):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

    options = StateDictOptions(**options)
    model = build(dtype=dtype)
    optimizer = optimizer_of(model)
    train(model, optimizer, 0, 5)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
    assert optimizer.last_result.committed_steps == 5
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=tmp_path)
    train(model, optimizer, 5, 10)
    other = build(seed=2, dtype=dtype)
    resumed = optimizer_of(other)
    model_state, optimizer_state = get_state_dict(other, resumed, options=options)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=tmp_path)
    set_state_dict(other, resumed, model_state_dict=model_state, optim_state_dict=optimizer_state, options=options)
    train(other, resumed, 5, 10)
    assert resumed.last_result.committed_steps == 10
    assert identical(weights(other), weights(model))
