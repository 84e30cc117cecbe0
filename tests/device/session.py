"""Runs the steps of one subcommand within a budget of time, and writes what became of them.

A step is a program, or a Python function in a forked child. Each has a limit, and none gets more than what is left of
the budget. A step that fails, hangs or dies is reported, and the next one runs. Into the output folder go NAME.log
(what the steps printed), NAME.json (what became of each, rewritten after each, so that a kill from outside leaves it
whole) and NAME.txt (the summary). What is printed is one line per step, and the summary at the end.
"""

import contextlib
import dataclasses
import faulthandler
import json
import os
import pathlib
import re
import select
import signal
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any

LOGGED_BYTES = 1 << 20  # of one step: as many of its beginning and of its end
LEAST_SECONDS = 5.0  # a step is not begun with less
SHOWN_FAILURES = 6
SHOWN_LINES = 5
KEPT_LINES = 16
SHOWN_COLUMNS = 140
PASSED, FAILED, CUT_OFF, LEFT_OUT, SKIPPED = "passed", "failed", "cut off", "left out", "skipped"
NOT_ASKED_FOR = "not asked for"  # and on no record


@dataclasses.dataclass
class Step:
    title: str
    outcome: str
    seconds: float = 0.0
    detail: str = ""  # why it did not pass
    tail: list[str] = dataclasses.field(default_factory=list)  # its last lines
    result: Any = None  # what the function returned, or a list of what it yielded until it ended


class Unavailable(Exception):
    """Raised by a step's function for what is not on this machine: the step is skipped, with this sentence."""


class Stopped(Exception):
    """SIGTERM or SIGINT: what runs is cut off, the rest is left out."""


def _stop(number: int, _: object) -> None:
    raise Stopped(signal.Signals(number).name)


