"""A killed trainer closes its sockets before the files by which its GPU still copies into the daemon's memory."""

import subprocess
import sys

import grpc
import pytest
import torch

import superoffload.torch
from superoffload._core.error import Error

# Ends but for a thread, which has nothing to say to the daemon any more.
_TRAINER = """
import ctypes, os, platform, socket, stat, sys, threading
import torch
import superoffload.torch

optimizer = superoffload.torch.AdamW([("weight", torch.nn.Parameter(torch.zeros(4)))], endpoint=sys.argv[1], name="run")

def linger():
    sys.stdin.readline()
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        try:
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                socket.socket(fileno=os.dup(descriptor)).shutdown(socket.SHUT_RDWR)
        except OSError:
            continue
    print("closed", flush=True)
    sys.stdin.readline()
    os._exit(0)

threading.Thread(target=linger).start()
print("attached", flush=True)
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)
"""


def attach(daemon):
    parameter = torch.nn.Parameter(torch.zeros(4))
    superoffload.torch.AdamW([("weight", parameter)], endpoint=daemon.endpoint, name="run", sync="pull_params").close()


def test_a_trainer_that_is_ending_keeps_its_optimizer_until_it_has_ended(daemon):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    trainer = subprocess.Popen([sys.executable, "-c", _TRAINER, daemon.endpoint], **pipes)
    assert trainer.stdout.readline() == "attached\n"
    print(file=trainer.stdin, flush=True)
    assert trainer.stdout.readline() == "closed\n"
    for _ in range(20):
        with pytest.raises(Error, match="is attached to process") as refused:
            attach(daemon)
        assert refused.value.code == grpc.StatusCode.FAILED_PRECONDITION
    trainer.communicate("\n", timeout=60)
    attach(daemon)
