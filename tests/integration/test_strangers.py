"""What another user of the machine can do to a daemon and to those who look for one."""

import contextlib
import ctypes
import os
import pathlib
import signal
import struct
import subprocess
import sys
import tempfile
import textwrap
import time

import grpc
import pytest
import torch
from tests import conftest
from tests.conftest import BINARY, Daemon
from tests.support.users import CTL, FRIEND, STRANGER, TRAINER, become, configured, ctl, request

import superoffload.torch
from superoffload._core.control import Connection
from superoffload.v1 import optimizer_pb2 as pb

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="acting as other users needs root")


@pytest.fixture
def shared(tmp_path_factory):
    """A directory that every user may enter."""
    with tempfile.TemporaryDirectory(prefix="so-test-") as directory:
        os.chmod(directory, 0o755)
        yield pathlib.Path(directory)


def python_of(user, code):
    """A process that imports as this user, who may read the interpreter, and goes on as that one."""
    prelude = f"""
        import grpc, os, socket, warnings
        from superoffload._core import control, daemon
        from superoffload.v1 import optimizer_pb2 as pb, optimizer_pb2_grpc
        os.setresuid({user}, {user}, {user})
        """
    return [sys.executable, "-c", textwrap.dedent(prelude) + textwrap.dedent(code)]


def run_python(code, user, **environment):
    return subprocess.run(
        python_of(user, code), capture_output=True, text=True, timeout=60, env={**os.environ, **environment}
    )


def start(directory, *flags, **arguments):
    return subprocess.run(
        [BINARY, f"--runtime_directory={directory}", "--metrics_address=off", *flags],
        capture_output=True,
        text=True,
        timeout=60,
        **arguments,
    )


def keep_little_of_what_is_freed(monkeypatch):
    """A daemon with AddressSanitizer holds back 256 MiB of freed memory unless it is asked not to."""
    options = os.environ.get("ASAN_OPTIONS", "")
    monkeypatch.setenv("ASAN_OPTIONS", f"{options}:quarantine_size_mb=8:thread_local_quarantine_size_kb=64")


SHADOWS = 4 if "TSAN_OPTIONS" in os.environ else 1  # ThreadSanitizer has several bytes of its own for each of ours


def status_bytes(daemon, field):
    status = pathlib.Path(f"/proc/{daemon.process.pid}/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0]) << 10


def peak_bytes(daemon):
    return status_bytes(daemon, "VmHWM")


def test_a_daemon_does_not_serve_in_the_directory_of_another_user(shared):
    theirs = shared / "theirs"
    theirs.mkdir()
    os.chown(theirs, STRANGER, STRANGER)
    started = start(theirs)
    assert started.returncode == 1
    assert f"belongs to uid {STRANGER}" in started.stderr
    assert not list(theirs.iterdir())


def test_a_daemon_does_not_serve_where_others_may_write(shared):
    open_to_all = shared / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o1777)
    assert "chmod 0755" in start(open_to_all).stderr


def test_a_daemon_follows_no_link_in_its_directory(shared):
    runtime, target = shared / "run", shared / "target"
    runtime.mkdir()
    (runtime / "lock").symlink_to(target)
    assert start(runtime).returncode == 1
    assert not target.exists()


