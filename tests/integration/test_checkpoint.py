"""Checkpoints: written while training goes on, loadable by stock safetensors, restored bit for bit."""

import json
import os
import pathlib
import threading
import time

import grpc
import pytest
import torch
from safetensors import safe_open

import superoffload.torch
from superoffload._core.error import Error
from superoffload.v1 import optimizer_pb2 as pb

INDEX = "model.safetensors.index.json"


def build(seed=1):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(64, 300), torch.nn.GELU(), torch.nn.Linear(300, 64)).to(torch.bfloat16)


def optimizer_of(model, daemon, name, **arguments):
    arguments = {"lr": 1e-2, "max_grad_norm": 0.05, "bucket_bytes": 16384, **arguments}
    return superoffload.torch.AdamW(model.named_parameters(), endpoint=daemon.endpoint, name=name, **arguments)


def train(model, optimizer, first, last):
    for step in range(first, last):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step)).to(torch.bfloat16)
        ((model(x) - x) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def states_equal(a, b):
    return all(torch.equal(a[name][key], b[name][key]) for name in a for key in a[name])


def read(directory):
    index = json.loads((directory / INDEX).read_text())
    tensors = {}
    for file in set(index["weight_map"].values()):
        with safe_open(directory / file, "pt") as shard:
            tensors.update({name: shard.get_tensor(name) for name in shard.keys()})  # noqa: SIM118
            assert shard.metadata()["committed_steps"] == str(index["metadata"]["committed_steps"])
    assert tensors.keys() == index["weight_map"].keys()
    return index, tensors


def test_stock_safetensors_loads_it_and_a_restored_run_has_the_same_bits(daemon, tmp_path):
    model = build()
    optimizer = optimizer_of(model, daemon, "saved")
    train(model, optimizer, 0, 10)
    assert optimizer.save_checkpoint(tmp_path / "ckpt") == 10
    index, tensors = read(tmp_path / "ckpt")
    for name, state in optimizer.state_tensors().items():
        assert torch.equal(tensors[f"model.{name}"], state["master"])
        assert torch.equal(tensors[f"exp_avg.{name}"], state["exp_avg"])
        assert torch.equal(tensors[f"exp_avg_sq.{name}"], state["exp_avg_sq"])
    assert index["groups"][0]["lr"] == 1e-2
    train(model, optimizer, 10, 20)

    # Another bucket layout, other weights and hyper-parameters: all come from the checkpoint.
    other = build(seed=2)
    restored = optimizer_of(other, daemon, "restored", restore=tmp_path / "ckpt", bucket_bytes=4096, lr=1.0)
    assert restored.param_groups[0]["lr"] == 1e-2
    train(other, restored, 10, 20)
    assert restored.last_result.committed_steps == 20
    assert states_equal(optimizer.state_tensors(), restored.state_tensors())
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))

    # Back in an attached optimizer, then the same way again.
    optimizer.restore_checkpoint(tmp_path / "ckpt")
    train(model, optimizer, 10, 20)
    assert states_equal(optimizer.state_tensors(), restored.state_tensors())


def test_is_of_one_moment_while_training_goes_on(daemon, tmp_path):
    model = build()
    optimizer = optimizer_of(model, daemon, "busy")
    by_step = {}
    done = threading.Event()
    taken = []

    def take():
        client = optimizer_of_control(daemon)
        while not done.is_set():
            directory = tmp_path / f"ckpt-{len(taken)}"
            request = pb.CheckpointOptimizerRequest(name="busy", directory=str(directory))
            taken.append((directory, client.stream("CheckpointOptimizer", request).committed_steps))
        client.close()

    thread = threading.Thread(target=take)
    by_step[0] = optimizer.state_tensors()
    thread.start()
    for step in range(60):
        train(model, optimizer, step, step + 1)
        if step % 3 == 0:
            by_step[step + 1] = None
    done.set()
    thread.join()
    reference_model = build()
    reference = optimizer_of(reference_model, daemon, "reference")
    wanted = {step for _, step in taken}
    assert len(taken) >= 2
    states = {0: reference.state_tensors()}
    for step in range(60):
        train(reference_model, reference, step, step + 1)
        if step + 1 in wanted:
            states[step + 1] = reference.state_tensors()
    assert states_equal(optimizer.state_tensors(), reference.state_tensors())
    for directory, step in taken:
        _, tensors = read(directory)
        for name, state in states[step].items():
            assert torch.equal(tensors[f"model.{name}"], state["master"]), (step, name)
            assert torch.equal(tensors[f"exp_avg_sq.{name}"], state["exp_avg_sq"]), (step, name)


def optimizer_of_control(daemon):
    from superoffload._core.control import Connection

    return Connection(daemon.endpoint)


