"""A daemon dies while an optimizer is being built: the constructor comes back by itself, with the right weights."""

import itertools
import signal
import subprocess
import sys
import textwrap
import time

import grpc
import pytest
import torch
from tests.conftest import Daemon
from tests.fault.test_keeper import OFF
from tests.fault.test_recovered_optimizer import kill_daemon, model, optimizer_of, step

import superoffload.jax
from superoffload._core.control import Connection
from superoffload._core.error import Error
from superoffload._core.session import Session
from superoffload.v1 import optimizer_pb2 as pb

SERIAL = itertools.count()


@pytest.fixture(scope="module")
def kept():
    started = Daemon("--keeper", OFF)
    yield started
    assert started.stop() == 0, started.log


@pytest.fixture
def deaths(kept, monkeypatch):
    """Has the daemon die once at a call of that name, before it is made or before it is answered."""

    def die_at(name, answered):
        def disturbed(made, wanted):
            def call(connection, *arguments):
                if arguments[0] != wanted and wanted != "attach" or died:
                    return made(connection, *arguments)
                died.append(name)
                if not answered:
                    kill_daemon(kept)
                    return made(connection, *arguments)
                made(connection, *arguments)
                kill_daemon(kept)
                raise Error(grpc.StatusCode.UNAVAILABLE, "the answer was lost")

            return call

        died = []
        attribute = "attach" if name == "attach" else "call"
        monkeypatch.setattr(Connection, attribute, disturbed(getattr(Connection, attribute), name))
        return died

    return die_at


@pytest.mark.parametrize("answered", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("name", ["CreateOptimizer", "attach", "PushParameters"])
def test_a_new_optimizer_is_built_over_a_death(kept, deaths, name, answered):
    died = deaths(name, answered)
    trained = model(3.0)
    optimizer = optimizer_of(kept, trained, f"run-{next(SERIAL)}")
    assert died
    assert torch.equal(optimizer.state_tensors()["weight"]["master"], torch.full((300,), 3.0))
    step(trained, optimizer)
    assert optimizer.last_result.committed_steps == 1
    optimizer.close()


@pytest.mark.parametrize("answered", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("name", ["CreateOptimizer", "GetOptimizer", "attach", "UpdatePolicies"])
def test_an_optimizer_that_goes_on_is_attached_over_a_death(kept, deaths, name, answered):
    serial = f"run-{next(SERIAL)}"
    trained = model()
    first = optimizer_of(kept, trained, serial)
    step(trained, first)
    expected = trained["weight"].detach().clone()
    first.close()
    died = deaths(name, answered)
    other = model(9.0)
    again = optimizer_of(kept, other, serial, sync="pull_params", speculation="never")
    assert died
    assert torch.equal(other["weight"].detach(), expected)
    step(other, again)
    assert again.last_result.committed_steps == 2
    again.close()


def test_a_checkpoint_is_restored_over_a_death(kept, deaths, tmp_path):
    trained = model()
    first = optimizer_of(kept, trained, f"run-{next(SERIAL)}")
    step(trained, first)
    first.save_checkpoint(tmp_path / "saved")
    first.close()
    died = deaths("RestoreOptimizer", True)
    other = model(9.0)
    restored = optimizer_of(kept, other, f"run-{next(SERIAL)}", restore=tmp_path / "saved")
    assert died
    assert torch.equal(other["weight"].detach(), trained["weight"].detach())
    restored.close()


DIES_ONCE_RESTORED = """
    import os, signal, sys, torch
    import superoffload.torch
    from superoffload._core import optimizers
    endpoint, name, directory, when = sys.argv[1:]
    restore = optimizers.restore
    def dies(*arguments):
        if when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        restore(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)
    optimizers.restore = dies
    weight = torch.nn.Parameter(torch.full((300,), 5.0))
    superoffload.torch.AdamW([("weight", weight)], endpoint=endpoint, name=name, restore=directory, sync="pull_params")
"""


def saved_checkpoint(kept, tmp_path):
    """A checkpoint, and its parameters."""
    trained = model()
    first = optimizer_of(kept, trained, f"run-{next(SERIAL)}")
    step(trained, first)
    first.save_checkpoint(tmp_path / "saved")
    first.close()
    return tmp_path / "saved", trained["weight"].detach().clone()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_trainer_killed_in_its_restore_is_followed_by_one_with_the_checkpoints_parameters(kept, tmp_path, when):
    """The optimizer that it leaves is incomplete or complete; with none, the checkpoint begins as well."""
    directory, expected = saved_checkpoint(kept, tmp_path)
    name = f"run-{next(SERIAL)}"
    program = [sys.executable, "-c", textwrap.dedent(DIES_ONCE_RESTORED), kept.endpoint, name, directory, when]
    assert subprocess.run(program, timeout=60).returncode == -signal.SIGKILL
    other = model(9.0)
    with pytest.raises(ValueError, match=r"pull_params.*leave restore= out"):
        optimizer_of(kept, other, name, restore=directory, sync="push_params")
    restored = optimizer_of(kept, other, name, restore=directory, sync="pull_params")
    assert torch.equal(other["weight"].detach(), expected)
    restored.close()


def test_both_adapters_refuse_to_push_over_what_they_restore(kept, tmp_path):
    with pytest.raises(ValueError, match="contradict"):
        superoffload.jax.adamw(1e-3, name="run", restore=tmp_path, sync="push_params")
    fresh = optimizer_of(kept, model(9.0), f"run-{next(SERIAL)}", restore=None, sync="push_params")
    assert torch.equal(fresh.state_tensors()["weight"]["master"], torch.full((300,), 9.0))
    fresh.close()


CREATE_LARGE = """
    import sys, superoffload.torch, torch
    from superoffload._core.control import Connection
    from superoffload.v1 import optimizer_pb2 as pb
    request = pb.CreateOptimizerRequest(name=sys.argv[2], algorithm="adamw", groups=[pb.ParameterGroup()])
    request.parameters.add(name="weight", shape=[1 << 25], dtype=pb.DATA_TYPE_FLOAT32)
    Connection(sys.argv[1]).call("CreateOptimizer", request)
"""


def test_a_trainer_started_again_waits_for_what_is_being_made_for_its_killed_self(kept):
    session = Session(kept.endpoint, 30)

    def state():
        try:
            session.stub.GetOptimizer(pb.GetOptimizerRequest(name="large"), metadata=session.metadata)
        except grpc.RpcError as error:
            return error.code()
        return grpc.StatusCode.OK

    killed = subprocess.Popen([sys.executable, "-c", textwrap.dedent(CREATE_LARGE), kept.endpoint, "large"])
    while (now := state()) == grpc.StatusCode.NOT_FOUND:
        assert killed.poll() is None
        time.sleep(0.005)
    killed.kill()
    killed.wait()
    assert now == grpc.StatusCode.ABORTED, "it was made in no time"
    trained = torch.nn.ParameterDict({"weight": torch.nn.Parameter(torch.full((1 << 25,), 2.0))})
    optimizer = optimizer_of(kept, trained, "large")
    step(trained, optimizer)
    assert optimizer.last_result.committed_steps == 1
    assert torch.equal(optimizer.state_tensors()["weight"]["master"], trained["weight"].detach())
    optimizer.close()
    session.leave(None)
