"""A private daemon: one per process, or one for all ranks that a launcher has started on this machine.

Its runtime directory has, beside its sockets and log:

- ``stdin``, a FIFO that the daemon reads. Every user holds it open for writing. So the daemon ends when the last user
  has ended, however it ended, and a user sees at the FIFO that the daemon is dead.
- ``users``, locked shared by every user. Who can lock it exclusively may remove the directory.
- ``door``, locked while somebody joins, leaves or removes.
- ``pid``, the daemon's.

Who removes it renames it first, so that its name leads to a whole directory or to none. Who comes meanwhile makes
another.
"""

import atexit
import contextlib
import fcntl
import hashlib
import os
import pathlib
import re
import select
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator

import grpc

from superoffload._core import fair_share, library, owner, programs
from superoffload._core.error import Error

_START_TIMEOUT_SECONDS = 60
_STOP_TIMEOUT_SECONDS = 30
_POLL_SECONDS = 0.005
_PREFIX = "superoffloadd-"
_REMOVED = ".removed-"
_SERVICES = re.compile(r"\d+(-\d+)?")  # a user's own daemon, and those of several Superchips
_STARTED = (
    "superoffload: started a private superoffloadd (pid {pid}, on {cores} cores); it ends with the "
    "last process that uses it, and its optimizers with it: to keep them, run `superoffloadd --keeper` or "
    "`superoffloadctl install-service` first"
)
_LONGEST_SOCKET = 107  # bytes that the kernel takes as the path of a unix socket
CONTROL_SOCKET = "control.sock"
_SOCKET = "descriptors.sock"  # the longer one
_LAUNCHED = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID")

_workers_share: float | None = None


def set_workers_share(share: float) -> None:
    """A daemon that is started from now on runs its kernels on this part of its cores, 0 to 1."""
    global _workers_share
    _workers_share = share


def _binary() -> str:
    """Raises Error; when the client library is missing as well the error says so, too."""
    path = programs.daemon()
    problems = []
    if path is None:
        problems.append(
            "no superoffloadd is running and none is installed: start one, pass endpoint=, or point "
            f"${programs.DAEMON_ENVIRONMENT} at the binary"
        )
    elif not (os.path.isfile(path) and os.access(path, os.X_OK)):
        problems.append(
            f"${programs.DAEMON_ENVIRONMENT} is {path}, which is no program that can be run: point it at superoffloadd"
        )
    try:
        library.load()
    except Error as error:
        problems.append(error.message)
    if problems or path is None:
        raise Error(grpc.StatusCode.UNAVAILABLE, "; and ".join(problems))
    return path


def _base() -> str:
    """A directory for runtime directories, whose sockets' paths are short enough."""
    for base in (tempfile.gettempdir(), "/tmp", "/dev/shm"):
        longest = os.path.join(base, f"{_PREFIX}{'x' * 16}", _SOCKET)
        if len(os.fsencode(longest)) <= _LONGEST_SOCKET and os.access(base, os.W_OK | os.X_OK):
            return base
    raise Error(
        grpc.StatusCode.UNAVAILABLE,
        f"there is no directory for the sockets of a private superoffloadd: {tempfile.gettempdir()} is too long or not "
        "writable, and so are /tmp and /dev/shm; set TMPDIR to a short path",
    )


def _ranks() -> int:
    """Processes of this launch that share a daemon."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or "1"
    return int(ranks) if "MASTER_PORT" in os.environ and ranks.isdecimal() else 1


def _secret() -> str:
    """Of this user: nobody else can tell the name of a launch's directory, and make it first.

    Empty where the user has no home to write to: a directory that another user has made is refused then.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    path = pathlib.Path(cache, "superoffload", "launch-secret")
    with contextlib.suppress(OSError):
        if not path.exists():
            _make_secret(path)
    try:
        return path.read_text()
    except OSError:
        return ""