@contextlib.contextmanager
def daemon_of(user, directory):
    as_user = become(user, f"--regid={user}", "--keep-groups")
    command = [*as_user, BINARY, f"--runtime_directory={directory}", "--metrics_address=off"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert "serves" in process.stderr.readline()
    yield
    process.terminate()
    assert process.wait(60) == 0


def squatted(shared):
    """Where STRANGER looks for a daemon first, and FRIEND has put one."""
    place = shared / "superoffloadd"
    place.mkdir()
    os.chown(place, FRIEND, FRIEND)
    return daemon_of(FRIEND, place)


def test_a_python_trainer_does_not_take_the_daemon_of_another_user_for_its_own(shared):
    with squatted(shared):
        found = run_python(
            """
            warnings.simplefilter("error")
            print(daemon.resolve_endpoint(None))
            """,
            STRANGER,
            XDG_RUNTIME_DIR=str(shared),
            SUPEROFFLOAD_DAEMON="/nowhere",
        )
        assert found.returncode == 1 and not found.stdout, found.stdout
        assert str(FRIEND) in found.stderr and "SUPEROFFLOAD_ENDPOINT" in found.stderr
        named = run_python(
            "print(daemon.resolve_endpoint(None))",
            STRANGER,
            SUPEROFFLOAD_ENDPOINT=f"unix:{shared}/superoffloadd/control.sock",
        )
        assert named.stdout.strip().endswith("control.sock"), named.stderr


def test_a_cpp_client_does_not_take_the_daemon_of_another_user_for_its_own(shared):
    with squatted(shared):
        environment = {"XDG_RUNTIME_DIR": str(shared)}
        arguments = {"capture_output": True, "text": True, "timeout": 60, "user": STRANGER, "env": environment}
        found = subprocess.run([CTL, "info"], **arguments)
        assert found.returncode == 1 and not found.stdout, found.stdout
        assert f"uid {FRIEND}" in found.stderr
        named = subprocess.run([CTL, f"--endpoint=unix:{shared}/superoffloadd/control.sock", "info"], **arguments)
        assert named.returncode == 0, named.stderr


def test_a_token_is_of_no_use_to_another_user(daemon):
    os.chmod(daemon.directory.name, 0o755)
    connection = Connection(daemon.endpoint)
    token = connection._session.metadata[0][1]
    code = f"""
        channel = grpc.insecure_channel("{daemon.endpoint}")
        stub = optimizer_pb2_grpc.OptimizerServiceStub(channel)
        try:
            stub.ListOptimizers(pb.ListOptimizersRequest(), metadata=[("superoffload-token", "{token}")], timeout=30)
            print("OK")
        except grpc.RpcError as error:
            print(error.code().name, error.details())
        """
    assert run_python(code, 0).stdout.strip() == "OK"
    stolen = run_python(code, STRANGER)
    assert "UNAUTHENTICATED" in stolen.stdout and str(STRANGER) in stolen.stdout, stolen.stdout + stolen.stderr


def test_a_user_that_is_revoked_has_neither_attachment_nor_token(tmp_path, shared):
    daemon = configured(tmp_path, f"allowed_uids: [{STRANGER}]")
    os.chmod(daemon.directory.name, 0o755)
    (shared / "text").write_text("to be or not to be " * 100)
    trainer = subprocess.Popen(
        [*become(STRANGER), TRAINER, f"--text={shared}/text", f"--endpoint={daemon.endpoint}", "--steps=100000000"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    while "bigram" not in ctl(daemon, "list", user=STRANGER).stdout:
        assert trainer.poll() is None
    (tmp_path / "superoffloadd.textproto").write_text("allowed_uids: 1")
    daemon.process.send_signal(signal.SIGHUP)
    assert trainer.wait(60) != 0
    connection = Connection(daemon.endpoint)
    while connection.call("GetOptimizer", pb.GetOptimizerRequest(name="bigram")).attached:
        pass
    connection.close()
    assert daemon.stop() == 0


def test_a_revoked_user_creates_nothing_over_an_open_connection(tmp_path):
    daemon = configured(tmp_path, f"allowed_uids: [{STRANGER}]")
    os.chmod(daemon.directory.name, 0o755)
    client = subprocess.Popen(
        python_of(
            STRANGER,
            f"""
            connection = control.Connection("{daemon.endpoint}")
            print("connected", flush=True)
            input()
            try:
                connection.call("ListOptimizers", pb.ListOptimizersRequest())
                print("OK")
            except Exception as error:
                print(error)
            """,
        ),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert client.stdout.readline() == "connected\n"
    (tmp_path / "superoffloadd.textproto").write_text("allowed_uids: 1")
    daemon.process.send_signal(signal.SIGHUP)
    assert any("reloaded" in line for line in iter(daemon.process.stderr.readline, ""))
    assert "UNAUTHENTICATED" in client.communicate("\n", timeout=60)[0]
    assert daemon.stop() == 0


def test_a_stranger_with_many_connections_locks_nobody_out(tmp_path, monkeypatch):
    limited = tmp_path / "limited"
    limited.write_text(f'#!/bin/sh\nulimit -n 512\nexec {BINARY} "$@"\n')
    limited.chmod(0o755)
    monkeypatch.setattr(conftest, "BINARY", str(limited))
    daemon = Daemon("--metrics_address=off")
    os.chmod(daemon.directory.name, 0o755)
    code = f"""
        held = []
        for path, kind in (("control.sock", socket.SOCK_STREAM), ("descriptors.sock", socket.SOCK_SEQPACKET)):
            for _ in range(600):
                peer = socket.socket(socket.AF_UNIX, kind)
                peer.connect("{daemon.directory.name}/" + path)
                held.append(peer)
        print("held", flush=True)
        input()
        """
    flood = subprocess.Popen(python_of(STRANGER, code), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert flood.stdout.readline() == "held\n"
    served = ctl(daemon, "list", user=FRIEND)
    assert served.returncode == 0, served.stderr
    connection = Connection(daemon.endpoint)
    connection.call("CreateOptimizer", request("roots"))
    connection.close()
    flood.communicate("\n", timeout=60)
    assert daemon.stop() == 0


def test_the_sockets_are_never_missing_while_a_successor_starts(shared):
    """Trainers take a missing socket for a daemon that was stopped on purpose."""
    runtime = shared / "run"
    command = [BINARY, f"--runtime_directory={runtime}", "--metrics_address=off"]
    first = subprocess.Popen(command, stderr=subprocess.PIPE)
    assert b"serves" in first.stderr.readline()
    first.kill()
    first.wait()
    libc = ctypes.CDLL(None)
    moved_to, deleted = 0x80, 0x200
    watch = libc.inotify_init1(0)
    assert libc.inotify_add_watch(watch, bytes(runtime), moved_to | deleted) > 0
    second = subprocess.Popen(command, stderr=subprocess.PIPE)
    assert b"serves" in second.stderr.readline()
    events = []
    data = os.read(watch, 65536)
    while data:
        _, mask, _, length = struct.unpack_from("iIII", data)
        events.append((data[16 : 16 + length].rstrip(b"\0").decode(), mask))
        data = data[16 + length :]
    os.close(watch)
    for name in ("control.sock", "descriptors.sock"):
        assert (name, moved_to) in events and (name, deleted) not in events, events
    second.terminate()
    assert second.wait(60) == 0


def test_a_name_neither_forges_lines_nor_reaches_a_terminal(daemon):
    evil = request("o")
    evil.parameters[0].name = "w\n\x1b[2Jforged"
    connection = Connection(daemon.endpoint)
    connection.call("CreateOptimizer", evil)
    shown = ctl(daemon, "describe", "o").stdout
    assert "w\\x0a\\x1b[2Jforged" in shown and "\x1b" not in shown
    missing = ctl(daemon, "restore", "o", "/nowhere\n\x1b[2J")
    assert missing.returncode == 1 and "\x1b" not in missing.stderr and len(missing.stderr.splitlines()) == 1
    connection.close()


def test_the_keeper_answers_its_own_user_and_root_only():
    kept = Daemon("--keeper", "--metrics_address=off")
    assert ctl(kept, "kept").returncode == 0
    refused = ctl(kept, "kept", user=STRANGER)
    assert refused.returncode == 1 and "PERMISSION_DENIED" in refused.stderr
    assert kept.stop() == 0, kept.log


def test_an_operator_says_whose_optimizer_is_meant(daemon):
    os.chmod(daemon.directory.name, 0o755)
    created = run_python(
        f"""
        connection = control.Connection("{daemon.endpoint}")
        for name in ("run", "theirs", "other"):
            message = pb.CreateOptimizerRequest(name=name)
            message.algorithm = "adamw"
            message.groups.add()
            message.parameters.add(name="w", shape=[8], dtype=pb.DATA_TYPE_BFLOAT16)
            connection.call("CreateOptimizer", message)
        """,
        FRIEND,
    )
    assert created.returncode == 0, created.stderr
    connection = Connection(daemon.endpoint)
    connection.call("CreateOptimizer", request("run"))

    def left():
        optimizers = connection.call("ListOptimizers", pb.ListOptimizersRequest()).optimizers
        return {(optimizer.uid, optimizer.name) for optimizer in optimizers}

    ambiguous = ctl(daemon, "delete", "run")
    assert ambiguous.returncode == 1 and "--uid" in ambiguous.stderr
    assert left() == {(0, "run"), (FRIEND, "run"), (FRIEND, "theirs"), (FRIEND, "other")}
    assert ctl(daemon, f"--uid={FRIEND}", "delete", "run").returncode == 0
    assert (0, "run") in left() and (FRIEND, "run") not in left()
    assert ctl(daemon, "delete", "theirs").returncode == 0  # only one has it
    connection.call("DeleteOptimizer", pb.DeleteOptimizerRequest(name=f"{FRIEND}/other"))
    assert left() == {(0, "run")}
    assert ctl(daemon, "delete", "run", user=STRANGER).returncode == 1
    assert left() == {(0, "run")}


def flood(endpoint):
    """What a user sends to the calls that need no token: prints True where it is refused."""
    return f"""
        def call(method, message):
            options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
            channels.append(grpc.insecure_channel("{endpoint}", options=options))
            return channels[-1].unary_unary(method).future(message)

        channels = []
        large = b"\\xfa\\x3e\\x80\\x80\\x80\\x32" + bytes(100 << 20)  # an unknown field
        for method in ("/grpc.health.v1.Health/Check", "/superoffload.v1.ServerService/GetServerInfo"):
            print(call(method, b"").code().name == "OK")
            print("OK" not in [call.code().name for call in [call(method, large) for _ in range(8)]])
        """


@pytest.mark.parametrize("allowed", [False, True], ids=["not-allowed", "allowed"])
def test_a_user_without_a_token_takes_no_memory_of_the_daemon(tmp_path, monkeypatch, allowed):
    keep_little_of_what_is_freed(monkeypatch)
    daemon = configured(tmp_path, "" if allowed else f"allowed_uids: {os.getuid()}")
    os.chmod(daemon.directory.name, 0o755)
    before = peak_bytes(daemon)
    strangers = run_python(flood(daemon.endpoint), STRANGER)
    assert strangers.stdout.split() == ["True"] * 4, strangers.stdout + strangers.stderr
    assert peak_bytes(daemon) - before < SHADOWS * 256 << 20  # 700 MiB where the messages are taken
    assert daemon.stop() == 0


FRAMES = """
    import itertools, struct, time

    def frame(kind, flags, call, payload=b""):
        return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", call) + payload

    def text(string):
        return bytes([len(string)]) + string

    path = b"/grpc.health.v1.Health/Watch"
    head = b"\\x83\\x86\\x04" + text(path) + b"\\x01" + text(b"localhost")
    head += b"\\x00" + text(b"te") + text(b"trailers") + b"\\x00" + text(b"content-type") + text(b"application/grpc")
    long = (b"\\x00" + text(b"x-a") + text(b"y" * 120)) * 100
    calls = itertools.count(1, 2)
    floods = {
        "calls-cancelled-at-once": lambda: frame(1, 4, call := next(calls), head) + frame(3, 0, call, b"none"),
        "calls-left-open": lambda: frame(1, 4, next(calls), head),
        "headers-without-end": lambda: frame(1, 0, 1, head) if next(calls) == 1 else frame(9, 0, 1, long),
    }
"""


@pytest.mark.parametrize("flood", ["calls-cancelled-at-once", "calls-left-open", "headers-without-end"])
def test_frames_before_any_token_take_little_memory_and_disturb_nobody(tmp_path, monkeypatch, flood):
    """Without a limit one connection took 4 GB in four seconds."""
    keep_little_of_what_is_freed(monkeypatch)
    daemon = configured(tmp_path, "")
    os.chmod(daemon.directory.name, 0o755)
    before = peak_bytes(daemon)
    code = f"""
        import threading
        connection = socket.socket(socket.AF_UNIX)
        connection.connect("{daemon.directory.name}/control.sock")
        connection.sendall(b"PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n" + frame(4, 0, 0))

        def send():
            try:
                while True:
                    connection.sendall(b"".join(floods["{flood}"]() for _ in range(50)))
            except OSError:  # it was thrown out
                pass

        threading.Thread(target=send, daemon=True).start()
        time.sleep(4)
        print("tried", flush=True)
        time.sleep(60)
    """
    program = python_of(STRANGER, textwrap.dedent(FRAMES) + textwrap.dedent(code))
    process = subprocess.Popen(program, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "tried\n"
    assert peak_bytes(daemon) - before < SHADOWS * 200 << 20
    model = torch.nn.Linear(8, 8)
    optimizer = superoffload.torch.AdamW(model.parameters(), endpoint=daemon.endpoint)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    assert optimizer.committed_steps == 1
    optimizer.close()
    process.kill()
    process.wait()
    assert daemon.stop() == 0


def test_a_user_with_a_token_takes_the_memory_of_the_budget_and_disturbs_nobody(tmp_path, monkeypatch):
    """Eight plans of which always one more page comes, and 100,000 streams that are not let in."""
    keep_little_of_what_is_freed(monkeypatch)
    daemon = configured(tmp_path, "memory_budget_bytes: 300000000\nper_user_memory_bytes: 150000000")
    os.chmod(daemon.directory.name, 0o755)
    before = peak_bytes(daemon)
    code = f"""
        import itertools
        connection = control.Connection("{daemon.endpoint}")
        stub, metadata = connection._session.stub, connection._session.metadata
        page = pb.CreateOptimizerRequest(name="o", more=True)
        for index in range(400):
            page.parameters.add(name=f"{{index:0500}}", shape=[1])
        padding = b"\\xfa\\x3e\\x80\\x80\\x03" + bytes(48 << 10)  # an unknown field
        watch = pb.WatchStepsRequest.FromString(padding)
        print("attacks", flush=True)
        while True:
            calls = [
                stub.CreateOptimizer.future(itertools.repeat(page, 5000), metadata=metadata)
                for _ in range(8)
            ]
            streams = [stub.WatchSteps(watch, metadata=metadata) for _ in range(500)]
            refused = {{call.code().name for call in calls}}
            assert "OK" not in refused, refused
            print(*refused, flush=True)
            for stream in streams:
                stream.cancel()
        """
    attacker = subprocess.Popen(python_of(STRANGER, code), stdout=subprocess.PIPE, text=True)
    assert attacker.stdout.readline() == "attacks\n"
    connection = Connection(daemon.endpoint)
    for index in range(3):
        connection.call("CreateOptimizer", request(f"o{index}"))
        refused = attacker.stdout.readline()
        assert "RESOURCE_EXHAUSTED" in refused, refused
        connection.call("DeleteOptimizer", pb.DeleteOptimizerRequest(name=f"o{index}"))
    attacker.kill()
    attacker.wait()
    assert peak_bytes(daemon) - before < SHADOWS * 512 << 20
    connection.close()
    assert daemon.stop() == 0


def pages_of(name, parameters, shape):
    """A request whose parameters have this shape, a few of them in each page."""
    for first in range(0, parameters, 500):
        page = pb.CreateOptimizerRequest(more=first + 500 < parameters)
        if first == 0:
            page.name, page.algorithm = name, "adamw"
            page.groups.add()
        for index in range(first, first + 500):
            whole = {"global_shape": shape, "global_offset": [0] * len(shape)}
            page.parameters.add(name=f"p{index}", shape=shape, dtype=pb.DATA_TYPE_BFLOAT16, **whole)
        yield page


@pytest.mark.skipif("TSAN_OPTIONS" in os.environ, reason="ThreadSanitizer has an allocator that gives nothing back")
def test_a_daemon_gives_back_what_large_plans_took(tmp_path, monkeypatch):
    keep_little_of_what_is_freed(monkeypatch)
    daemon = configured(tmp_path, "")
    connection = Connection(daemon.endpoint)
    session = connection._session
    before = status_bytes(daemon, "RssAnon")
    for _ in range(3):
        session.stub.CreateOptimizer(pages_of("large", 20_000, [1] * 64), metadata=session.metadata)
        connection.call("DeleteOptimizer", pb.DeleteOptimizerRequest(name="large"))
    deadline = time.monotonic() + 60  # the last call may end after its answer is there
    while status_bytes(daemon, "RssAnon") - before > SHADOWS * 48 << 20 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert status_bytes(daemon, "RssAnon") - before < SHADOWS * 48 << 20
    connection.close()
    assert daemon.stop() == 0


def test_a_parameter_of_too_many_dimensions_is_refused_with_the_limit(daemon):
    connection = Connection(daemon.endpoint)
    session = connection._session
    with pytest.raises(grpc.RpcError) as raised:
        session.stub.CreateOptimizer(pages_of("deep", 500, [1] * 65), metadata=session.metadata)
    assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert 'parameters[0] ("p0"): a shape of 65 dimensions; parameters have at most 64' in raised.value.details()
    connection.close()