def test_a_checkpoint_is_not_reached_through_the_daemons_own_files(daemon, tmp_path):
    model = build()
    optimizer = optimizer_of(model, daemon, "reached")
    train(model, optimizer, 0, 3)
    optimizer.save_checkpoint(tmp_path / "ckpt")
    for process in ("self", daemon.process.pid):
        with pytest.raises(Error, match="symbolic links"):
            optimizer.restore_checkpoint(f"/proc/{process}/root{tmp_path}/ckpt")
    (tmp_path / "maps").mkdir()
    (tmp_path / "maps" / INDEX).symlink_to("/proc/self/maps")  # where the daemon's code lies
    with pytest.raises(Error, match="no regular file"):
        optimizer.restore_checkpoint(tmp_path / "maps")
    optimizer.restore_checkpoint(tmp_path / "ckpt")
    train(model, optimizer, 3, 4)
    assert optimizer.committed_steps == 4


def test_schedule_takes_every_nth_step_and_keeps_the_newest(daemon, tmp_path):
    model = build()
    schedule = superoffload.torch.CheckpointSchedule(every_steps=5, directory=str(tmp_path), keep=2)
    optimizer = optimizer_of(model, daemon, "scheduled", checkpoint=schedule)
    for last in (5, 10, 15, 20, 22):  # one that falls due while another is being written is left out
        train(model, optimizer, last - 5 if last <= 20 else 20, last)
        newest = f"step-{last // 5 * 5:08d}"
        wait_for(lambda newest=newest: newest in os.listdir(tmp_path))
    wait_for(lambda: sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000015", "step-00000020"])
    assert read(tmp_path / "step-00000020")[0]["metadata"]["committed_steps"] == 20


def wait_for(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_ranks_of_another_world_size_are_put_together(daemon, tmp_path):
    model = build()
    halves = [build(), build()]
    for rank, half in enumerate(halves):
        names = [name for i, (name, _) in enumerate(half.named_parameters()) if i % 2 != rank]
        for name in names:
            half.get_parameter(name).requires_grad_(False)
        optimizer = optimizer_of(half, daemon, f"rank{rank}")
        train(half, optimizer, 0, 4)
        optimizer.save_checkpoint(tmp_path / f"rank{rank}")
    whole = optimizer_of(model, daemon, "whole", restore=[tmp_path / "rank0", tmp_path / "rank1"])
    for rank in range(2):
        _, tensors = read(tmp_path / f"rank{rank}")
        for name, state in whole.state_tensors().items():
            if f"model.{name}" in tensors:
                assert torch.equal(state["master"], tensors[f"model.{name}"])


def flip(path, offset):
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_a_flipped_bit_is_found_before_the_state_is_touched(daemon, tmp_path):
    model = build()
    optimizer = optimizer_of(model, daemon, "flipped")
    train(model, optimizer, 0, 3)
    optimizer.save_checkpoint(tmp_path / "ckpt")
    train(model, optimizer, 3, 5)
    before = optimizer.state_tensors()
    for path in sorted((tmp_path / "ckpt").glob("*.safetensors")):
        for offset in (3, 40, path.stat().st_size - 1):
            flip(path, offset)
            with pytest.raises(Error) as raised:
                optimizer.restore_checkpoint(tmp_path / "ckpt")
            assert raised.value.code == grpc.StatusCode.DATA_LOSS
            flip(path, offset)
    assert states_equal(optimizer.state_tensors(), before)
    optimizer.restore_checkpoint(tmp_path / "ckpt")


def refused(call, code, words):
    with pytest.raises(Error) as raised:
        call()
    assert raised.value.code == code
    assert words in str(raised.value)


def test_groups_that_were_saved_apart_are_not_restored_as_one(daemon, tmp_path):
    def groups(model, decay):
        named = list(model.named_parameters())
        return [{"params": named[:1], "weight_decay": decay}, {"params": named[1:], "weight_decay": 0.0}]

    for name, decay in (("apart", 0.1), ("alike", 0.0)):
        model = build()
        optimizer = superoffload.torch.AdamW(groups(model, decay), lr=1e-2, endpoint=daemon.endpoint, name=name)
        train(model, optimizer, 0, 2)
        optimizer.save_checkpoint(tmp_path / name)
        optimizer.close()
    one = optimizer_of(build(seed=2), daemon, "one")
    before = one.state_tensors()
    refused(
        lambda: one.restore_checkpoint(tmp_path / "apart"),
        grpc.StatusCode.FAILED_PRECONDITION,
        "are in one group, and the checkpoint has them in two",
    )
    assert states_equal(before, one.state_tensors())
    one.restore_checkpoint(tmp_path / "alike")
    assert one.param_groups[0]["weight_decay"] == 0.0
    one.close()


def test_what_cannot_be_is_refused_with_a_sentence(daemon, tmp_path):
    model = build()
    optimizer = optimizer_of(model, daemon, "refused")
    train(model, optimizer, 0, 1)
    optimizer.save_checkpoint(tmp_path / "ckpt")
    status = grpc.StatusCode
    refused(lambda: optimizer.save_checkpoint(tmp_path / "ckpt"), status.ALREADY_EXISTS, "choose another directory")
    refused(lambda: optimizer.save_checkpoint(tmp_path / "no" / "parent"), status.NOT_FOUND, "No such file")
    refused(lambda: optimizer.restore_checkpoint(tmp_path), status.NOT_FOUND, INDEX)
    control = optimizer_of_control(daemon)
    request = pb.RestoreOptimizerRequest(name="refused", directories=["ckpt"])
    refused(lambda: control.call("RestoreOptimizer", request), status.INVALID_ARGUMENT, "absolute path")
    request = pb.RestoreOptimizerRequest(name="refused", directories=[str(tmp_path / "ckpt")])
    refused(lambda: control.call("RestoreOptimizer", request), status.FAILED_PRECONDITION, "is attached to process")
    control.close()
    bigger = torch.nn.Sequential(*build(), torch.nn.Linear(64, 64)).to(torch.bfloat16)
    refused(
        lambda: optimizer_of(bigger, daemon, "bigger", restore=tmp_path / "ckpt"),
        status.FAILED_PRECONDITION,
        'no tensor "model.3.weight"',
    )
    index = tmp_path / "ckpt" / INDEX
    index.write_text(index.read_text().replace('"version": 3', '"version": 4'))
    refused(lambda: optimizer.restore_checkpoint(tmp_path / "ckpt"), status.FAILED_PRECONDITION, "format version 4")


def test_state_goes_to_torch_and_back(daemon):
    torch.manual_seed(3)
    ours, theirs = (torch.nn.Linear(32, 32) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    a = superoffload.torch.AdamW(ours.parameters(), lr=1e-3, endpoint=daemon.endpoint, name="there")
    b = torch.optim.AdamW(theirs.parameters(), lr=1e-3)

    def step(model, optimizer, seed):
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(seed))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for seed in range(5):
        step(theirs, b, seed)
    with torch.no_grad():
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            mine.copy_(other)
    a.push_params()
    a.load_torch_state_dict(b.state_dict())
    exported = a.torch_state_dict()
    for index, state in b.state_dict()["state"].items():
        for key in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(exported["state"][index][key], state[key])
    for seed in range(5, 10):
        step(ours, a, seed)
        step(theirs, b, seed)
    assert max((p - q).abs().max() for p, q in zip(ours.parameters(), theirs.parameters(), strict=True)) < 1e-6
    again = torch.optim.AdamW(theirs.parameters(), lr=1.0)
    again.load_state_dict(a.torch_state_dict())
    assert again.param_groups[0]["lr"] == 1e-3


def test_a_lease_that_runs_out_deletes_the_optimizer(daemon):
    model = build()
    optimizer = optimizer_of(model, daemon, "leased", lease_seconds=0.3)
    time.sleep(0.5)
    train(model, optimizer, 0, 1)  # attached: it stays
    optimizer.close()
    control = optimizer_of_control(daemon)
    request = pb.ListOptimizersRequest
    assert [o.name for o in control.call("ListOptimizers", request()).optimizers] == ["leased"]
    wait_for(lambda: not control.call("ListOptimizers", request()).optimizers)
    control.close()


def test_is_written_by_hand_with_superoffloadctl(daemon, tmp_path):
    import subprocess

    ctl = pathlib.Path(os.environ["SUPEROFFLOAD_BUILD"]) / "client" / "superoffloadctl"
    model = build()
    optimizer = optimizer_of(model, daemon, "by-hand")
    train(model, optimizer, 0, 2)
    run = lambda *words: subprocess.run(  # noqa: E731
        [ctl, f"--endpoint={daemon.endpoint}", *words], capture_output=True, text=True, cwd=tmp_path
    )
    written = run("checkpoint", "by-hand", "here")
    assert written.returncode == 0, written.stderr
    assert "step 2," in written.stdout
    attached = run("restore", "by-hand", "here")
    assert attached.returncode == 1 and "FAILED_PRECONDITION" in attached.stderr
    before = optimizer.state_tensors()
    train(model, optimizer, 2, 3)
    optimizer.close()
    restored = run("restore", "by-hand", "here")
    assert restored.returncode == 0 and "restored to step 2" in restored.stdout
    again = optimizer_of(model, daemon, "by-hand", sync="pull_params")
    assert states_equal(again.state_tensors(), before)