def _end(pid: int, ended: bool) -> None:
    """Kills what the step started, which is in its group, and the step, and reaps it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if not ended:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


class Session:
    """One subcommand. `finish()` prints the summary and returns the exit status."""

    def __init__(
        self, name: str, budget_seconds: float, output: pathlib.Path, scale: float = 1.0, only: str = ""
    ) -> None:
        """`scale`: of the steps' limits. `only`: a pattern of the titles of what runs."""
        self.name = name
        self.steps: list[Step] = []
        self.facts: dict[str, Any] = {}  # into the JSON
        self.table: list[str] = []  # into the summary
        self._budget = budget_seconds
        self._scale = scale
        self._only = re.compile(only)
        self._begin = time.monotonic()
        self._output = output
        self.stopped = False
        output.mkdir(parents=True, exist_ok=True)
        self._log = output / f"{name}.log"
        self._log.write_text("")
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _stop)

    def left_seconds(self) -> float:
        return self._budget - (time.monotonic() - self._begin)

    def path(self, suffix: str) -> pathlib.Path:
        return self._output / f"{self.name}{suffix}"

    def program(self, title: str, argv: list[Any], limit_seconds: float, did_nothing: str | None = None) -> Step:
        """Passes when it exits with 0, unless one of its last lines is `did_nothing`: then it is skipped."""
        words = [os.fspath(word) for word in argv]
        return self._run(title, limit_seconds, os.execvp, words[0], words, did_nothing=did_nothing)

    def call(self, title: str, limit_seconds: float, function: Callable[..., Any], *arguments: Any) -> Step:
        """Passes when it returns. What it returns, made of what JSON has, is the step's result; of a generator that is
        the list of what it yielded, also when it fails or is cut off."""
        return self._run(title, limit_seconds, function, *arguments)

    def skip(self, title: str, why: str) -> Step:
        return self._add(Step(title, SKIPPED, detail=why))

    def leave_out(self, title: str, why: str) -> Step:
        return self._add(Step(title, LEFT_OUT, detail=why))

    def finish(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        bad = [step for step in self.steps if step.outcome not in (PASSED, SKIPPED)]
        counts = {outcome: sum(step.outcome == outcome for step in self.steps) for outcome in _OUTCOMES}
        lines = [*self.table, ""] if self.table else []
        for step in bad[:SHOWN_FAILURES]:
            lines.append(f"{step.outcome.upper()}: {step.title}: {step.detail}"[: 3 * SHOWN_COLUMNS])
            lines += [f"    {line[:SHOWN_COLUMNS]}" for line in step.tail[-SHOWN_LINES:]]
        lines += [f"... and {len(bad) - SHOWN_FAILURES} more, in {self.path('.json')}"] * (len(bad) > SHOWN_FAILURES)
        used = time.monotonic() - self._begin
        lines.append(
            f"{self.name}: {', '.join(f'{count} {outcome}' for outcome, count in counts.items() if count)} "
            f"in {used:.0f} of {self._budget:.0f} s; {self._log}"
        )
        text = "\n".join(lines)
        self.path(".txt").write_text(text + "\n")
        self._write()
        print(f"\n{text}", flush=True)
        return 1 if bad or counts[PASSED] == 0 else 0

    def _run(
        self,
        title: str,
        limit_seconds: float,
        function: Callable[..., Any],
        *arguments: Any,
        did_nothing: str | None = None,
    ) -> Step:
        if not self._only.search(title):
            return Step(title, NOT_ASKED_FOR)
        if self.stopped or self.left_seconds() < LEAST_SECONDS:
            return self.leave_out(title, "the run was ended" if self.stopped else "no time was left for it")
        limit = min(self._scale * limit_seconds, self.left_seconds())
        begin = time.monotonic()
        partial = self.path(".step")  # of the step that runs; what a kill from outside leaves of it
        results, theirs = os.pipe()
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            os.close(results)
            _be_step(partial, theirs, function, arguments)
        os.close(theirs)
        status, said = None, bytearray()
        try:
            _read_until_closed(results, begin + limit, said)
            status = _wait_until(pid, begin + limit)
        except Stopped as stopped:
            self.stopped = True
            limit = time.monotonic() - begin
            print(stopped, flush=True)
        finally:
            os.close(results)
            _end(pid, ended=status is not None)
        step = _judge(title, status, limit, said.decode().splitlines())
        step.seconds = time.monotonic() - begin
        step.tail = self._fold(step, partial)
        if step.outcome == PASSED and did_nothing in step.tail:
            step.outcome, step.detail = SKIPPED, "its log says why"
        return self._add(step)

    def _fold(self, step: Step, partial: pathlib.Path) -> list[str]:
        """Moves the step's output into the log; returns its last lines."""
        text = partial.read_bytes() if partial.exists() else b""
        partial.unlink(missing_ok=True)
        if len(text) > 2 * LOGGED_BYTES:
            gap = f"\n... {len(text) - 2 * LOGGED_BYTES} bytes left out ...\n".encode()
            text = text[:LOGGED_BYTES] + gap + text[-LOGGED_BYTES:]
        with self._log.open("ab") as log:
            log.write(f"== {step.title}: {step.outcome} after {step.seconds:.1f} s {step.detail}\n".encode())
            log.write(text + b"\n")
        return [line for line in text.decode(errors="replace").splitlines() if line.strip()][-KEPT_LINES:]

    def _add(self, step: Step) -> Step:
        self.steps.append(step)
        self._write()
        used = time.monotonic() - self._begin
        line = f"[{used:4.0f} s] {step.outcome:8} {step.title} ({step.seconds:.1f} s) {step.detail}"
        print(line[:SHOWN_COLUMNS], flush=True)
        return step

    def _write(self) -> None:
        report = {"name": self.name, "budget_seconds": self._budget, **self.facts}
        report["steps"] = [dataclasses.asdict(step) for step in self.steps]
        self.path(".json").write_text(json.dumps(report, indent=1) + "\n")


_OUTCOMES = (PASSED, FAILED, CUT_OFF, LEFT_OUT, SKIPPED)


def _be_step(output: pathlib.Path, results: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """The child: does not return."""
    code = 1
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        os.setsid()
        log = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        for descriptor, to in ((os.open(os.devnull, os.O_RDONLY), 0), (log, 1), (log, 2)):
            os.dup2(descriptor, to)
        faulthandler.enable(2)  # into the log, of all threads
        value = function(*arguments)
        if isinstance(value, types.GeneratorType):
            for part in value:
                _say(results, part=part)
        else:
            _say(results, result=value)
        code = 0
    except Unavailable as error:
        _say(results, unavailable=str(error))
        code = 0
    except BaseException as error:  # that of a step is no reason to end the session
        with contextlib.suppress(BaseException):
            traceback.print_exc()
            _say(results, error=f"{type(error).__name__}: {error}"[:600])
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
        os._exit(code)  # without what the session's process has registered


def _say(results: int, **what: Any) -> None:
    """A line to the session."""
    with os.fdopen(results, "w", closefd=False) as pipe:
        pipe.write(json.dumps(what) + "\n")


def _read_until_closed(descriptor: int, deadline: float, text: bytearray) -> None:
    """What the child says; a program that replaced it holds no end of the pipe, so that only its end is waited for."""
    while True:
        ready, *_ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        piece = os.read(descriptor, 1 << 16) if ready else b""
        if not piece:
            return
        text += piece


def _wait_until(pid: int, deadline: float) -> int | None:
    """The wait status, or None: it still runs."""
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended == pid:
            return status
        if time.monotonic() >= deadline:
            return None
        time.sleep(0.005)


def _judge(title: str, status: int | None, limit_seconds: float, lines: list[str]) -> Step:
    said: dict[str, Any] = {}
    parts = []
    for line in lines:
        with contextlib.suppress(json.JSONDecodeError):  # one that the end cut off
            said |= json.loads(line)
            parts += [said.pop("part")] if "part" in said else []
    result = said.get("result", parts or None)
    if status is None:
        return Step(title, CUT_OFF, detail=f"after {limit_seconds:.0f} s", result=result)
    if "unavailable" in said:
        return Step(title, SKIPPED, detail=said["unavailable"], result=result)
    if os.WIFSIGNALED(status):
        return Step(title, FAILED, detail=f"killed by {signal.Signals(os.WTERMSIG(status)).name}", result=result)
    code = os.WEXITSTATUS(status)
    if code != 0:
        return Step(title, FAILED, detail=said.get("error", f"exit status {code}"), result=result)
    return Step(title, PASSED, result=result)


@contextlib.contextmanager
def stopping_early(session: Session) -> Iterator[None]:
    """For what a subcommand does between its steps: SIGTERM there ends it, too, with a summary."""
    try:
        yield
    except Stopped as stopped:
        session.stopped = True
        session.leave_out("the rest", f"the run was ended by {stopped}")
