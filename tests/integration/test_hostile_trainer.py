"""Trainers that break the rules of the rings and the descriptor socket, or vanish: each gets a canonical error, nobody
else notices."""

import dataclasses
import mmap
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import time

import grpc
import pytest
import torch

import superoffload.torch
from superoffload._core.control import Connection
from superoffload.v1 import optimizer_pb2 as pb
from superoffload.v1 import optimizer_pb2_grpc

GROUP, BEGIN_STEP, GRADIENT_READY, END_STEP, ABANDON_STEP, MEASURE_NORM = range(1, 7)
VERDICT, ERROR = 19, 20
HELLO, WELCOME, DESCRIPTORS, SOCKET_ERROR = range(1, 5)
BUCKETS = 3
DEADLINE_SECONDS = 30

ABSENT, UNMAP_DEVICE = 8, 10
_ENTRY = struct.Struct("<HHIQQ5d")
_HEADER = struct.Struct("<QIIIIQQQ")
_SUBMISSION_TAIL, _COMPLETION_TAIL, _COMPLETION_HEAD = 64, 192, 256
_ERROR_TEXT = 512


@dataclasses.dataclass
class Completion:
    opcode: int
    index: int
    error: str


def scalars_of(first: int, count: int) -> float:
    """The first eight bytes of a payload that are two numbers of 32 bits, in the place of a double."""
    return struct.unpack("<d", struct.pack("<II", first, count))[0]


class RawTrainer:
    """A trainer that writes its ring by hand, every byte of it."""

    def __init__(self, daemon, name: str, bucket_elements: int = 1024) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.connect(daemon.info.descriptor_socket)
        self._wire_version = daemon.info.wire_version
        token = self.ask(HELLO)[0][48:112].decode()
        self.metadata = [("superoffload-token", token)]
        self.stub = optimizer_pb2_grpc.OptimizerServiceStub(daemon.channel)
        request = pb.CreateOptimizerRequest(name=name, algorithm="adamw", bucket_bytes=4 * bucket_elements)
        scalars = {"lr": 0.1, "weight_decay": 0}
        request.groups.add(scalars=[pb.Scalar(name=scalar, value=value) for scalar, value in scalars.items()])
        request.parameters.add(name="w", shape=[BUCKETS * bucket_elements], dtype=pb.DATA_TYPE_FLOAT32)
        self.stub.CreateOptimizer(iter([request]), metadata=self.metadata)
        self.name = name
        self.attach(pb.SYNC_PUSH)
        self.stub.PushParameters(pb.PushParametersRequest(name=name), metadata=self.metadata)  # zeros

    def attach(self, sync: int = pb.SYNC_PULL) -> None:
        request = pb.AttachOptimizerRequest(name=self.name, sync=sync)
        self.stream = self.stub.AttachOptimizer(iter([request]), metadata=self.metadata)
        response = next(self.stream)
        self.epoch, self.step = response.attachment_epoch, response.optimizer.step
        reply, fds = self.ask(DESCRIPTORS, self.epoch)
        (self.kind,) = struct.unpack_from("<H", reply, 6)
        self.ring = mmap.mmap(fds[0], struct.unpack_from("<Q", reply, 16)[0])
        for fd in fds:
            os.close(fd)
        _, _, _, self._entries, self._completions, self._offset, self._completion_offset, _ = _HEADER.unpack_from(
            self.ring
        )

    def ask(self, kind: int, epoch: int = 0) -> tuple[bytes, list[int]]:
        self._socket.send(struct.pack("<IHHQ48x", 0x46464F53, self._wire_version, kind, epoch))
        reply, fds, _, _ = socket.recv_fds(self._socket, 512, 4)
        return reply, fds

    def word(self, offset: int) -> int:
        return struct.unpack_from("<I", self.ring, offset)[0]

    def submit(
        self, opcode: int, index: int = 0, *f64: float, step: int | None = None, epoch: int | None = None
    ) -> None:
        tail = self.word(_SUBMISSION_TAIL)
        payload = [*f64, *[0.0] * (5 - len(f64))]
        _ENTRY.pack_into(
            self.ring,
            self._offset + 64 * (tail % self._entries),
            opcode,
            0,
            index,
            self.step if step is None else step,
            self.epoch if epoch is None else epoch,
            *payload,
        )
        self.set_tail(tail + 1)

    def set_tail(self, tail: int) -> None:
        struct.pack_into("<I", self.ring, _SUBMISSION_TAIL, tail % 2**32)
        wake(self.ring, _SUBMISSION_TAIL)

    def completion(self) -> Completion:
        deadline = time.monotonic() + DEADLINE_SECONDS
        head = self.word(_COMPLETION_HEAD)
        while self.word(_COMPLETION_TAIL) == head:
            assert time.monotonic() < deadline, "no completion"
            time.sleep(0.0005)
        opcode, _, index, *_ = _ENTRY.unpack_from(self.ring, self._completion_offset + 64 * (head % self._completions))
        struct.pack_into("<I", self.ring, _COMPLETION_HEAD, (head + 1) % 2**32)
        text = self.ring[_ERROR_TEXT : _ERROR_TEXT + 1024]
        return Completion(opcode, index, text[: text.index(b"\0")].decode())

    def good_step(self) -> None:
        self.step += 1
        self.submit(BEGIN_STEP, 0, 1.0)
        for bucket in range(BUCKETS):
            self.submit(GRADIENT_READY, bucket)
        self.submit(END_STEP, 0, 1.0, 0.0)
        while (completion := self.completion()).opcode != VERDICT:
            assert completion.opcode != ERROR, completion
        assert completion.index == 1  # COMMIT

    def wait_end(self) -> grpc.RpcError:
        with pytest.raises(grpc.RpcError) as error:
            next(self.stream)
        return error.value


