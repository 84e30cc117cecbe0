"""Who may use a daemon, and how much of it."""

import os
import pathlib
import re
import signal
import subprocess

import grpc
import pytest
import torch
from tests.support.users import CTL, FRIEND, STRANGER, TRAINER, become, configured, ctl, request

import superoffload.torch
from superoffload._core.control import Connection
from superoffload._core.error import Error
from superoffload._core.session import Session
from superoffload.v1 import optimizer_pb2 as pb

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="acting as other users needs root")


def refused(call, code, words):
    with pytest.raises(Error) as raised:
        call()
    assert raised.value.code == code
    assert words in str(raised.value)


@as_root
def test_only_allowed_users_connect_and_only_operators_see_others(tmp_path):
    daemon = configured(tmp_path, f"allowed_uids: {FRIEND}\noperator_uids: {STRANGER + 10}")
    superoffload.torch.AdamW([torch.nn.Parameter(torch.ones(8))], endpoint=daemon.endpoint, name="roots")
    stranger = ctl(daemon, "list", user=STRANGER)
    assert stranger.returncode == 1
    assert "PERMISSION_DENIED" in stranger.stderr and "allowed_uids" in stranger.stderr
    friend = ctl(daemon, "list", user=FRIEND)
    assert friend.returncode == 0 and "roots" not in friend.stdout
    assert ctl(daemon, "describe", "roots", user=FRIEND).returncode == 1
    watcher = ctl(daemon, "list", user=STRANGER + 10)
    assert watcher.returncode == 0 and "roots" in watcher.stdout
    assert daemon.stop() == 0


@as_root
def test_a_reload_changes_who_is_allowed_and_a_wrong_file_changes_nothing(tmp_path):
    daemon = configured(tmp_path, f"allowed_uids: {FRIEND}")
    config = tmp_path / "superoffloadd.textproto"

    def reload(text, message):
        config.write_text(text)
        daemon.process.send_signal(signal.SIGHUP)
        assert message in next(line for line in iter(daemon.process.stderr.readline, "") if "reloaded" in line)

    assert ctl(daemon, "list", user=STRANGER).returncode == 1
    reload(f"allowed_uids: [{FRIEND}, {STRANGER}]", " reloaded\n")
    assert ctl(daemon, "list", user=STRANGER).returncode == 0
    reload("allowed_uids: nobody", "not reloaded: ")
    assert ctl(daemon, "list", user=STRANGER).returncode == 0
    reload("allowed_uids: 1\nworker_threads: 7", "takes a restart")
    assert ctl(daemon, "list", user=STRANGER).returncode == 1
    assert daemon.stop() == 0


@as_root
def test_checkpoints_use_files_with_the_rights_of_the_user(daemon):
    os.chmod(daemon.directory.name, 0o755)
    theirs, roots = pathlib.Path(daemon.directory.name) / "theirs", pathlib.Path(daemon.directory.name) / "roots"
    theirs.mkdir()
    roots.mkdir()
    os.chown(theirs, STRANGER, STRANGER)
    (theirs / "text").write_text("to be or not to be " * 100)
    trainer = subprocess.Popen(
        [*become(STRANGER), TRAINER, f"--text={theirs}/text", f"--endpoint={daemon.endpoint}", "--steps=100000000"],
        stdout=subprocess.DEVNULL,
    )
    # Before its first step it may be incomplete.
    while not re.search(r'"committed_steps": *"[1-9]', ctl(daemon, "list", "--json", user=STRANGER).stdout):
        assert trainer.poll() is None
    written = ctl(daemon, "checkpoint", "bigram", str(theirs / "ckpt"), user=STRANGER)
    assert written.returncode == 0, written.stderr
    assert (theirs / "ckpt" / "model.safetensors.index.json").stat().st_uid == STRANGER
    denied = ctl(daemon, "checkpoint", "bigram", str(roots / "ckpt"), user=STRANGER)
    assert denied.returncode == 1 and "PERMISSION_DENIED" in denied.stderr, denied.stderr
    assert not os.listdir(roots)
    trainer.kill()
    trainer.wait()


