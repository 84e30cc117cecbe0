"""The keeper loses no optimizer: under few descriptors, when the daemon cannot start, stopped, killed itself."""

import contextlib
import fcntl
import json
import os
import pathlib
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time

import pytest
import torch
from tests.conftest import BINARY, Daemon
from tests.support.open_files import open_files
from tests.support.users import CTL, STRANGER, become, configured

import superoffload.torch
from superoffload._core.control import Connection
from superoffload._core.error import Error
from superoffload.v1 import optimizer_pb2 as pb

OFF = "--metrics_address=off"


def create(connection, *names):
    for name in names:
        request = pb.CreateOptimizerRequest(name=name, algorithm="adamw", groups=[pb.ParameterGroup()])
        request.parameters.add(name="weight", shape=[8], dtype=pb.DATA_TYPE_FLOAT32)
        connection.call("CreateOptimizer", request, timeout_seconds=30)


def names(connection):
    return {optimizer.name for optimizer in connection.call("ListOptimizers", pb.ListOptimizersRequest()).optimizers}


def children(pid):
    return [int(child) for child in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not (result := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return result


def connected(endpoint):
    try:
        return Connection(endpoint)
    except Error:
        return None


def reconnected(daemon):
    return wait_until(lambda: connected(daemon.endpoint))


def threads_children(pid):
    """Of all its threads: the daemon starts a keeper in one of them."""
    found = []
    for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended meanwhile
            found += [int(child) for child in (task / "children").read_text().split()]
    return found


@pytest.fixture
def few_descriptors():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, hard), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_soft_limit_of_1024_descriptors_costs_no_optimizer(few_descriptors):
    kept = Daemon("--keeper", OFF)
    many = {f"run-{i}" for i in range(230)}  # 1150 descriptors
    create(Connection(kept.endpoint), *many)
    for _ in range(2):
        (victim,) = children(kept.process.pid)
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda killed=victim: children(kept.process.pid) not in ([], [killed]))
        connection = reconnected(kept)
        assert names(connection) == many
    for name in many:  # a stop has a line in the log for each, and nobody reads it meanwhile
        connection.call("DeleteOptimizer", pb.DeleteOptimizerRequest(name=name))
    assert kept.stop() == 0, kept.log


def test_names_longer_than_a_variable_of_the_environment_cost_no_optimizer():
    kept = Daemon("--keeper", OFF)
    fcntl.fcntl(kept.process.stderr, fcntl.F_SETPIPE_SZ, 1 << 20)  # names are in the log as well, which nobody reads
    many = {f"{i:0128}" for i in range(200)}  # 143 kB with five descriptors each
    create(Connection(kept.endpoint), *many)
    (victim,) = children(kept.process.pid)
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: children(kept.process.pid) not in ([], [victim]))
    connection = reconnected(kept)
    assert names(connection) == many
    for name in many:
        connection.call("DeleteOptimizer", pb.DeleteOptimizerRequest(name=name))
    assert kept.stop() == 0, kept.log


def test_a_daemon_that_cannot_start_is_tried_again_until_it_can(tmp_path):
    config = tmp_path / "superoffloadd.textproto"
    config.write_text('metrics_address: "off"')
    kept = Daemon("--keeper", f"--config={config}")
    create(Connection(kept.endpoint), "run")
    config.write_text("a typo")
    (victim,) = children(kept.process.pid)
    os.kill(victim, signal.SIGKILL)
    tried = set()

    def several_failed():
        tried.update(children(kept.process.pid))
        return len(tried - {victim}) > 2

    wait_until(several_failed)
    config.write_text('metrics_address: "off"')
    kept.process.send_signal(signal.SIGHUP)
    assert names(reconnected(kept)) == {"run"}
    assert kept.stop() == 0, kept.log
    assert f"optimizer-{os.getuid()}-run" in kept.log  # what is held