def wake(ring: mmap.mmap, offset: int) -> None:
    import ctypes

    address = ctypes.addressof(ctypes.c_char.from_buffer(ring)) + offset
    ctypes.CDLL(None).syscall(202 if os.uname().machine == "x86_64" else 98, ctypes.c_void_p(address), 1, 1, 0, 0, 0)


@pytest.fixture
def bystander(daemon):
    """Another optimizer of the daemon, which must go on as if it were alone."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(5000))
    expected = torch.nn.Parameter(weight.detach().clone())
    optimizer = superoffload.torch.AdamW([weight], endpoint=daemon.endpoint, lr=0.01, name="bystander")
    private = superoffload.torch.AdamW([expected], endpoint=None, lr=0.01)

    def step():
        gradient = torch.randn(5000)
        for parameter, its_optimizer in ((weight, optimizer), (expected, private)):
            (parameter * gradient).sum().backward()
            its_optimizer.step()
            its_optimizer.zero_grad()
        assert optimizer.last_result.kind.name == "COMMIT"
        assert torch.equal(weight, expected)

    step()
    yield step
    step()
    optimizer.close()
    private.close()


def code(completion: Completion) -> str:
    return next(status.name for status in grpc.StatusCode if status.value[0] == completion.index)


@pytest.mark.parametrize(
    "submissions, expected, words",
    [
        ([(END_STEP, 0, 1.0, 0.0)], "FAILED_PRECONDITION", "without an open step"),
        ([(GRADIENT_READY, 0)], "FAILED_PRECONDITION", "without an open step"),
        ([(MEASURE_NORM, 0, 1.0)], "FAILED_PRECONDITION", "without an open step"),
        ([(ABANDON_STEP, 0)], "FAILED_PRECONDITION", "without an open step"),
        ([(GROUP, 1, scalars_of(0, 1), 0.1)], "INVALID_ARGUMENT", "group 1"),
        ([(GROUP, 0, scalars_of(0, 2), 0.1, 1.0)], "INVALID_ARGUMENT", "beta1"),
        ([(GROUP, 0, scalars_of(3, 3), 1e-8, 0.0, 0.0)], "INVALID_ARGUMENT", "do not all exist"),
        ([(GROUP, 0, scalars_of(0, 5), 0.1)], "INVALID_ARGUMENT", "GROUP has 5"),
        ([(ABSENT, 0, scalars_of(1, 0))], "FAILED_PRECONDITION", "without an open step"),
        ([(BEGIN_STEP, 0, 1.0), (ABSENT, 1, scalars_of(1, 0))], "INVALID_ARGUMENT", "do not all exist"),
        ([(BEGIN_STEP, 0, 1.0), (ABSENT, 0, scalars_of(2**32 - 1, 0))], "INVALID_ARGUMENT", "do not all exist"),
        (
            [(BEGIN_STEP, 0, 1.0), (GRADIENT_READY, 0), (ABSENT, 0, scalars_of(1, 0))],
            "FAILED_PRECONDITION",
            "submitted",
        ),
        ([(BEGIN_STEP, 0, float("nan"))], "INVALID_ARGUMENT", "scale"),
        ([(999, 0)], "UNIMPLEMENTED", "999"),
        ([(UNMAP_DEVICE, 0)], "FAILED_PRECONDITION", "no GPU memory is mapped"),
        ([(BEGIN_STEP, 0, 1.0), (BEGIN_STEP, 0, 1.0)], "FAILED_PRECONDITION", "open"),
        ([(BEGIN_STEP, 0, 1.0), (GRADIENT_READY, 0), (GRADIENT_READY, 0)], "ALREADY_EXISTS", "bucket 0"),
        ([(BEGIN_STEP, 0, 1.0), (GRADIENT_READY, BUCKETS)], "INVALID_ARGUMENT", "3 buckets"),
        ([(BEGIN_STEP, 0, 1.0), (GRADIENT_READY, 2), (END_STEP, 0, 1.0, 0.0)], "FAILED_PRECONDITION", "missing"),
        ([(BEGIN_STEP, 0, 1.0), (GROUP, 0, scalars_of(0, 1), -1.0)], "INVALID_ARGUMENT", "lr"),
    ],
)
def test_a_wrong_submission_has_no_effect(daemon, bystander, submissions, expected, words):
    trainer = RawTrainer(daemon, "hostile")
    trainer.step += 1
    for submission in submissions:
        trainer.submit(*submission)
    while (completion := trainer.completion()).opcode != ERROR:
        pass
    assert code(completion) == expected and words in completion.error
    if submissions[0][0] == BEGIN_STEP and len(submissions) > 1:
        trainer.submit(ABANDON_STEP)
    else:
        trainer.step -= 1  # it never began
    while trainer.word(_COMPLETION_HEAD) != trainer.word(_COMPLETION_TAIL):
        trainer.completion()
    time.sleep(0.05)
    while trainer.word(_COMPLETION_HEAD) != trainer.word(_COMPLETION_TAIL):
        trainer.completion()
    trainer.good_step()


def test_entries_of_another_step_or_attachment_are_refused(daemon, bystander):
    trainer = RawTrainer(daemon, "hostile")
    trainer.submit(BEGIN_STEP, 0, 1.0, step=7)
    completion = trainer.completion()
    assert code(completion) == "FAILED_PRECONDITION" and "next step is 1" in completion.error
    trainer.submit(BEGIN_STEP, 0, 1.0, step=1, epoch=trainer.epoch + 1)
    completion = trainer.completion()
    assert code(completion) == "FAILED_PRECONDITION" and "attach again" in completion.error
    trainer.good_step()


def test_a_ring_that_claims_more_than_it_holds_ends_its_attachment(daemon, bystander):
    trainer = RawTrainer(daemon, "hostile")
    trainer.set_tail(100000)
    error = trainer.wait_end()
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT and "attach again" in error.details()
    trainer.attach()
    trainer.good_step()


def test_garbage_all_over_the_ring_harms_nobody(daemon, bystander):
    seed = int.from_bytes(os.urandom(4), "little")
    print("seed", seed)
    dice = random.Random(seed)
    trainer = RawTrainer(daemon, "hostile")
    for _ in range(20):
        for _ in range(dice.randrange(1, 200)):
            offset = dice.choice([dice.randrange(0, 600), dice.randrange(len(trainer.ring) - 8)])
            trainer.ring[offset : offset + 8] = dice.randbytes(8)
        wake(trainer.ring, _SUBMISSION_TAIL)
        bystander()
        trainer.stream.cancel()
        deadline = time.monotonic() + DEADLINE_SECONDS
        while trainer.stub.GetOptimizer(pb.GetOptimizerRequest(name="hostile"), metadata=trainer.metadata).attached:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        trainer.attach()
    trainer.good_step()


def test_completions_that_nobody_takes_end_the_attachment(daemon, bystander):
    trainer = RawTrainer(daemon, "hostile")
    for _ in range(1000):
        try:
            trainer.submit(999)
        except ValueError:
            break
        time.sleep(0.0002)
    error = trainer.wait_end()
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED and "consume" in error.details()


def test_a_stale_attachment_gets_no_descriptors(daemon):
    trainer = RawTrainer(daemon, "hostile")
    stale = trainer.epoch
    trainer.stream.cancel()
    deadline = time.monotonic() + DEADLINE_SECONDS
    while True:
        reply, fds = trainer.ask(DESCRIPTORS, stale)
        if struct.unpack_from("<H", reply, 6)[0] == SOCKET_ERROR:
            break
        for fd in fds:
            os.close(fd)
        assert time.monotonic() < deadline
    assert struct.unpack_from("<I", reply, 8)[0] == grpc.StatusCode.NOT_FOUND.value[0]
    trainer.attach()
    trainer.good_step()


def test_another_connections_attachment_gets_no_descriptors(daemon):
    trainer, other = RawTrainer(daemon, "mine"), RawTrainer(daemon, "other")
    reply, fds = other.ask(DESCRIPTORS, trainer.epoch)
    assert struct.unpack_from("<H", reply, 6)[0] == SOCKET_ERROR and not fds


VANISHING = """
import sys, time, torch, superoffload.torch
torch.manual_seed(1)
weight = torch.nn.Parameter(torch.randn(4096))
optimizer = superoffload.torch.AdamW([weight], endpoint=sys.argv[1], name="vanishing")
for _ in range(3):
    weight.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print(weight.detach().double().sum().item(), flush=True)
