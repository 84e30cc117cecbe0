"""What sizes follow: the memory that is left to this machine, or to the container."""

import pytest
from tests.device import machine

MIB = 1 << 20


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({"memory.max": f"{64 * MIB}", "memory.current": f"{60 * MIB}", "memory.stat": f"inactive_file {8 * MIB}"}, 12),
        ({"memory.max": f"{64 * MIB}", "memory.current": f"{64 * MIB}", "memory.stat": "anon 7"}, 0),
        (
            {
                "memory/memory.limit_in_bytes": f"{64 * MIB}",
                "memory/memory.usage_in_bytes": f"{32 * MIB}",
                "memory/memory.stat": f"total_inactive_file {MIB}",
            },
            33,
        ),
    ],
)
def test_a_control_group_that_leaves_less_decides(tmp_path, monkeypatch, files, left):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    monkeypatch.setattr(machine, "CONTROL_GROUPS", tmp_path)
    assert machine.available_host_bytes() == left * MIB


def test_one_without_a_limit_does_not(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "CONTROL_GROUPS", tmp_path)
    without = machine.available_host_bytes()
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1\n")
    assert machine.available_host_bytes() > without // 2 > 0


def test_a_model_shrinks_to_what_the_memory_holds(monkeypatch):
    monkeypatch.setattr(machine, "available_host_bytes", lambda: 24 << 30)
    fitting = machine.parameters_that_fit(1_000_000_000)
    assert 500_000_000 < fitting < 1_000_000_000
    assert machine.daemon_budget(fitting) < (24 << 30) - machine.TRAINER_SPARE_BYTES
    monkeypatch.setattr(machine, "available_host_bytes", lambda: 128 << 30)
    assert machine.parameters_that_fit(1_000_000_000) == 1_000_000_000
