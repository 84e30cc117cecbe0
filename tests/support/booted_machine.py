"""A Debian root that is booted under its own systemd (systemd-nspawn). It needs root."""

import contextlib
import os
import pathlib
import signal
import subprocess
import time


def spawn(root, *flags):
    """The words of a container in ``root``, without a network of its machine's."""
    base = ["systemd-nspawn", "-q", "-D", root, "--register=no", "--keep-unit", "--private-network", "--console=pipe"]
    return [*base, *flags]


class BootedMachine:
    """``flags``: of systemd-nspawn. Called with the words of a command, it runs the command inside."""

    def __init__(self, root, *flags):
        self.process = subprocess.Popen(
            [*spawn(root, *flags), "-b"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            self.leader = self._wait_leader()
            self.wait(self._runs)
        except BaseException:
            self.process.terminate()
            self.process.wait()
            raise

    def _runs(self):
        return self("systemctl", "is-system-running", check=False).stdout.strip() in ("running", "degraded")

    def _wait_leader(self):
        children = pathlib.Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")

        def leader():
            """systemd-nspawn has a child that makes the container, and then the container's init."""
            for child in children.read_text().split():
                with contextlib.suppress(OSError):
                    if pathlib.Path(f"/proc/{child}/comm").read_text() == "systemd\n":
                        return child
            return None

        self.wait(lambda: self.process.poll() is not None or leader())
        assert self.process.poll() is None, "systemd-nspawn does not work here"
        return leader()

    def _inside(self, words):
        return ["nsenter", "-t", self.leader, "-m", "-u", "-i", "-n", "-p", "-C", *map(str, words)]

    def __call__(self, *words, check=True, timeout=60):
        done = subprocess.run(self._inside(words), capture_output=True, text=True, timeout=timeout)
        assert not check or done.returncode == 0, (words, done.stdout, done.stderr, self.journal())
        return done

    def journal(self, unit="superoffloadd@0.service"):
        return self("journalctl", "--no-pager", "-n", "60", "-u", unit, check=False).stdout

    def start(self, *words):
        return subprocess.Popen(self._inside(words), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    @staticmethod
    def wait(condition, seconds=240):
        """Returns what the condition returns once that is true."""
        deadline = time.monotonic() + seconds
        while not (result := condition()):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return result

    def kill(self):
        os.kill(int(self.leader), signal.SIGKILL)
        self.process.wait(60)

    def stop(self):
        self("systemctl", "poweroff", check=False)
        self.process.wait(60)