weight.sum().backward()  # submitted, never stepped
print("submitted", flush=True)
time.sleep(600)
"""

FORKING = """
import os, sys, time, torch, superoffload.torch
weight = torch.nn.Parameter(torch.ones(64))
optimizer = superoffload.torch.AdamW([weight], endpoint=sys.argv[1], name="forking")
if os.fork() == 0:  # as a data loader's worker does; it keeps every socket open
    time.sleep(DEADLINE)
    os._exit(0)
print("attached", flush=True)
time.sleep(600)
"""


def test_the_death_of_a_trainer_is_noticed_though_its_forks_live(daemon):
    code = FORKING.replace("DEADLINE", str(2 * DEADLINE_SECONDS))
    process = subprocess.Popen(
        [sys.executable, "-c", code, daemon.endpoint], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout.readline() == "attached\n"
        process.send_signal(signal.SIGKILL)
        process.wait()
        connection = Connection(daemon.endpoint)
        deadline = time.monotonic() + DEADLINE_SECONDS
        while connection.call("GetOptimizer", pb.GetOptimizerRequest(name="forking")).attached:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        os.killpg(process.pid, signal.SIGKILL)


def test_a_trainer_killed_inside_a_step_leaves_its_optimizer_at_the_step_before(daemon, bystander):
    process = subprocess.Popen([sys.executable, "-c", VANISHING, daemon.endpoint], stdout=subprocess.PIPE, text=True)
    total = float(process.stdout.readline())
    assert process.stdout.readline() == "submitted\n"
    bystander()
    process.send_signal(signal.SIGKILL)
    process.wait()
    connection = Connection(daemon.endpoint)
    deadline = time.monotonic() + DEADLINE_SECONDS
    while (optimizer := connection.call("GetOptimizer", pb.GetOptimizerRequest(name="vanishing"))).attached:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert optimizer.committed_steps == 3 and optimizer.statistics.skips_abandoned <= 1
    weight = torch.nn.Parameter(torch.zeros(4096))
    again = superoffload.torch.AdamW([weight], endpoint=daemon.endpoint, name="vanishing", sync="pull_params")
    assert weight.detach().double().sum().item() == total
    weight.sum().backward()
    again.step()
    again.zero_grad()
    assert again.last_result.committed_steps == 4
