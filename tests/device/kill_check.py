"""Trainers and daemons are killed while a model trains on the GPU; its weights are those of an undisturbed host run.

Gradients do not depend on parameters, so that the GPU's and the host's are the same; parameters depend on every step.
"""

import contextlib
import os
import pathlib
import random
import signal
import tempfile
import time

import grpc
import torch
from tests.device import machine

import superoffload
import superoffload.torch
from superoffload._core.control import Connection
from superoffload.torch import GpuOptions
from superoffload.v1 import optimizer_pb2

NAME = "killed"
STEPS = 20 if machine.DRY_RUN else 60
KILLS = 2 if machine.DRY_RUN else 3
SHAPES = [(300, 129), (5,), (512, 64), (200, 77)] if machine.DRY_RUN else [(1000, 1290), (5,), (512, 640), (2000, 77)]
BUCKET_BYTES = 1 << 14 if machine.DRY_RUN else 1 << 20
POLL_SECONDS = 0.01
GRADIENT_SLOTS = {"trainer": "in_place", "daemon": 1, "direct": "auto"}  # by mover


def gpu_options(mover: str) -> GpuOptions:
    return GpuOptions(mover=mover, resident_buckets=1, gradient_slots=GRADIENT_SLOTS[mover])


def build(device: str) -> torch.nn.ParameterList:
    generator = torch.Generator().manual_seed(3)
    tensors = [torch.randn(shape, generator=generator).to(torch.bfloat16).to(device) for shape in SHAPES]
    return torch.nn.ParameterList(torch.nn.Parameter(tensor) for tensor in tensors)


def optimizer_of(model: torch.nn.ParameterList, **options) -> superoffload.torch.AdamW:
    return superoffload.torch.AdamW(
        model.named_parameters(), lr=1e-2, max_grad_norm=100.0, bucket_bytes=BUCKET_BYTES, **options
    )


def backward(model: torch.nn.ParameterList, step: int, micro_batch: int) -> None:
    """The factors are the step's, whoever computes it when."""
    generator = torch.Generator().manual_seed(2 * step + micro_batch)
    for parameter in model:
        factor = torch.randn(parameter.shape, generator=generator).to(parameter.dtype).to(parameter.device)
        (parameter * factor).sum().backward()


def train(model: torch.nn.ParameterList, optimizer: superoffload.torch.AdamW, first: int) -> None:
    for step in range(first, STEPS):
        for micro_batch in range(2):
            backward(model, step, micro_batch)
        optimizer.step()
        optimizer.zero_grad()


def weights(model: torch.nn.ParameterList, optimizer: superoffload.torch.AdamW) -> list[torch.Tensor]:
    optimizer.synchronize()
    return [parameter.detach().cpu().clone() for parameter in model]


def on_the_host() -> list[torch.Tensor]:
    model = build("cpu")
    optimizer = optimizer_of(model)
    train(model, optimizer, 0)
    result = weights(model, optimizer)
    optimizer.close()
    return result


def require_same(expected: list[torch.Tensor], actual: list[torch.Tensor], kills: int) -> dict[str, int]:
    different = sum(not torch.equal(a, b) for a, b in zip(expected, actual, strict=True))
    print(f"kills={kills} mismatches={different}")
    if different:
        raise AssertionError(f"{different} of {len(expected)} tensors have other bits after {kills} kills")
    if kills == 0:
        raise AssertionError("nothing was killed: it ended too soon")
    return {"kills": kills}


def committed_steps(connection: Connection) -> int:
    try:
        return connection.call_again("GetOptimizer", optimizer_pb2.GetOptimizerRequest(name=NAME)).committed_steps
    except superoffload.Error as error:
        if error.code != grpc.StatusCode.NOT_FOUND:
            raise
        return 0


def trainer(mover: str, go: int, to: pathlib.Path) -> None:
    """Trains from the step at which the one before it died."""
    os.read(go, 1)
    machine.use_gpu()
    model = build(machine.DEVICE)
    optimizer = optimizer_of(model, name=NAME, sync="pull_params", gpu=gpu_options(mover))
    first = committed_steps(Connection(os.environ["SUPEROFFLOAD_ENDPOINT"]))  # now that the one before it is gone
    print(f"trains from step {first}")
    train(model, optimizer, first)
    torch.save(weights(model, optimizer), to)
    os.replace(to, to.with_suffix(".whole"))
    optimizer.close()


def fork_trainer(mover: str, to: pathlib.Path) -> tuple[int, int]:
    """Its pid, and what it is started with. Forked before this process has a GPU or gRPC."""
    go, started = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(started)
        code = 1
        try:
            trainer(mover, go, to)
            code = 0
        finally:
            if code:
                import traceback

                traceback.print_exc()
            os._exit(code)
    os.close(go)
    return pid, started


def kill_each(waiting: list[tuple[int, int]], dice: random.Random) -> int:
    """Starts one trainer after the other and kills all but the last; returns how many were killed."""
    connection = Connection(os.environ["SUPEROFFLOAD_ENDPOINT"])
    kills = 0
    for number, (pid, started) in enumerate(waiting):
        os.write(started, b"!")
        goal = (number + 1) * STEPS // (KILLS + 1) if number < KILLS else STEPS + 1
        ended, status = 0, 0
        while not ended and committed_steps(connection) < goal:
            time.sleep(POLL_SECONDS)
            ended, status = os.waitpid(pid, os.WNOHANG)
        if not ended:
            time.sleep(dice.uniform(0, POLL_SECONDS))
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            kills += 1
        elif status != 0:
            raise RuntimeError(f"a trainer ended by itself, with status {status}")
    return kills


def kill_trainers(mover: str) -> dict[str, int]:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    with machine.daemon(1 << 30), tempfile.TemporaryDirectory() as directory:
        to = pathlib.Path(directory) / "weights"
        waiting = [fork_trainer(mover, to) for _ in range(KILLS + 1)]
        try:
            expected = on_the_host()
            kills = kill_each(waiting, random.Random(seed))
        except BaseException:
            for pid, _ in waiting:  # the daemon ends when nobody has its standard input open any more
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            raise
        return require_same(expected, torch.load(to.with_suffix(".whole")), kills)


def kill_daemons(mover: str) -> dict[str, int]:
    with machine.daemon(1 << 30, "--keeper") as keeper:
        expected = on_the_host()
        machine.use_gpu()
        model = build(machine.DEVICE)
        optimizer = optimizer_of(model, name=NAME, gpu=gpu_options(mover))
        children = pathlib.Path(f"/proc/{keeper.pid}/task/{keeper.pid}/children")
        at = {(number + 1) * STEPS // (KILLS + 1): (number % 2, number) for number in range(KILLS)}
        kills = 0
        step = 0
        while step < STEPS:
            try:
                for micro_batch in range(2):
                    if step in at and at[step][0] == micro_batch:
                        del at[step]
                        os.kill(int(children.read_text().split()[0]), signal.SIGKILL)
                        kills += 1
                    backward(model, step, micro_batch)
                optimizer.step()
                optimizer.zero_grad()
                step += 1
            except superoffload.Error as error:
                if error.code != grpc.StatusCode.ABORTED:
                    raise
                print(f"step {step} again: {error}")
                optimizer.zero_grad()
        result = require_same(expected, weights(model, optimizer), kills)
        optimizer.close()
        return result
