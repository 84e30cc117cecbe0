"""The daemon's metrics by Prometheus's own tools: promtool's linter and a server that scrapes."""

import contextlib
import json
import os
import pathlib
import subprocess
import time
import urllib.parse
import urllib.request

import pytest
import torch

import superoffload.torch
from superoffload._core.control import Connection
from superoffload.v1 import optimizer_pb2 as pb

BINARIES = pathlib.Path(__file__).parents[2] / "build" / "prometheus" / "usr" / "bin"
DEADLINE_SECONDS = 60


@pytest.fixture
def trained(metered_daemon):
    """A daemon with an optimizer of 7 committed steps and 1 skipped one, which stays attached."""
    weight = torch.nn.Parameter(torch.ones(64))
    optimizer = superoffload.torch.AdamW([weight], endpoint=metered_daemon.endpoint, name="scraped")
    for step in range(8):
        (weight.sum() * (float("inf") if step == 3 else 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return metered_daemon, optimizer


def test_promtool_finds_nothing_to_criticise(trained):
    daemon, _ = trained
    text = urllib.request.urlopen(f"http://{daemon.info.metrics_address}/metrics").read()
    check = subprocess.run([BINARIES / "promtool", "check", "metrics"], input=text, capture_output=True)
    assert check.returncode == 0 and not check.stdout + check.stderr, check.stdout + check.stderr


class Prometheus:
    def __init__(self, directory: pathlib.Path, target: str) -> None:
        config = directory / "prometheus.yml"
        config.write_text(
            "global: {scrape_interval: 200ms, scrape_timeout: 200ms}\n"
            f"scrape_configs: [{{job_name: superoffloadd, static_configs: [{{targets: ['{target}']}}]}}]\n"
        )
        self._log = (directory / "log").open("w+")
        self._process = subprocess.Popen(
            [
                BINARIES / "prometheus",
                f"--config.file={config}",
                f"--storage.tsdb.path={directory}/data",
                "--web.listen-address=127.0.0.1:0",
            ],
            stderr=self._log,
        )
        self._address = self._wait_address()

    def _wait_address(self) -> str:
        """Port 0 is chosen by the kernel; the process's listening socket tells which."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while time.monotonic() < deadline:
            assert self._process.poll() is None, self.log()
            for port in listening_ports(self._process.pid):
                return f"127.0.0.1:{port}"
            time.sleep(0.05)
        raise AssertionError(self.log())

    def query(self, expression: str) -> list:
        url = f"http://{self._address}/api/v1/query?query={urllib.parse.quote(expression)}"
        return json.load(urllib.request.urlopen(url))["data"]["result"]

    def wait_value(self, expression: str, expected: float) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        result = None
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):  # still starting
                result = self.query(expression)
            if result and float(result[0]["value"][1]) == expected:
                return
            time.sleep(0.1)
        raise AssertionError(f"{expression} is {result}, not {expected}; {self.log()}")

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(30)


def listening_ports(pid: int) -> list[int]:
    inodes = set()
    for fd in os.scandir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(fd.path)
        except FileNotFoundError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    rows = [line.split() for line in pathlib.Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A" and row[9] in inodes]


def test_prometheus_scrapes_and_answers(trained, tmp_path):
    daemon, optimizer = trained
    prometheus = Prometheus(tmp_path, daemon.info.metrics_address)
    try:
        prometheus.wait_value("up", 1)
        (hosted,) = Connection(daemon.endpoint).call("ListOptimizers", pb.ListOptimizersRequest()).optimizers
        prometheus.wait_value(f'superoffload_steps_total{{optimizer="{hosted.id}",verdict="commit"}}', 7)
        prometheus.wait_value('sum(superoffload_steps_total{verdict=~"skip.*"})', 1)
        prometheus.wait_value("superoffload_attachments", 1)
        prometheus.wait_value("count(superoffload_build_info)", 1)
        optimizer.close()
        prometheus.wait_value("superoffload_attachments", 0)
    finally:
        prometheus.stop()
