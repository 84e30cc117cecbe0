"""superoffloadctl doctor, on this machine and on machines that are all wrong or all right."""

import json
import os
import pathlib
import subprocess

from tests.conftest import Daemon

CTL = pathlib.Path(os.environ["SUPEROFFLOAD_BUILD"]) / "client" / "superoffloadctl"

BAD = {
    "proc/cmdline": "quiet arm64.nompam init_on_alloc=1",
    "proc/filesystems": "nodev resctrl",
    "proc/meminfo": "HugePages_Total: 0\nHugepagesize: 2048 kB",
    "proc/sys/kernel/numa_balancing": "1",
    "sys/kernel/mm/transparent_hugepage/shmem_enabled": "always advise [never]",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "performance",
    "sys/devices/system/cpu/cpu1/cpufreq/scaling_governor": "powersave",
}
GOOD = {
    "proc/cmdline": "quiet",
    "proc/filesystems": "nodev resctrl",
    "proc/meminfo": "HugePages_Total: 512\nHugepagesize: 2048 kB",
    "proc/sys/kernel/numa_balancing": "0",
    "proc/driver/nvidia/version": "NVRM version: 580.1",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "performance",
    "sys/fs/resctrl/info/x": "",
}


def write(root, files):
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text + "\n")


def examine(endpoint, *flags, status=0):
    run = subprocess.run([CTL, "doctor", "--json", f"--endpoint={endpoint}", *flags], capture_output=True, text=True)
    assert run.returncode == status, run.stderr
    return {finding["check"]: finding for finding in json.loads(run.stdout)}


def test_every_fault_has_a_remedy(daemon, tmp_path):
    write(tmp_path, BAD)
    findings = examine(daemon.endpoint, f"--root={tmp_path}")
    for check in ("resctrl", "huge pages", "NUMA balancing", "CPU governor", "init_on_alloc", "descriptor store"):
        assert findings[check]["severity"] == "warning", findings[check]
        assert findings[check]["remedy"]
    assert "1 of 2 CPUs" in findings["CPU governor"]["what"]


def test_a_good_machine_is_told_so(tmp_path):
    write(tmp_path, GOOD)
    kept = Daemon("--keeper", "--metrics_address=off")
    findings = examine(kept.endpoint, f"--root={tmp_path}")
    for check in (
        "daemon",
        "descriptor store",
        "PID namespace",
        "resctrl",
        "huge pages",
        "NUMA balancing",
        "CPU governor",
    ):
        assert findings[check]["severity"] == "ok", findings[check]
    assert kept.stop() == 0


def test_it_works_here_and_without_a_daemon(tmp_path):
    findings = examine(f"unix:{tmp_path}/control.sock")
    assert findings["daemon"]["severity"] == "warning"
    assert "start it" in findings["daemon"]["remedy"]
    text = subprocess.run([CTL, "doctor", f"--endpoint=unix:{tmp_path}/x"], capture_output=True, text=True)
    assert text.returncode == 0 and "page size" in text.stdout


def test_the_remedy_for_a_daemon_that_does_not_run_is_one_that_works_here(tmp_path):
    def remedy():
        return examine(f"unix:{tmp_path}/control.sock", f"--root={tmp_path}")["daemon"]["remedy"]

    assert "--keeper" in remedy() and "systemctl" not in remedy()
    write(tmp_path, {"run/systemd/system/x": ""})
    assert "install-service" in remedy() and "systemctl" not in remedy()
    write(tmp_path, {"usr/lib/systemd/system/superoffloadd@.service": "[Unit]"})
    assert "systemctl enable --now superoffloadd@0.socket" in remedy()


def test_it_knows_both_ways_of_installing_the_service(tmp_path):
    def service(status=0):
        return examine(f"unix:{tmp_path}/control.sock", f"--root={tmp_path}", status=status)["service"]

    write(tmp_path, {"run/systemd/system/x": ""})
    assert "install-service" in service()["remedy"]
    write(tmp_path, {"etc/systemd/system/superoffloadd@.service": "[Unit]"})
    assert service(status=1)["severity"] == "failure"  # its program is missing
    write(tmp_path, {"usr/local/lib/superoffload/superoffload/bin/superoffloadd": "a program"})
    assert "installed by install-service" in service()["what"]
    write(tmp_path, {"usr/lib/systemd/system/superoffloadd@.service": "[Unit]"})
    assert "Debian package" in service()["what"]