def _make_secret(path: pathlib.Path) -> None:
    """Whole, and by the first one who does. Raises OSError where it is there meanwhile, or cannot be made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    mine = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        mine.touch(0o600)
        mine.write_text(uuid.uuid4().hex)
        os.link(mine, path)
    finally:
        mine.unlink(missing_ok=True)


def _runtime_directory(binary: str) -> str:
    """Of this process, or the same for all ranks of a launch that use the same daemon."""
    if _ranks() == 1:
        return tempfile.mkdtemp(prefix=_PREFIX, dir=_base())
    launch = [_secret(), str(os.geteuid()), binary, *(os.environ.get(name, "") for name in _LAUNCHED)]
    digest = hashlib.sha256("\0".join(launch).encode()).hexdigest()
    directory = os.path.join(_base(), f"{_PREFIX}{digest[:16]}")
    with contextlib.suppress(FileExistsError):
        os.mkdir(directory, 0o700)
    return directory


def _check_mine(directory: str) -> None:
    found = os.lstat(directory)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise Error(
            grpc.StatusCode.PERMISSION_DENIED,
            f"{directory} is not a directory of yours alone, so no private superoffloadd is started there; remove it "
            "or set TMPDIR",
        )


@contextlib.contextmanager
def _locked(directory: str, wait: bool = True) -> Iterator[None]:
    """Holds the directory's lock; makes the directory if it has been removed meanwhile."""
    while True:
        path = os.path.join(directory, "door")
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(directory, 0o700)
            _check_mine(directory)
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.exists(path) and os.path.samestat(os.fstat(lock), os.stat(path)):
                yield
                return
        finally:
            os.close(lock)


