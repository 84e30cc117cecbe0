"""What a daemon that is stopped does with the optimizers that it owns."""

import os
import re
import resource
import signal

import pytest
import torch
from tests.support.users import STRANGER, configured, ctl

import superoffload.torch


def train(optimizer, weight, steps):
    for _ in range(steps):
        (weight * weight).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def weights():
    return torch.nn.Parameter(torch.linspace(-1, 1, 4096))


def record_version(description):
    """Of DurableOptimizer: the field's bytes, and those of the next field's tag."""
    return re.search(rb"\x18[\x01-\x7f]\xc2\x02", description.read_bytes()).group()


def stop(daemon):
    """The lines that it said meanwhile."""
    assert daemon.stop() == 0
    return daemon.log


def test_an_optimizer_that_is_not_kept_is_named_when_it_is_dropped(tmp_path):
    daemon = configured(tmp_path, "worker_threads: 1")
    weight = weights()
    train(superoffload.torch.AdamW([weight], endpoint=daemon.endpoint, name="run-17"), weight, 3)
    log = stop(daemon)
    assert 'optimizer "run-17" of uid' in log and "is dropped at step 3" in log and "stop_checkpoints" in log, log


def test_a_named_optimizer_is_there_again_after_a_stop(tmp_path):
    """With every bit of its state and its policies; an anonymous one is not."""
    kept = f'stop_checkpoints {{ directory: "{tmp_path}/kept" }}'
    daemon = configured(tmp_path, kept)
    weight, undisturbed, nameless = weights(), weights(), weights()
    optimizer = superoffload.torch.AdamW([weight], endpoint=daemon.endpoint, name="run-17", speculation="never")
    anonymous = superoffload.torch.AdamW([nameless], endpoint=daemon.endpoint)
    reference = superoffload.torch.AdamW([undisturbed])
    train(optimizer, weight, 3)
    train(anonymous, nameless, 1)
    train(reference, undisturbed, 6)
    log = stop(daemon)
    assert "run-17" in log and "dropped" not in log, log
    assert [entry for entry in os.listdir(tmp_path / "kept") if not entry.startswith(".")] == [f"{os.geteuid()}-run-17"]
    assert (tmp_path / "kept").stat().st_mode & 0o777 == 0o700
    optimizer.close()
    description = tmp_path / "kept" / f"{os.geteuid()}-run-17" / "optimizer"
    version = record_version(description)
    description.write_bytes(
        description.read_bytes().replace(version, version[:1] + bytes([version[1] - 1]) + version[2:])
    )

    daemon = configured(tmp_path, kept)
    described = ctl(daemon, "describe", "run-17")
    assert "3 of them committed" in described.stdout and "never" in described.stdout, described.stderr
    assert len(ctl(daemon, "list").stdout.splitlines()) == 2
    optimizer = superoffload.torch.AdamW([weight], endpoint=daemon.endpoint, name="run-17")
    train(optimizer, weight, 3)
    assert torch.equal(weight, undisturbed)
    optimizer.close()
    stop(daemon)
    assert record_version(description) == version, (
        "the new optimizer is of the present version, whatever the old one was"
    )

    # It was consumed: what a later stop keeps is what a later start has.
    daemon = configured(tmp_path, kept)
    assert "6 of them committed" in ctl(daemon, "describe", "run-17").stdout
    assert f".restored-{os.geteuid()}-run-17" in os.listdir(tmp_path / "kept")
    assert ctl(daemon, "delete", "run-17").returncode == 0
    assert not os.listdir(tmp_path / "kept")
    stop(daemon)
    daemon = configured(tmp_path, kept)
    assert len(ctl(daemon, "list").stdout.splitlines()) == 1
    stop(daemon)


def test_what_cannot_be_hosted_again_stays_and_is_named(tmp_path):
    kept = f'stop_checkpoints {{ directory: "{tmp_path}/kept" }}'
    daemon = configured(tmp_path, kept)
    weight = weights()
    train(superoffload.torch.AdamW([weight], endpoint=daemon.endpoint, name="run-17"), weight, 1)
    stop(daemon)
    shard = next((tmp_path / "kept" / f"{os.geteuid()}-run-17" / "checkpoint").glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    daemon = configured(tmp_path, kept)
    assert len(ctl(daemon, "list").stdout.splitlines()) == 1
    log = stop(daemon)
    assert "stays there" in log and "damaged" in log, log
    assert shard.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a directory away needs root")
def test_what_others_could_have_put_there_is_not_hosted(tmp_path):
    (tmp_path / "kept").mkdir()
    os.chown(tmp_path / "kept", STRANGER, STRANGER)
    daemon = configured(tmp_path, f'stop_checkpoints {{ directory: "{tmp_path}/kept" }}')
    assert f"belongs to uid {STRANGER}" in stop(daemon)


def test_a_disk_that_is_full_drops_an_optimizer_with_a_word_and_the_stop_goes_on(tmp_path):
    daemon = configured(tmp_path, f'stop_checkpoints {{ directory: "{tmp_path}/kept" }}')
    weight = weights()
    train(superoffload.torch.AdamW([weight], endpoint=daemon.endpoint, name="run-17"), weight, 1)
    resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE, (1 << 10, 1 << 10))  # for the test: a full disk
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.process.wait(60) == 0
    assert "is dropped at step 1" in daemon.process.stderr.read()
    assert os.listdir(tmp_path / "kept") == []
