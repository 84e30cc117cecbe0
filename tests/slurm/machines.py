"""A cluster of two machines, each a booted container with two Superchips' daemons, under a real Slurm.

The containers share a root below build/ and have a link of their own. n1 runs slurmctld, both run slurmd. This
machine's Python is seen inside at its own paths. What stands for hardware: the second Superchip of a machine is the
same memory node and the same cores as the first, and /dev/null and /dev/zero are its GPUs.
"""

import contextlib
import os
import pathlib
import shutil
import subprocess
import sys

from tests.support.booted_machine import BootedMachine

TREE = pathlib.Path(__file__).parents[2]
NAMES = ("n1", "n2")
SHARED = "/home/alice"  # of both machines
USER = 1000
_PACKAGES = "systemd,systemd-sysv,dbus,procps,slurmctld,slurmd,slurm-client,munge,libgcc-s1,libstdc++6,python3,iproute2"

_SLURM_CONF = """
ClusterName=test
SlurmctldHost=n1
SlurmUser=root
AuthType=auth/munge
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
ReturnToService=2
KillWait=5
JobRequeue=1
Prolog=/usr/share/superoffload/prolog.sh
Epilog=/usr/share/superoffload/epilog.sh
NodeName=n[1-2] CPUs=2 RealMemory=1000 Gres=gpu:2
PartitionName=all Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP
"""

_GRES = """
NodeName=n[1-2] Name=gpu File=/dev/null
NodeName=n[1-2] Name=gpu File=/dev/zero
"""

# The second Superchip: another daemon on the same memory node, as a machine with one node has no other.
_SECOND_SUPERCHIP = """
[Service]
ExecStartPre=
ExecStartPre=+/usr/bin/install -d -m 0755 -o superoffload -g superoffload /run/superoffloadd-1
ExecStopPost=
ExecStart=
ExecStart=/usr/bin/superoffloadd --runtime_directory=/run/superoffloadd-1 --superchip=0 --metrics_address=off
"""


def _run(*words):
    subprocess.run(list(map(str, words)), check=True)


def _write(path, text, mode=0o644):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)


def _visible():
    """Where this interpreter and its packages are, each given to the machines at the same path."""
    places = {TREE, pathlib.Path(sys.prefix), pathlib.Path(sys.base_prefix)}
    places |= {pathlib.Path(place) for place in sys.path if place and os.path.isdir(place)}
    ours = [place for place in places if not place.is_relative_to("/usr")]
    return [place for place in ours if not any(place != other and place.is_relative_to(other) for other in ours)]


def make_root(root, package):
    if not (root / "complete").exists():
        shutil.rmtree(root, ignore_errors=True)
        _run("mmdebstrap", "--quiet", "--variant=minbase", f"--include={_PACKAGES}", "bookworm", root)
        (root / "complete").touch()
    shutil.copy(package, root / "superoffloadd.deb")
    install = "apt-get install -y -qq --no-install-recommends --reinstall -o Dpkg::Options::=--force-confnew"
    command = f"apt-get update -qq; {install} /superoffloadd.deb"
    inside = ["systemd-nspawn", "-q", "-D", root, "--register=no", "--keep-unit", "--console=pipe"]
    inside += ["--resolv-conf=bind-host", "/bin/sh", "-ec", command]
    subprocess.run(inside, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    _write(root / "etc/default/superoffloadd", "SUPEROFFLOADD_FLAGS=\nSUPERCHIPS=2\n")
    _write(root / "etc/slurm/slurm.conf", _SLURM_CONF)
    _write(root / "etc/slurm/gres.conf", _GRES)
    _write(root / "etc/hosts", "127.0.0.1 localhost\n10.77.0.1 n1\n10.77.0.2 n2\n")
    no_cgroups = "[Service]\nDelegate=no\n"  # a container may make none
    _write(root / "etc/systemd/system/slurmd.service.d/test.conf", no_cgroups)
    _write(root / "etc/systemd/system/superoffloadd@1.service.d/test.conf", _SECOND_SUPERCHIP)
    for unit in ("slurmctld", "slurmd"):
        (root / f"etc/systemd/system/multi-user.target.wants/{unit}.service").unlink(missing_ok=True)
    (root / "etc/hostname").unlink(missing_ok=True)  # the container's is its name
    passwd = root / "etc/passwd"
    if "alice" not in passwd.read_text():
        _run("chroot", root, "useradd", "--uid", USER, "--create-home", "alice")
    for place in _visible():
        for parent in reversed(place.parents):
            (root / str(parent)[1:]).mkdir(exist_ok=True)
            (root / str(parent)[1:]).chmod(0o755)


class Cluster(contextlib.AbstractContextManager):
    def __init__(self, root, shared):
        shared.mkdir(parents=True, exist_ok=True)
        os.chown(shared, USER, USER)
        binds = [f"--bind-ro={place}" for place in _visible()]
        self.machines, self.shared = {}, shared
        with contextlib.ExitStack() as stack:
            for name in NAMES:
                self.machines[name] = BootedMachine(
                    root, "--volatile=overlay", f"--hostname={name}", f"--bind={shared}:{SHARED}", *binds
                )
                stack.callback(self.machines[name].kill)  # nothing is left of it
            self._connect()
            self._start_slurm()
            self._stack = stack.pop_all()

    def __exit__(self, *_):
        self._stack.close()

    def _connect(self):
        first, second = (self.machines[name].leader for name in NAMES)
        _run("ip", "link", "add", "cluster", "netns", first, "type", "veth", "peer", "name", "cluster", "netns", second)
        for number, name in enumerate(NAMES, 1):
            machine = self.machines[name]
            machine("ip", "address", "add", f"10.77.0.{number}/24", "dev", "cluster")
            machine("ip", "link", "set", "cluster", "up")

    def _start_slurm(self):
        for machine in self.machines.values():
            machine("systemctl", "restart", "munge")
        self.machines["n1"]("systemctl", "start", "slurmctld")
        for machine in self.machines.values():
            machine("systemctl", "start", "slurmd")
        BootedMachine.wait(lambda: self.states() == {"idle"})

    def states(self):
        """Of the nodes, as sinfo says them."""
        return set(self.machines["n1"]("sinfo", "--noheader", "--Node", "--format=%t", check=False).stdout.split())

    def as_user(self, *words, check=True):
        path = f"{pathlib.Path(sys.executable).parent}:/usr/bin:/bin"
        library = self.machines["n1"]("find", "/usr/lib", "-name", "libsuperoffload.so.0").stdout.strip()
        variables = {
            "PATH": path,
            "HOME": SHARED,
            "SUPEROFFLOAD_LIBRARY": library,
            "OMP_NUM_THREADS": "1",
        }
        return self.machines["n1"](
            "setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "env", "-i", "-C", SHARED,
            *(f"{key}={value}" for key, value in variables.items()), *words, check=check,
        )  # fmt: skip