def _lock_users(directory: str, operation: int) -> int | None:
    """A descriptor that holds the lock of the users' file; None when somebody else's does not allow LOCK_NB."""
    users = os.open(os.path.join(directory, "users"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(users, operation)
    except BlockingIOError:
        os.close(users)
        return None
    return users


def _remove(directory: str) -> None:
    """To be called with both locks. A daemon that is still stopping has its directory open."""
    aside = f"{directory}{_REMOVED}{uuid.uuid4().hex}"
    os.rename(directory, aside)
    shutil.rmtree(aside, ignore_errors=True)


def remove_leftovers(base: str) -> None:
    """Removes runtime directories whose users were all killed."""
    for name in os.listdir(base):
        directory = os.path.join(base, name)
        if not name.startswith(_PREFIX) or _SERVICES.fullmatch(name.removeprefix(_PREFIX)):
            continue
        with contextlib.suppress(OSError, Error):
            _check_mine(directory)
            if _REMOVED in name:  # somebody was killed over it, or a daemon that was starting has put files there
                shutil.rmtree(directory, ignore_errors=True)
                continue
            if not os.path.exists(os.path.join(directory, "door")):
                os.rmdir(directory)  # who is just coming makes it again
                continue
            with _locked(directory, wait=False):
                users = _lock_users(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if users is not None:
                    _remove(directory)
                    os.close(users)


class PrivateDaemon:
    """This process's use of one."""

    def __init__(self, answers: Callable[[str], bool]) -> None:
        """Starts one, or joins that of the other ranks. ``answers`` tells whether a daemon does at an endpoint."""
        binary = _binary()
        remove_leftovers(_base())
        self.directory = _runtime_directory(binary)
        self.endpoint = f"unix:{self.directory}/{CONTROL_SOCKET}"
        self._answers = answers
        self._process: subprocess.Popen | None = None
        self._users: int | None = None
        self._stdin: int | None = None
        while not self._enter(binary):
            pass
        owner.own(self)
        atexit.register(self.leave)

    def _enter(self, binary: str) -> bool:
        """False when the directory was that of a launch whose processes were all killed; it is gone then."""
        with _locked(self.directory):
            users = _lock_users(self.directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if users is None:  # others use it
                users = _lock_users(self.directory, fcntl.LOCK_SH)
            elif os.path.exists(self._path("stdin")):
                _remove(self.directory)
                os.close(users)
                return False
            else:
                fcntl.flock(users, fcntl.LOCK_SH)
            self._users = users
            try:
                if not self._join():
                    self._start(binary)
            except BaseException:
                self._leave()
                raise
        return True

    def _path(self, name: str) -> str:
        return os.path.join(self.directory, name)

    def _join(self) -> bool:
        try:
            self._stdin = os.open(self._path("stdin"), os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:  # there is none, or nobody reads it
            return False
        return self._answers(self.endpoint)

    def _start(self, binary: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.remove(self._path("stdin"))
        os.mkfifo(self._path("stdin"), 0o600)
        reader = os.open(self._path("stdin"), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            self._stdin = os.open(self._path("stdin"), os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.set_blocking(reader, True)
            with open(self._path("log"), "wb") as log, fair_share.cores_of(_ranks()) as cores:
                memory = fair_share.memory_bytes()
                workers = None if _workers_share is None else max(1, round(_workers_share * cores))
                self._process = subprocess.Popen(
                    [
                        binary,
                        f"--runtime_directory={self.directory}",
                        "--metrics_address=127.0.0.1:0",
                        "--exit_on_stdin_eof",
                        *([f"--memory_budget_bytes={memory}"] if memory is not None else []),
                        *([f"--worker_threads={workers}"] if workers is not None else []),
                    ],
                    stdin=reader,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # a terminal's ^C is for the trainer, which then stops its daemon
                )
        except OSError as error:
            raise Error(grpc.StatusCode.UNAVAILABLE, f"cannot run {binary}: {error}; is it superoffloadd?") from error
        finally:
            os.close(reader)
        pathlib.Path(self._path("pid")).write_text(str(self._process.pid))
        deadline = time.monotonic() + _START_TIMEOUT_SECONDS
        while not (os.path.exists(self._path(CONTROL_SOCKET)) and self._answers(self.endpoint)):
            if (death := self.death()) is not None or time.monotonic() > deadline:
                reason = death or f"it does not answer after {_START_TIMEOUT_SECONDS} seconds"
                raise Error(
                    grpc.StatusCode.UNAVAILABLE, f"the private superoffloadd ({binary}) did not start: {reason}"
                )
            time.sleep(_POLL_SECONDS)
        print(_STARTED.format(pid=self._process.pid, cores=cores), file=sys.stderr, flush=True)

    def _dead(self) -> bool:
        if self._stdin is None:
            return False
        poll = select.poll()
        poll.register(self._stdin, 0)
        return bool(poll.poll(0))  # POLLERR: nobody reads

    @property
    def usable(self) -> bool:
        """By this process, which may be a forked child of the one that made this, and with a daemon that runs."""
        return self._users is not None and self.death() is None

    def death(self) -> str | None:
        """How it ended; None while it runs."""
        if self._stdin is None or not self._dead():
            return None
        if self._process is None:
            return f"it is gone; its log is {self._path('log')}"
        status = self._process.wait()
        how = f"it was killed by signal {-status}" if status < 0 else f"it exited with status {status}"
        with contextlib.suppress(OSError):
            lines = pathlib.Path(self._path("log")).read_text(errors="replace").strip().splitlines()
            how += f"; the last line of its log: {lines[-1]}" if lines else ""
        return how

    def leave(self) -> None:
        """The last user stops it."""
        if self._users is None:
            return
        with _locked(self.directory):
            self._leave()

    def _leave(self) -> None:
        if self._users is not None:
            fcntl.flock(self._users, fcntl.LOCK_UN)  # a forked child has the same lock open
            os.close(self._users)
            self._users = None
        users = _lock_users(self.directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if users is not None:
            self._stop()
            _remove(self.directory)
            os.close(users)
        if self._stdin is not None:
            os.close(self._stdin)
            self._stdin = None
        if users is not None and self._process is not None:
            self._process.wait()

    def _stop(self) -> None:
        if self._stdin is None or self._dead():
            return
        pid = int(pathlib.Path(self._path("pid")).read_text())
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
            poll = select.poll()
            poll.register(self._stdin, 0)
            if not poll.poll(1000 * _STOP_TIMEOUT_SECONDS):
                os.kill(pid, signal.SIGKILL)

    def disown(self) -> None:
        for descriptor in (self._users, self._stdin):
            if descriptor is not None:
                os.close(descriptor)  # without unlocking: the parent's lock stays
        self._users = self._stdin = self._process = None
        atexit.unregister(self.leave)
