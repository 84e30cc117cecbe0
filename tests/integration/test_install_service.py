"""From a wheel to a service and back, as far as files go; tests/systemd has it in a booted machine."""

import pathlib
import shutil
import subprocess

import pytest
from tests.support.build_directory import BUILD

ROOT = pathlib.Path(__file__).parents[2]
HOME = "usr/local/lib/superoffload"
UNIT = "etc/systemd/system/superoffloadd@.service"
SETTINGS = "etc/superoffloadd/superoffloadd.textproto"


@pytest.fixture
def package(tmp_path):
    """The folder of an installed wheel, with the programs of the build."""
    folder = tmp_path / "site-packages/superoffload"
    shutil.copytree(ROOT / "systemd", folder / "share/systemd")
    for program in ("client/superoffloadctl", "server/superoffloadd", "server/superoffload-plan"):
        (folder / "bin").mkdir(exist_ok=True)
        shutil.copy(BUILD / program, folder / "bin")
    (tmp_path / "site-packages/superoffload.libs").mkdir()
    (tmp_path / "site-packages/superoffload.libs/libx-01234567.so.1").write_text("a library")
    return folder


@pytest.fixture
def machine(tmp_path):
    (tmp_path / "machine").mkdir()
    return tmp_path / "machine"


def ctl(package, *words):
    done = subprocess.run(
        [package / "bin/superoffloadctl", *words], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def files(machine):
    return {str(path.relative_to(machine)) for path in machine.rglob("*") if path.is_file() or path.is_symlink()}


def test_it_shows_what_it_will_do_and_does_nothing_unless_told(package, machine):
    shown = ctl(package, "install-service", f"--root={machine}")
    assert f"create   /{UNIT}" in shown and f"create   /{SETTINGS}" in shown and "1 libraries" in shown
    assert not files(machine)


def test_the_units_name_copies_of_the_programs_that_outlive_the_environment(package, machine):
    ctl(package, "install-service", f"--root={machine}", "--yes", "--superchip=1")
    program = f"/{HOME}/superoffload/bin/superoffloadd"
    unit = (machine / UNIT).read_text()
    assert f"ExecStart={program} " in unit and "/usr/bin/superoffloadd" not in unit
    assert (machine / program[1:]).stat().st_mode & 0o111
    assert (machine / program[1:]).with_name("superoffload-plan").exists()
    links = {path.name: str(path.readlink()) for path in (machine / "usr/local/bin").iterdir()}
    names = ("superoffloadd", "superoffload-plan", "superoffloadctl")
    assert links == {name: f"/{HOME}/superoffload/bin/{name}" for name in names}
    assert (machine / HOME / "superoffload.libs/libx-01234567.so.1").exists()
    assert "/run/superoffloadd-1" in (machine / "etc/tmpfiles.d/superoffloadd.conf").read_text()


def test_a_second_time_it_does_nothing_and_an_upgrade_replaces_what_has_changed(package, machine):
    ctl(package, "install-service", f"--root={machine}", "--yes")
    assert "installed already" in ctl(package, "install-service", f"--root={machine}", "--yes")
    libraries = package.parent / "superoffload.libs"
    (libraries / "libx-01234567.so.1").rename(libraries / "libx-89abcdef.so.1")
    (machine / SETTINGS).write_text("memory_budget_bytes: 1000000000\n")
    settings = package / "share/systemd/superoffloadd.textproto"
    settings.write_text(settings.read_text() + "# new\n")
    ctl(package, "install-service", f"--root={machine}", "--yes")
    assert {path.name for path in (machine / HOME / "superoffload.libs").iterdir()} == {"libx-89abcdef.so.1"}
    assert (machine / SETTINGS).read_text() == "memory_budget_bytes: 1000000000\n"


def test_uninstalling_leaves_nothing_but_changed_configuration(package, machine):
    (machine / "etc/systemd/system").mkdir(parents=True)
    (machine / "etc/systemd/system/other.service").write_text("")
    ctl(package, "install-service", f"--root={machine}", "--yes")
    (machine / SETTINGS).write_text("trainer_cores: 2\n")
    assert f"keep     /{SETTINGS}" in ctl(package, "uninstall-service", f"--root={machine}", "--yes")
    assert files(machine) == {"etc/systemd/system/other.service", SETTINGS}
    assert not (machine / HOME).exists()
    assert "no service is installed" in ctl(package, "uninstall-service", f"--root={machine}", "--yes")


def test_where_the_debian_package_is_installed_it_refuses(package, machine):
    unit = machine / "usr/lib/systemd/system/superoffloadd@.service"
    unit.parent.mkdir(parents=True)
    unit.write_text("")
    done = subprocess.run(
        [package / "bin/superoffloadctl", "install-service", f"--root={machine}"], capture_output=True, text=True
    )
    assert done.returncode == 1 and "the Debian package has installed the service" in done.stderr
