"""Which cores and memory a daemon takes, on this machine and on machines that only their /sys describes."""

import contextlib
import json
import os
import pathlib
import subprocess
import urllib.request

import grpc
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from tests.conftest import Daemon
from tests.support import fake_sysfs

import superoffload.torch
from superoffload._core.error import Error

CTL = pathlib.Path(os.environ["SUPEROFFLOAD_BUILD"]) / "client" / "superoffloadctl"


def ctl(daemon, *words):
    run = subprocess.run([CTL, f"--endpoint={daemon.endpoint}", *words], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.fixture
def on(monkeypatch, tmp_path):
    """Starts a daemon that sees another machine."""
    daemons = []

    def start(machine, *flags):
        fake_sysfs.write(fake_sysfs.MACHINES[machine], tmp_path / machine)
        monkeypatch.setenv("HWLOC_FSROOT", str(tmp_path / machine))
        monkeypatch.setenv("HWLOC_COMPONENTS", "linux,stop")
        daemons.append(Daemon("--metrics_address=off", *flags))
        return daemons[-1]

    yield start
    for daemon in daemons:
        assert daemon.stop() == 0, daemon.log


@pytest.mark.parametrize(
    ("machine", "nodes", "cores", "gpus"),
    [
        ("gh200", [0], 72, [1]),
        ("quad-gh200", [0, 1, 2, 3], 72, [1, 1, 1, 1]),
        ("gb200", [0, 1], 72, [2, 2]),
        ("dual-x86-with-gpus", [0, 1], 32, [2, 1]),
        ("laptop", [0], 4, [0]),
    ],
)
def test_memory_cores_and_gpus_that_belong_together(on, machine, nodes, cores, gpus):
    topology = json.loads(ctl(on(machine), "topology", "--json"))
    superchips = topology["superchips"]
    assert [s["memory_node"] for s in superchips] == nodes
    assert [len(s["cores"]) for s in superchips] == [cores] * len(nodes)
    assert [len(s["gpus"]) for s in superchips] == gpus
    assert "used_superchip" not in topology


def test_a_daemon_takes_its_superchip_and_leaves_trainers_their_cores(on):
    daemon = on("quad-gh200", "--superchip=2")
    topology = json.loads(ctl(daemon, "topology", "--json"))
    assert topology["used_superchip"] == 2
    assert topology["trainer_cpus"] == list(range(144, 151))
    assert topology["optimizer_cpus"] == list(range(151, 216))
    assert daemon.info.worker_threads == 65
    drawn = ctl(daemon, "topology")
    assert "superchip 2  <- this daemon" in drawn and "151-215" in drawn and "0011:01:00.0" in drawn
    # This machine has no node 2: better no optimizer than one in the wrong memory.
    with pytest.raises(Error) as raised:
        superoffload.torch.AdamW([torch.nn.Parameter(torch.ones(4096))], endpoint=daemon.endpoint)
    assert raised.value.code == grpc.StatusCode.FAILED_PRECONDITION
    assert "NUMA node 2" in str(raised.value)


def test_the_budget_is_a_share_of_the_superchips_memory_not_of_the_machines(on, monkeypatch):
    machine = fake_sysfs.Machine({0: fake_sysfs.Node(range(0, 2), 1), 1: fake_sysfs.Node(range(2, 4), 1)})
    monkeypatch.setitem(fake_sysfs.MACHINES, "two-small", machine)
    assert on("two-small", "--superchip=1").info.memory_budget_bytes == (1 << 30) // 10 * 8


def test_each_superchips_daemon_has_a_port_of_its_own_for_metrics(monkeypatch, tmp_path):
    fake_sysfs.write(fake_sysfs.MACHINES["gb200"], tmp_path / "machine")
    monkeypatch.setenv("HWLOC_FSROOT", str(tmp_path / "machine"))
    monkeypatch.setenv("HWLOC_COMPONENTS", "linux,stop")
    (tmp_path / "run").mkdir()
    flags = [f"--runtime_directory={tmp_path}/run", "--superchip=1", "--exit_on_stdin_eof"]
    run = subprocess.run(
        [os.environ["SUPEROFFLOAD_DAEMON"], *flags], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert run.returncode == 0
    assert "127.0.0.1:9471" in run.stderr  # served there, or said to be taken


def test_hardware_threads_of_a_core_stay_together(on):
    topology = json.loads(ctl(on("laptop", "--superchip=0"), "topology", "--json"))
    assert topology["trainer_cpus"] == [0, 1]
    assert topology["optimizer_cpus"] == [2, 4, 6]


def test_a_superchip_that_is_not_there_stops_the_start(tmp_path):
    run = subprocess.run(
        [os.environ["SUPEROFFLOAD_DAEMON"], f"--runtime_directory={tmp_path}/run", "--superchip=9"],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 1
    assert "superchip is 9" in run.stderr


@pytest.mark.skipif(os.cpu_count() < 2, reason="one core is everybody's")
def test_on_this_machine_workers_are_pinned_and_memory_lies_on_the_node(tmp_path):
    daemon = Daemon("--metrics_address=127.0.0.1:0", "--superchip=0")
    topology = json.loads(ctl(daemon, "topology", "--json"))
    superoffload.torch.AdamW([torch.nn.Parameter(torch.ones(1 << 20))], endpoint=daemon.endpoint, name="placed")
    pinned = []
    for task in pathlib.Path(f"/proc/{daemon.process.pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # gRPC's threads come and go
            status = (task / "status").read_text()
            if "Name:\tso-worker\n" in status:
                pinned.append(int(status.split("Cpus_allowed_list:")[1].split()[0]))
    assert sorted(pinned) == topology["optimizer_cpus"]
    text = urllib.request.urlopen(f"http://{daemon.info.metrics_address}/metrics").read().decode()
    metrics = {family.name: family.samples for family in text_string_to_metric_families(text)}
    node = topology["superchips"][0]["memory_node"]
    assert [s.labels for s in metrics["superoffload_memory_node_bytes"]] == [{"node": str(node)}]
    assert metrics["superoffload_memory_node_bytes"][0].value >= 18 * (1 << 20)
    seen = ctl(daemon, "pin", "--", "python3", "-c", "import os; print(sorted(os.sched_getaffinity(0)))")
    assert json.loads(seen) == topology["trainer_cpus"]
    assert daemon.stop() == 0


def test_huge_pages_of_the_pool_are_used_when_there_are_enough(daemon):
    pool = pathlib.Path("/proc/sys/vm/nr_hugepages")
    before = pool.read_text()
    try:
        pool.write_text("64")
    except OSError:
        pytest.skip("setting up huge pages needs root")
    try:
        if int(pool.read_text()) < 64:
            pytest.skip("the kernel has no 64 huge pages in one piece")
        optimizer = superoffload.torch.AdamW(
            [torch.nn.Parameter(torch.ones(1 << 20))], endpoint=daemon.endpoint, bucket_bytes=1 << 20
        )
        parameter = optimizer.param_groups[0]["params"][0]
        for _ in range(3):
            parameter.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        smaps = pathlib.Path(f"/proc/{daemon.process.pid}/smaps").read_text()
        mapped = [part for part in smaps.split("memfd:superoffload-")[1:] if part.startswith("state")]
        assert mapped and "KernelPageSize:     2048 kB" in mapped[0]
        assert optimizer.last_result.committed_steps == 3
        optimizer.close()
    finally:
        pool.write_text(before)
