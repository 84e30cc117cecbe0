"""What tests of broken disks share."""

import os
import pathlib

import pytest

FAKE_DISK = pathlib.Path(os.environ["SUPEROFFLOAD_BUILD"]) / "tests" / "support" / "libsuperoffload_fake_disk.so"


@pytest.fixture
def disk(tmp_path, monkeypatch):
    """A file; what is written to it decides what becomes of writes of daemons that start from here on."""
    control = tmp_path / "disk"
    control.write_text("ok")
    monkeypatch.setenv("FAKE_DISK", str(control))
    preload = os.environ.get("LD_PRELOAD")
    monkeypatch.setenv("LD_PRELOAD", f"{preload}:{FAKE_DISK}" if preload else str(FAKE_DISK))
    return control
