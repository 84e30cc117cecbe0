"""What is whole of a damaged optimizer can be saved, and what is not guaranteed is said."""

import os

import pytest
import torch
from safetensors.torch import load_file
from tests.conftest import Daemon
from tests.fault.test_keeper import children, names, reconnected
from tests.fault.test_recovered_optimizer import ctl, kill_daemon, model, optimizer_of, step
from tests.support.open_files import open_files

from superoffload._core.error import Error

OFF = 'metrics_address: "off"'
VERSION, GROUPS, COMMITTED = 8, 12, 32  # offsets in the record's header


@pytest.fixture
def kept(tmp_path):
    config = tmp_path / "superoffloadd.textproto"
    config.write_text(OFF)
    daemon = Daemon("--keeper", f"--config={config}")
    daemon.config = config
    yield daemon
    assert daemon.stop() == 0, daemon.log


def train(kept):
    """An optimizer "run" after two steps; returns its masters."""
    trained = model()
    optimizer = optimizer_of(kept, trained)
    for _ in range(2):
        step(trained, optimizer)
    masters = optimizer.state_tensors()["weight"]["master"].clone()
    optimizer.close()
    return masters


def damage(kept, offset):
    """Flips bits of the record; only root writes to a daemon's memory."""
    (daemon,) = children(kept.process.pid)
    (fd,) = (fd for fd, file in open_files(daemon).items() if "superoffload-record" in file)
    with open(fd, "r+b") as record:
        record.seek(offset)
        byte = record.read(1)[0]
        record.seek(offset)
        record.write(bytes([byte ^ 0x40]))
    kill_daemon(kept)
    assert "damaged" in ctl(kept, "list").stdout


def masters_in(directory):
    (file,) = directory.glob("model-*.safetensors")
    return load_file(file)["model.weight"]


def test_a_whole_one_that_the_configuration_cannot_host_is_exported_exactly(kept, tmp_path):
    masters = train(kept)
    kept.config.write_text(OFF + " per_user_memory_bytes: 100000")
    kill_daemon(kept)
    assert "damaged" in ctl(kept, "list").stdout
    exported = ctl(kept, "export", "run", str(tmp_path / "saved"))
    assert exported.returncode == 0, exported.stderr
    assert "exact checkpoint of step 2" in exported.stdout
    kept.config.write_text(OFF)
    kill_daemon(kept)
    restored = optimizer_of(kept, model(), "other", restore=tmp_path / "saved")
    assert torch.equal(restored.state_tensors()["weight"]["master"], masters)
    assert names(reconnected(kept)) == {"run", "other"}  # what is exported stays


@pytest.mark.skipif(os.geteuid() != 0, reason="only root writes to a daemon's memory")
@pytest.mark.parametrize("offset", [GROUPS, COMMITTED])
def test_what_a_damaged_record_does_not_guarantee_is_said_and_not_restored_unasked(kept, tmp_path, offset):
    masters = train(kept)
    damage(kept, offset)
    exported = ctl(kept, "export", "run", str(tmp_path / "saved"))
    assert exported.returncode == 0, exported.stderr
    assert "NOT GUARANTEED" in exported.stdout and "two steps behind" in exported.stdout
    assert "two steps behind" in (tmp_path / "saved" / "NOT_GUARANTEED.txt").read_text()
    assert torch.equal(masters_in(tmp_path / "saved"), masters)
    with pytest.raises(Error, match="index"):
        optimizer_of(kept, model(), "other", restore=tmp_path / "saved")
    doubtful = tmp_path / "saved" / "model.safetensors.index.json.doubtful"
    doubtful.rename(doubtful.with_suffix(""))
    restored = optimizer_of(kept, model(), "third", restore=tmp_path / "saved")
    assert torch.equal(restored.state_tensors()["weight"]["master"], masters)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root writes to a daemon's memory")
def test_another_daemons_format_is_not_guessed_at(kept, tmp_path):
    train(kept)
    damage(kept, VERSION)
    refused = ctl(kept, "export", "run", str(tmp_path / "saved"))
    assert refused.returncode == 1
    assert "FAILED_PRECONDITION" in refused.stderr and "daemon of that version" in refused.stderr
    assert not (tmp_path / "saved").exists()


def test_what_is_not_damaged_is_not_exported(kept, tmp_path):
    train(kept)
    refused = ctl(kept, "export", "run", str(tmp_path / "saved"))
    assert refused.returncode == 1 and "checkpoint" in refused.stderr
