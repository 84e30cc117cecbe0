"""Clients and daemons of different releases: equal wire versions work together, others are named."""

import concurrent.futures
import json
import re
import subprocess

import grpc
import pytest
from tests.support.users import CTL

from superoffload._core.control import Connection
from superoffload.v1 import optimizer_pb2 as pb


class Release(grpc.GenericRpcHandler):
    """A daemon that says that it is of another release: calls go on to a real one."""

    def __init__(self, daemon, **said):
        self._channel, self._said = daemon.channel, said

    def service(self, handler_call_details):
        method = handler_call_details.method

        def forward(requests, context):
            metadata = [(key, value) for key, value in context.invocation_metadata() if key.startswith("superoffload")]
            for answer in self._channel.stream_stream(method)(requests, metadata=metadata):
                if method.endswith("GetServerInfo"):
                    info = pb.ServerInfo.FromString(answer)
                    info.MergeFrom(pb.ServerInfo(**self._said))
                    answer = info.SerializeToString()
                yield answer

        return grpc.stream_stream_rpc_method_handler(forward)


@pytest.fixture
def serve(daemon, tmp_path):
    servers = []

    def start(**said):
        server = grpc.server(concurrent.futures.ThreadPoolExecutor(4), handlers=[Release(daemon, **said)])
        server.add_insecure_port(f"unix:{tmp_path}/control.sock")
        server.start()
        servers.append(server)
        return f"unix:{tmp_path}/control.sock"

    yield start
    for server in servers:
        server.stop(None).wait()


def ctl(*words, status=0):
    done = subprocess.run([CTL, *words], capture_output=True, text=True)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def test_version_says_what_this_is_and_what_runs(daemon):
    said = json.loads(ctl("version", "--json", f"--endpoint={daemon.endpoint}"))
    assert said["version"] == said["daemon"]["version"] == daemon.info.version
    assert said["wire_version"] == said["daemon"]["wire_version"] == daemon.info.wire_version
    assert said["reads_record_versions"]
    assert re.match(r"superoffloadctl [\d.]+, wire version \d+\n", ctl("version", f"--endpoint={daemon.endpoint}"))


@pytest.mark.parametrize("version", ["0.0.9", "0.2.0"])
def test_one_minor_version_apart_they_work_together(daemon, serve, version):
    endpoint = serve(version=version)
    connection = Connection(endpoint)
    assert connection.server_info.version == version
    request = pb.CreateOptimizerRequest(name="run", algorithm="adamw", groups=[pb.ParameterGroup()])
    request.parameters.add(name="weight", shape=[8], dtype=pb.DATA_TYPE_FLOAT32)
    connection.call("CreateOptimizer", request, timeout_seconds=30)
    connection.close()
    assert "run" in ctl("list", f"--endpoint={endpoint}")
    examined = {finding["check"]: finding for finding in json.loads(ctl("doctor", "--json", f"--endpoint={endpoint}"))}
    assert examined["daemon"]["severity"] == "note" and version in examined["daemon"]["what"]


def test_another_wire_version_is_a_failure_that_names_both(daemon, serve):
    wire = daemon.info.wire_version
    endpoint = serve(version="0.2.0", wire_version=wire + 1)
    found = json.loads(ctl("doctor", "--json", f"--endpoint={endpoint}", status=1))
    (what,) = [finding["what"] for finding in found if finding["check"] == "daemon"]
    assert f"wire version {wire + 1}" in what and f"with {wire}" in what
