"""The daemon as a foreign gRPC client, Prometheus and an operator see it."""

import contextlib
import ctypes
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.request

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families
from tests.conftest import Daemon

import superoffload.torch
from superoffload._core.control import Connection
from superoffload.v1 import optimizer_pb2 as pb

LIBRARY = os.environ.get("SUPEROFFLOAD_LIBRARY", "libsuperoffload.so.0")


def parameters(n=1, shape=(64,)):
    return [torch.nn.Parameter(torch.randn(shape)) for _ in range(n)]


def create_request(**changes):
    request = pb.CreateOptimizerRequest(name="o", algorithm="adamw")
    request.groups.add()
    request.parameters.add(name="w", shape=[8, 8], dtype=pb.DATA_TYPE_BFLOAT16)
    for field, value in changes.items():
        setattr(request, field, value)
    return request


def test_health_and_reflection(daemon):
    health = health_pb2_grpc.HealthStub(daemon.channel).Check(health_pb2.HealthCheckRequest())
    assert health.status == health_pb2.HealthCheckResponse.SERVING
    stub = reflection_pb2_grpc.ServerReflectionStub(daemon.channel)
    (answer,) = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    services = {service.name for service in answer.list_services_response.service}
    assert {
        "superoffload.v1.OptimizerService",
        "superoffload.v1.ServerService",
    } <= services


def test_sigterm_settles_and_exits_0(daemon):
    optimizer = superoffload.torch.AdamW(parameters(), endpoint=daemon.endpoint)
    optimizer.param_groups[0]["params"][0].sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert daemon.stop() == 0
    assert "settled" in daemon.log
    with pytest.raises(superoffload.Error) as error:
        optimizer.param_groups[0]["params"][0].sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert error.value.code == grpc.StatusCode.UNAVAILABLE


def test_calls_without_a_token_are_unauthenticated(daemon):
    from superoffload.v1 import optimizer_pb2_grpc

    with pytest.raises(grpc.RpcError) as error:
        optimizer_pb2_grpc.OptimizerServiceStub(daemon.channel).ListOptimizers(pb.ListOptimizersRequest())
    assert error.value.code() == grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize(
    "request_, code, words",
    [
        (create_request(name=""), "INVALID_ARGUMENT", "name"),
        (create_request(name="a/b"), "INVALID_ARGUMENT", "name"),
        (create_request(bucket_bytes=1), "INVALID_ARGUMENT", "bucket_bytes"),
        (create_request(algorithm="sgd"), "INVALID_ARGUMENT", "algorithm"),
        (pb.CreateOptimizerRequest(name="o", algorithm="adamw"), "INVALID_ARGUMENT", "group"),
    ],
)
def test_bad_plans_are_refused(daemon, request_, code, words):
    with pytest.raises(superoffload.Error) as error:
        Connection(daemon.endpoint).call("CreateOptimizer", request_)
    assert error.value.code.name == code and words in error.value.message


@pytest.mark.parametrize("shape", [[0], [1 << 41], [1 << 40, 1 << 40]])
def test_impossible_shapes_are_refused(daemon, shape):
    request = create_request()
    request.parameters[0].shape[:] = shape
    with pytest.raises(superoffload.Error) as error:
        Connection(daemon.endpoint).call("CreateOptimizer", request)
    assert error.value.code == grpc.StatusCode.INVALID_ARGUMENT


def test_the_memory_budget_is_stated_when_exceeded(daemon):
    request = create_request()
    request.parameters[0].shape[:] = [1 << 39]
    with pytest.raises(superoffload.Error) as error:
        Connection(daemon.endpoint).call("CreateOptimizer", request)
    assert error.value.code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert re.search(r"\d{6,}", error.value.message)


def test_a_second_trainer_is_refused(daemon):
    first = superoffload.torch.AdamW(parameters(), endpoint=daemon.endpoint, name="shared")
    with pytest.raises(superoffload.Error) as error:
        superoffload.torch.AdamW(parameters(), endpoint=daemon.endpoint, name="shared", sync="pull_params")
    assert error.value.code == grpc.StatusCode.FAILED_PRECONDITION and "attached" in error.value.message
    first.close()


def test_garbage_on_the_descriptor_socket_harms_nobody(daemon):
    (weight,) = parameters()
    optimizer = superoffload.torch.AdamW([weight], endpoint=daemon.endpoint)
    for junk in (
        b"",
        b"x",
        os.urandom(64),
        os.urandom(4096),
        struct.pack("<IHH", 0x46464F53, daemon.info.wire_version, 77) + bytes(56),
    ):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
            peer.connect(daemon.info.descriptor_socket)
            if junk:
                peer.send(junk)
                assert peer.recv(1024)[6:8] == struct.pack("<H", 4)  # ERROR
    weight.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert optimizer.last_result.kind.name == "COMMIT"


def test_metrics_are_what_prometheus_reads(metered_daemon):
    weights = parameters(3)
    optimizer = superoffload.torch.AdamW(weights, endpoint=metered_daemon.endpoint, name="metered")
    for _ in range(5):
        sum(w.sum() for w in weights).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.metrics_address == metered_daemon.info.metrics_address
    text = urllib.request.urlopen(f"http://{optimizer.metrics_address}/metrics").read().decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert all(name.startswith(("superoffload", "exposer")) for name in families), families.keys()
    steps = [f for name, f in families.items() if name.startswith("superoffload") and name.endswith("steps")]
    assert any(sum(sample.value for sample in family.samples) == 5 for family in steps), text