def ctl(kept, *words):
    command = [CTL, f"--endpoint={kept.endpoint}", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_what_is_kept_can_be_listed_and_dropped_while_no_daemon_can_start(tmp_path):
    config = tmp_path / "superoffloadd.textproto"
    config.write_text('metrics_address: "off"')
    kept = Daemon("--keeper", f"--config={config}")
    create(Connection(kept.endpoint), "run", "gone")
    wait_until(lambda: len(ctl(kept, "kept").stdout.splitlines()) == 3)  # the daemon waits for no answer of its keeper
    refused = ctl(kept, "drop-kept", "gone")  # behind the daemon's back
    assert refused.returncode == 1 and "superoffloadctl delete" in refused.stderr

    config.write_text("a typo")
    (victim,) = children(kept.process.pid)
    os.kill(victim, signal.SIGKILL)
    listed = json.loads(ctl(kept, "kept", "--json").stdout)["optimizers"]
    assert {optimizer["name"] for optimizer in listed} == {"run", "gone"}
    assert all(int(optimizer["memory_bytes"]) > 0 for optimizer in listed)
    missing = ctl(kept, "drop-kept", "neither")
    assert missing.returncode == 1 and "NOT_FOUND" in missing.stderr
    wait_until(lambda: ctl(kept, "drop-kept", "gone").returncode == 0)  # refused while a daemon is being tried

    config.write_text('metrics_address: "off"')
    kept.process.send_signal(signal.SIGHUP)
    assert names(reconnected(kept)) == {"run"}
    assert kept.stop() == 0, kept.log
    assert f"optimizer-{os.getuid()}-gone was dropped" in kept.log


def test_a_daemon_that_never_started_ends_its_keeper(tmp_path):
    config = tmp_path / "superoffloadd.textproto"
    config.write_text("a typo")
    with pytest.raises(AssertionError, match="superoffloadd.textproto"):
        Daemon("--keeper", f"--config={config}")


def test_a_taken_metrics_port_is_no_reason_to_end():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        metered = Daemon(f"--metrics_address=127.0.0.1:{taken.getsockname()[1]}")
        assert metered.info.metrics_address == ""
        assert metered.stop() == 0
        assert "no metrics" in metered.log


def test_a_killed_keeper_is_replaced_and_gets_the_memory():
    kept = Daemon("--keeper", OFF)
    connection = Connection(kept.endpoint)
    create(connection, "before")
    (daemon,) = children(kept.process.pid)
    for generation in range(2):
        keeper = kept.process.pid if generation == 0 else threads_children(daemon)[0]
        os.kill(keeper, signal.SIGKILL)
        kept.process.wait()
        wait_until(lambda killed=keeper: threads_children(daemon) not in ([], [killed]))
        create(connection, f"after-{generation}")  # the same daemon serves on
    (keeper,) = threads_children(daemon)
    os.kill(daemon, signal.SIGKILL)
    wait_until(lambda: children(keeper))
    assert names(reconnected(kept)) == {"before", "after-0", "after-1"}
    os.kill(keeper, signal.SIGTERM)
    wait_until(lambda: not os.path.exists(f"/proc/{keeper}"))
    kept.channel.close()


def start_alone(directory, *redirections, passed=(), **environment):
    """A daemon without a keeper, perhaps as systemd starts it."""
    script = f'LISTEN_PID=$$ exec "$0" "$@" {" ".join(redirections)}'
    return subprocess.Popen(
        ["/bin/bash", "-c", script, BINARY, f"--runtime_directory={directory}", OFF],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
        pass_fds=passed,
    )


def is_kept_off(directory):
    thief = start_alone(directory)
    assert thief.wait(60) == 1
    return "is about to be started again with its optimizers" in thief.stderr.read()


def test_nobody_takes_the_directory_while_the_keeper_is_about_to_start_the_next_daemon():
    kept = Daemon("--keeper", OFF)
    create(Connection(kept.endpoint), "run")
    for _ in range(2):  # the second one has inherited the directory
        (daemon,) = children(kept.process.pid)
        os.kill(kept.process.pid, signal.SIGSTOP)
        os.kill(daemon, signal.SIGKILL)
        assert is_kept_off(kept.directory.name)
        os.kill(kept.process.pid, signal.SIGCONT)
        assert names(reconnected(kept)) == {"run"}
    kept.process.terminate()
    assert kept.process.wait(60) == 0
    alone = start_alone(kept.directory.name)  # a keeper that was stopped keeps nothing
    wait_until(lambda: connected(kept.endpoint))
    alone.terminate()
    assert alone.wait(60) == 0
    kept.channel.close()
    kept.directory.cleanup()


def test_systemd_keeps_the_directory_with_the_optimizers(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.bind(str(tmp_path / "notify"))
        notify.settimeout(60)
        first = start_alone(tmp_path, NOTIFY_SOCKET=str(tmp_path / "notify"))
        stored = []
        while not stored:
            message, stored, _, _ = socket.recv_fds(notify, 4096, 8)
        assert b"FDNAME=succession" in message.splitlines()
    first.kill()
    first.wait()
    assert is_kept_off(tmp_path)
    again = start_alone(tmp_path, f"3<&{stored[0]}", passed=stored, LISTEN_FDS="1", LISTEN_FDNAMES="succession")
    assert names(wait_until(lambda: connected(f"unix:{tmp_path}/control.sock"))) == set()
    again.terminate()
    assert again.wait(60) == 0
    for descriptor in stored:
        os.close(descriptor)


def test_a_stopped_keeper_hangs_nobody_and_gets_everything_later():
    kept = Daemon("--keeper", OFF)
    connection = Connection(kept.endpoint)
    (daemon,) = children(kept.process.pid)
    os.kill(kept.process.pid, signal.SIGSTOP)
    many = {f"run-{i}" for i in range(100)}
    create(connection, *many)
    for name in many - {"run-7"}:  # more messages than the socket holds
        for _ in range(2):
            connection.call("DeleteOptimizer", pb.DeleteOptimizerRequest(name=name), timeout_seconds=30)
            create(connection, name)
    connection.call("DeleteOptimizer", pb.DeleteOptimizerRequest(name="run-7"), timeout_seconds=30)
    os.kill(kept.process.pid, signal.SIGCONT)
    create(connection, "last", "very-last")

    wait_until(
        lambda: (
            sum("memfd:superoffload" in file for file in open_files(kept.process.pid).values()) == 5 * (len(many) + 1)
        )
    )
    os.kill(daemon, signal.SIGKILL)
    assert names(reconnected(kept)) == many - {"run-7"} | {"last", "very-last"}
    assert kept.stop() == 0, kept.log
    assert "the keeper reads no messages" in kept.log


def stops_on_a_hanging_disk(tmp_path, disk):
    """A keeper with two optimizers to keep on disk, whose daemon has got SIGTERM and hangs in its first write."""
    kept = configured(tmp_path, f'stop_checkpoints {{ directory: "{tmp_path}/kept" }}', "--keeper")
    for name in ("run", "other"):
        superoffload.torch.AdamW([torch.nn.Parameter(torch.ones(64))], endpoint=kept.endpoint, name=name).close()
    disk.write_text("hang")
    kept.process.send_signal(signal.SIGTERM)
    return kept


def kill_while_it_saves(kept, directory):
    wait_until(lambda: any(directory.glob(".new-*/.*.partial")))
    (victim,) = children(kept.process.pid)
    shutil.rmtree(next(directory.glob(".new-*")))  # the next daemon's is told from it
    return victim


def test_a_daemon_killed_while_it_stops_is_started_again_to_keep_the_rest(tmp_path, disk):
    kept = stops_on_a_hanging_disk(tmp_path, disk)
    victim = kill_while_it_saves(kept, tmp_path / "kept")
    disk.write_text("ok")
    os.kill(victim, signal.SIGKILL)
    status, log = kept.process.wait(60), kept.process.stderr.read()
    saved = {entry.name for entry in (tmp_path / "kept").iterdir()}
    assert saved == {f"{os.geteuid()}-run", f"{os.geteuid()}-other"}, log
    assert status == 0 and "to finish that" in log and "dropped" not in log, log
    kept.channel.close()


def test_a_daemon_killed_at_every_stop_ends_its_keeper_with_a_word(tmp_path, disk):
    kept = stops_on_a_hanging_disk(tmp_path, disk)
    for _ in range(4):
        os.kill(kill_while_it_saves(kept, tmp_path / "kept"), signal.SIGKILL)
    status, log = kept.process.wait(60), kept.process.stderr.read()
    assert status == 1 and log.count("to finish that") == 3, log
    last = log.splitlines()[-1]
    assert "the keeper drops" in last and "-run" in last and "-other" in last, log
    kept.channel.close()


FILLS_QUEUES = """
    import array, itertools, resource, socket, sys
    resource.setrlimit(resource.RLIMIT_NOFILE, (4000, 4000))
    file, pairs = sys.stdin.fileno(), []
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [file] * 250))]
    for _ in range(12):
        pairs.append(socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        pairs[-1][0].sendmsg([b"."], rights)
    print("full", flush=True)
    sys.stdin.read()
"""


def name_of(thread: pathlib.Path) -> str:
    """Nothing where the thread has ended since it was listed."""
    try:
        return (thread / "comm").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def test_where_the_kernel_passes_no_descriptors_the_daemon_says_so_and_does_it_later_and_rests_meanwhile(tmp_path):
    """A user may have so many descriptors on their way, whichever of its processes has sent them."""
    directory = pathlib.Path(tempfile.mkdtemp(prefix="so-test-", dir="/tmp"))
    os.chown(directory, STRANGER, STRANGER)
    endpoint = f"unix:{directory}/control.sock"
    command = [BINARY, "--keeper", OFF, f"--runtime_directory={directory}"]
    with open(tmp_path / "log", "w") as log:
        few = ["prlimit", "--nofile=1024:1024", *become(STRANGER, "--clear-groups")]
        keeper = subprocess.Popen([*few, *command], stderr=log)
    program = [*become(STRANGER, "--clear-groups"), sys.executable, "-c", textwrap.dedent(FILLS_QUEUES)]
    filler = None
    try:
        wait_until(lambda: os.path.exists(directory / "control.sock"))
        connection = Connection(endpoint)
        create(connection, "before")
        filler = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert filler.stdout.readline() == "full\n"
        create(connection, "after")
        (daemon,) = children(keeper.pid)
        (thread,) = (task for task in pathlib.Path(f"/proc/{daemon}/task").iterdir() if "so-keeper" in name_of(task))

        def ticks():
            return sum(map(int, (thread / "stat").read_text().rpartition(")")[2].split()[11:13]))

        used = ticks()
        time.sleep(2)
        assert ticks() - used < os.sysconf("SC_CLK_TCK") / 2
        filler.communicate("", timeout=60)
        time.sleep(1)  # ten times the pause
        os.kill(daemon, signal.SIGKILL)
        wait_until(lambda: children(keeper.pid) not in ([], [daemon]))
        assert names(wait_until(lambda: connected(endpoint))) == {"before", "after"}
    finally:
        if filler is not None:
            filler.kill()
        keeper.terminate()
        assert keeper.wait(60) == 0
        shutil.rmtree(directory)
    assert "Too many references" in (tmp_path / "log").read_text()


def test_the_keeper_has_no_address_that_another_user_could_take():
    kept = Daemon("--keeper", OFF)
    (daemon,) = children(kept.process.pid)
    own = {*open_files(kept.process.pid).values(), *open_files(daemon).values()}
    named = [
        words[7]
        for words in map(str.split, pathlib.Path("/proc/net/unix").read_text().splitlines()[1:])
        if len(words) > 7 and f"socket:[{words[6]}]" in own
    ]
    assert not [name for name in named if name.startswith("@")]
    assert kept.stop() == 0


@pytest.mark.parametrize("old", ["deleted", "moved"])  # as packages do it, and as pip does it
def test_an_upgraded_program_is_what_the_keeper_starts_next(tmp_path, monkeypatch, old):
    program = tmp_path / "superoffloadd"
    shutil.copy(os.environ["SUPEROFFLOAD_DAEMON"], program)
    monkeypatch.setattr("tests.conftest.BINARY", str(program))
    kept = Daemon("--keeper", OFF)
    create(Connection(kept.endpoint), "run")
    (victim,) = children(kept.process.pid)
    shutil.copy(program, tmp_path / "upgraded")
    if old == "moved":
        program.rename(tmp_path / "stashed")
    (tmp_path / "upgraded").replace(program)
    os.kill(victim, signal.SIGKILL)
    assert names(reconnected(kept)) == {"run"}
    (successor,) = wait_until(lambda: children(kept.process.pid))
    assert successor != victim and os.readlink(f"/proc/{successor}/exe") == str(program)
    assert kept.stop() == 0, kept.log