def test_a_user_has_a_share_of_memory_optimizers_and_calls(tmp_path):
    daemon = configured(
        tmp_path, "per_user_memory_bytes: 100000000\nmax_optimizers_per_user: 2\ncontrol_calls_per_second: 20"
    )
    connection = Connection(daemon.endpoint)
    exhausted = grpc.StatusCode.RESOURCE_EXHAUSTED
    refused(lambda: connection.call("CreateOptimizer", request("big", 10_000_000)), exhausted, "per_user_memory_bytes")
    connection.call("CreateOptimizer", request("a"))
    connection.call("CreateOptimizer", request("b"))
    refused(lambda: connection.call("CreateOptimizer", request("c")), exhausted, "max_optimizers_per_user")

    def call_in_a_loop():
        for _ in range(100_000):
            connection.call("ListOptimizers", pb.ListOptimizersRequest())

    refused(call_in_a_loop, exhausted, "control_calls_per_second")
    connection.close()
    assert daemon.stop() == 0


def test_names_are_charged_to_the_budget(daemon):
    connection = Connection(daemon.endpoint)
    charged = {}
    for width in (8, 508):
        wanted = request(f"names-of-{width}")
        first = wanted.parameters[0]
        del wanted.parameters[:]
        for index in range(2000):
            wanted.parameters.add(name=f"{index:0{width}}", shape=[1], dtype=first.dtype)
        charged[width] = connection.call("CreateOptimizer", wanted).memory_bytes
    assert charged[508] - charged[8] >= 2000 * 500
    connection.close()


def test_a_user_has_so_many_connections(daemon):
    sessions = [Session(daemon.endpoint, 30)]
    with pytest.raises(Error) as raised:
        for _ in range(1000):
            sessions.append(Session(daemon.endpoint, 30))
    assert raised.value.code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert len(sessions) == 128
    for session in sessions:
        session.leave(None)


def make_certificate(directory, name, signer=None):
    key, certificate = directory / f"{name}.key", directory / f"{name}.pem"
    subject = ["-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    by = [] if signer is None else ["-CA", directory / f"{signer}.pem", "-CAkey", directory / f"{signer}.key"]
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
        + ["-keyout", key, "-out", certificate, *subject, *by],
        check=True,
        capture_output=True,
    )


def test_remote_operators_need_a_certificate_of_the_authority(tmp_path):
    for name, signer in [("authority", None), ("server", "authority"), ("operator", "authority"), ("impostor", None)]:
        make_certificate(tmp_path, name, signer)
    daemon = configured(
        tmp_path,
        f"""
        remote_operators {{
          address: "127.0.0.1:0"
          certificate_file: "{tmp_path}/server.pem"
          key_file: "{tmp_path}/server.key"
          client_authority_file: "{tmp_path}/authority.pem"
        }}
        """,
    )
    port = next(line for line in iter(daemon.process.stderr.readline, "") if "TCP port" in line).split()[-1]
    optimizer = superoffload.torch.AdamW([torch.nn.Parameter(torch.ones(8))], endpoint=daemon.endpoint, name="seen")

    def remote(who, *words):
        tls = [f"--tls_authority={tmp_path}/authority.pem", f"--tls_certificate={tmp_path}/{who}.pem"]
        return subprocess.run(
            [CTL, f"--endpoint=localhost:{port}", *tls, f"--tls_key={tmp_path}/{who}.key", *words],
            capture_output=True,
            text=True,
            timeout=60,
        )

    listed = remote("operator", "list")
    assert listed.returncode == 0 and "seen" in listed.stdout, listed.stderr
    impostor = remote("impostor", "list")
    assert impostor.returncode == 1 and "seen" not in impostor.stdout
    certificate = {
        "root_certificates": (tmp_path / "authority.pem").read_bytes(),
        "private_key": (tmp_path / "operator.key").read_bytes(),
        "certificate_chain": (tmp_path / "operator.pem").read_bytes(),
    }
    with grpc.secure_channel(f"localhost:{port}", grpc.ssl_channel_credentials(**certificate)) as channel:
        from superoffload.v1 import optimizer_pb2_grpc

        with pytest.raises(grpc.RpcError) as raised:
            optimizer_pb2_grpc.OptimizerServiceStub(channel).CreateOptimizer(iter([request()]))
    assert raised.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert "unix socket" in raised.value.details()
    optimizer.close()
    assert daemon.stop() == 0


def test_tcp_without_tls_is_refused(tmp_path):
    config = tmp_path / "superoffloadd.textproto"
    config.write_text('remote_operators { address: "127.0.0.1:0" }')
    run = subprocess.run(
        [os.environ["SUPEROFFLOAD_DAEMON"], f"--config={config}", f"--runtime_directory={tmp_path}/run"],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 2
    assert "mutual TLS" in run.stderr
