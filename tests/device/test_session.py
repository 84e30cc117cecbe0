"""Whatever becomes of a step, the others run, the budget holds, and what happened is on record."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from tests.device import session as session_module
from tests.device.session import Session, Unavailable

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def handlers():
    """As they were: a session takes them."""
    found = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in found.items():
        signal.signal(number, handler)


@pytest.fixture
def session(tmp_path):
    return Session("check", 600, tmp_path)


def fail():
    raise ValueError("what is wrong")


def is_not_here():
    raise Unavailable("there is no such thing here")


def report_of(session):
    return json.loads(session.path(".json").read_text())


def test_a_step_that_fails_or_dies_is_on_record_and_the_rest_runs(session, capsys):
    session.call("fails", 60, fail)
    session.program("exits", ["sh", "-c", "echo last words; exit 3"], 60)
    session.program("dies", ["sh", "-c", "kill -SEGV $$"], 60)
    session.program("does not exist", ["/no/such/program"], 60)
    session.call("is not here", 60, is_not_here)
    assert session.call("returns", 60, lambda: {"median": 3}).result == {"median": 3}
    assert session.finish() == 1
    steps = {step["title"]: (step["outcome"], step["detail"]) for step in report_of(session)["steps"]}
    assert steps == {
        "fails": ("failed", "ValueError: what is wrong"),
        "exits": ("failed", "exit status 3"),
        "dies": ("failed", "killed by SIGSEGV"),
        "does not exist": ("failed", "FileNotFoundError: [Errno 2] No such file or directory"),
        "is not here": ("skipped", "there is no such thing here"),
        "returns": ("passed", ""),
    }
    printed = capsys.readouterr().out
    assert "    last words" in printed and "1 passed, 4 failed, 1 skipped" in printed
    assert "last words" in session.path(".log").read_text()
    assert session.path(".txt").read_text() in printed


def test_what_was_measured_before_a_step_was_cut_off_is_kept(session):
    def measures():
        yield {"row": 1}
        yield {"row": 2}
        time.sleep(1000)

    step = session.call("rows", 2, measures)
    assert step.outcome == "cut off" and step.result == [{"row": 1}, {"row": 2}]


def test_a_program_that_says_it_did_nothing_is_skipped(session):
    for last, outcome in (("0 tests", "skipped"), ("1 test", "passed")):
        assert session.program("tests", ["echo", last], 60, did_nothing="0 tests").outcome == outcome


def test_what_is_not_asked_for_leaves_no_trace(tmp_path):
    asked = Session("check", 600, tmp_path, only="JAX|two ranks$")
    assert asked.call("PyTorch, two ranks", 60, lambda: 1).result == 1
    assert asked.call("two ranks, PyTorch", 60, fail).outcome == "not asked for"
    assert [step["title"] for step in report_of(asked)["steps"]] == ["PyTorch, two ranks"]
    assert asked.finish() == 0


def test_all_passed_is_exit_status_0(session):
    session.call("returns", 60, lambda: None)
    session.skip("other", "not here")
    assert session.finish() == 0


def test_nothing_passed_is_not(session):
    session.skip("other", "not here")
    assert session.finish() == 1


def test_a_step_that_hangs_is_cut_off_with_all_that_it_started(session, tmp_path):
    pids = tmp_path / "pids"
    step = session.program("hangs", ["sh", "-c", f"sleep 1000 & echo $! $$ > {pids}; echo begun; wait"], 2)
    assert (step.outcome, step.detail, step.tail) == ("cut off", "after 2 s", ["begun"])
    for pid in pids.read_text().split():
        deadline = time.monotonic() + 60
        while pathlib.Path(f"/proc/{pid}").exists() and "Z" not in pathlib.Path(f"/proc/{pid}/stat").read_text():
            assert time.monotonic() < deadline, "it still runs"
    assert session.call("next", 60, lambda: 7).result == 7
    assert session.finish() == 1


def test_steps_for_which_no_time_is_left_are_named(tmp_path, session):
    short = Session("short", session_module.LEAST_SECONDS - 1, tmp_path)
    assert short.call("bench", 60, fail).outcome == "left out"
    assert short.finish() == 1
    assert "LEFT OUT: bench: no time was left for it" in short.path(".txt").read_text()


def test_no_step_gets_more_than_what_is_left(tmp_path, session, monkeypatch):
    monkeypatch.setattr(session_module, "LEAST_SECONDS", 0.1)
    short = Session("short", 1.5, tmp_path)
    step = short.program("hangs", ["sleep", "1000"], 500)
    assert step.outcome == "cut off" and step.seconds < 400
    assert short.call("next", 60, fail).outcome == "left out"


def test_a_flood_of_output_keeps_its_beginning_and_its_end(session, monkeypatch):
    monkeypatch.setattr(session_module, "LOGGED_BYTES", 1000)
    session.program("floods", ["sh", "-c", "echo first; seq 100000; echo last"], 60)
    log = session.path(".log").read_text()
    assert len(log) < 3000 and "first" in log and "last" in log and "bytes left out" in log
    assert not session.path(".step").exists()


def test_the_summary_of_many_failures_is_short(session, capsys):
    for number in range(30):
        session.program(f"number {number} " + 300 * "x", ["sh", "-c", "seq -w 1000 | tr '\\n' ' '; exit 1"], 60)
    session.finish()
    assert len(capsys.readouterr().out) < 12_000


def test_who_is_told_to_stop_still_sums_up(tmp_path):
    script = textwrap.dedent(
        f"""
        import pathlib
        from tests.device.session import Session, stopping_early
        session = Session("stopped", 600, pathlib.Path({str(tmp_path)!r}))
        with stopping_early(session):
            session.call("first", 60, lambda: None)
            print("ready", flush=True)
            session.program("hangs", ["sleep", "1000"], 500)
            session.call("never", 60, lambda: None)
        raise SystemExit(session.finish())
        """
    )
    process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line == "ready\n":
            break
    while not (tmp_path / "stopped.step").exists():
        assert process.poll() is None
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGTERM)
    rest, _ = process.communicate(timeout=300)
    assert process.returncode == 1
    report = json.loads((tmp_path / "stopped.json").read_text())
    assert [step["outcome"] for step in report["steps"]] == ["passed", "cut off", "left out"]
    assert "1 passed, 1 cut off, 1 left out" in rest
