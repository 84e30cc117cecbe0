"""A daemon dies while an optimizer is being built: the constructor comes back by itself, with the right weights."""

import itertools

import grpc
import pytest
import torch
from tests.conftest import Daemon
from tests.fault.test_keeper import OFF
from tests.fault.test_recovered_optimizer import kill_daemon, model, optimizer_of, step

from superoffload._core.control import Connection
from superoffload._core.error import Error

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