def labels_of_steps(daemon):
    """Of steps that have ended: what is counted may be later than what the trainer is told."""
    text, deadline = "", time.monotonic() + 60
    while "superoffload_steps_total" not in text and time.monotonic() < deadline:
        text = urllib.request.urlopen(f"http://{daemon.info.metrics_address}/metrics").read().decode()
    assert "superoffload_steps_total" in text
    return set(re.findall(r'superoffload_steps_total{(.*?),verdict="commit"}', text)), text


def test_metrics_name_neither_optimizers_nor_users(metered_daemon):
    weights = parameters(1)
    optimizer = superoffload.torch.AdamW(weights, endpoint=metered_daemon.endpoint, name="metered")
    sum(w.sum() for w in weights).backward()
    optimizer.step()
    (hosted,) = Connection(metered_daemon.endpoint).call("ListOptimizers", pb.ListOptimizersRequest()).optimizers
    labels, text = labels_of_steps(metered_daemon)
    assert re.fullmatch("[0-9a-f]{16}", hosted.id)
    assert labels == {f'optimizer="{hosted.id}"'}
    assert "metered" not in text and "uid" not in text


def test_metrics_name_them_where_the_configuration_says_so(tmp_path):
    config = tmp_path / "superoffloadd.textproto"
    config.write_text('metrics_address: "127.0.0.1:0" metric_labels: METRIC_LABELS_NAMES')
    daemon = Daemon(f"--config={config}")
    weights = parameters(1)
    optimizer = superoffload.torch.AdamW(weights, endpoint=daemon.endpoint, name="metered")
    sum(w.sum() for w in weights).backward()
    optimizer.step()
    assert labels_of_steps(daemon)[0] == {f'optimizer="metered",uid="{os.getuid()}"'}
    optimizer.close()
    assert daemon.stop() == 0, daemon.log


def test_bad_configuration_names_the_field(tmp_path):
    path = tmp_path / "bad.textproto"
    path.write_text("worker_threads: 2\nno_such_field: 1\n")
    binary = os.environ.get("SUPEROFFLOAD_DAEMON", "superoffloadd")
    run = subprocess.run([binary, f"--config={path}"], capture_output=True, text=True, timeout=30)
    assert run.returncode == 2 and "no_such_field" in run.stderr and ":2:" in run.stderr


@pytest.mark.parametrize("kind", ["directory", "fifo"])
def test_a_configuration_that_is_no_file_is_refused_at_once(tmp_path, kind):
    path = tmp_path / "superoffloadd.textproto"
    path.mkdir() if kind == "directory" else os.mkfifo(path)
    binary = os.environ.get("SUPEROFFLOAD_DAEMON", "superoffloadd")
    run = subprocess.run([binary, f"--config={path}"], capture_output=True, text=True, timeout=30)
    assert run.returncode == 2 and "is no regular file" in run.stderr


@pytest.mark.parametrize("kind", ["directory", "fifo"])
def test_a_reload_from_what_is_no_file_keeps_the_configuration(tmp_path, kind):
    path = tmp_path / "superoffloadd.textproto"
    path.write_text('metrics_address: "off"')
    daemon = Daemon(f"--config={path}")
    path.unlink()
    path.mkdir() if kind == "directory" else os.mkfifo(path)
    daemon.process.send_signal(signal.SIGHUP)
    line = next(line for line in iter(daemon.process.stderr.readline, "") if "reloaded" in line)
    assert "not reloaded: " in line and "is no regular file" in line
    assert daemon.stop() == 0


def test_an_empty_configuration_is_one_of_defaults(tmp_path):
    path = tmp_path / "empty.textproto"
    path.write_text("")
    daemon = Daemon(f"--config={path}", "--metrics_address=off")
    assert daemon.stop() == 0, daemon.log


def test_the_client_library_exports_only_its_interface():
    lines = subprocess.run(
        ["nm", "-D", "--defined-only", LIBRARY],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    names = {line.split()[-1] for line in lines.splitlines()}
    assert names and all(name.startswith("superoffload_") for name in names)
    needed = subprocess.run(["objdump", "-p", LIBRARY], capture_output=True, text=True, check=True).stdout
    assert not re.search(r"NEEDED.*(grpc|protobuf|absl|stdc\+\+)", needed)
    assert ctypes.CDLL(LIBRARY).superoffload_size_of


@pytest.mark.parametrize(
    "order",
    [
        "torch,jax,grpc,superoffload.torch",
        "superoffload.torch,grpc,jax,torch",
        "jax,superoffload.torch,torch,grpc",
        "grpc,superoffload.torch,torch,jax",
    ],
)
def test_any_import_order(order):
    """torch, JAX, grpcio and the client live in one process, each of them at work."""
    code = f"import {order}\nimport torch, jax.numpy, superoffload.torch\nw = torch.nn.Parameter(torch.ones(3))\n"
    code += "o = superoffload.torch.AdamW([w]); w.sum().backward(); o.step()\n"
    code += "print(o.last_result.kind.name, jax.numpy.ones(3).sum())"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.stdout.strip() == "COMMIT 3.0", run.stderr


def test_clients_that_say_nothing_do_not_silence_the_metrics(metered_daemon):
    host, port = metered_daemon.info.metrics_address.rsplit(":", 1)
    silent = [socket.create_connection((host, int(port))) for _ in range(8)]
    for client in silent:
        client.sendall(b"GET /metrics HTTP/1.1\r\n")
    urllib.request.urlopen(f"http://{metered_daemon.info.metrics_address}/metrics", timeout=60).read()
    still_open = 0
    for client in silent:
        client.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            client.recv(1)
            continue
        still_open += 1
    assert still_open == len(silent), "the scrape was answered only when connections before it had timed out"
    for client in silent:
        client.close()
