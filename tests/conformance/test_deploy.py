"""What deploy/ ships fits the daemon: rules, dashboard, manifests, Slurm scripts."""

import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import urllib.request

import pytest
import torch
import yaml

import superoffload.torch

DEPLOY = pathlib.Path(__file__).parents[2] / "deploy"
ROOT = DEPLOY.parent
PROMTOOL = ROOT / "build" / "prometheus" / "usr" / "bin" / "promtool"
HADOLINT = pathlib.Path(sys.executable).with_name("hadolint")
CTL = pathlib.Path(os.environ["SUPEROFFLOAD_BUILD"]) / "client"


def promtool(*words):
    run = subprocess.run([PROMTOOL, *words], capture_output=True, text=True, cwd=DEPLOY / "prometheus")
    assert run.returncode == 0, run.stdout + run.stderr


def test_prometheus_rules_are_well_formed_and_fire_when_they_should():
    promtool("check", "rules", "rules.yml")
    promtool("test", "rules", "rules_test.yml")
    promtool("check", "config", "scrape.yml")


def exported(daemon):
    text = urllib.request.urlopen(f"http://{daemon.info.metrics_address}/metrics").read().decode()
    return set(re.findall(r"^# TYPE (\w+)", text, re.M))


def test_rules_and_dashboard_use_metrics_that_exist(metered_daemon):
    optimizer = superoffload.torch.AdamW([torch.nn.Parameter(torch.ones(64))], endpoint=metered_daemon.endpoint)
    optimizer.param_groups[0]["params"][0].sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    known = exported(metered_daemon)
    # There is neither resctrl nor a GPU here; their names are in the catalogue all the same.
    absent = re.compile("superoffload_(partition|gpu)_")
    assert not any(map(absent.match, known))
    catalogue = (DEPLOY.parent / "server" / "metrics" / "metrics.h").read_text()
    texts = (DEPLOY / "prometheus" / "rules.yml").read_text() + (DEPLOY / "grafana" / "dashboard.json").read_text()
    for name in set(re.findall(r"\b(superoffload_\w+?)(?:_bucket|_sum|_count)?\b(?=[\[{ )\"/>]|$)", texts)):
        assert name in known or (absent.match(name) and name in catalogue), name


def test_the_dashboard_is_the_one_of_the_catalogue():
    made = subprocess.run([sys.executable, DEPLOY / "grafana" / "make_dashboard.py"], capture_output=True, text=True)
    assert made.stdout == (DEPLOY / "grafana" / "dashboard.json").read_text(), "run deploy/grafana/make_dashboard.py"
    titles = [panel["title"] for panel in json.loads(made.stdout)["panels"]]
    assert len(titles) == len(set(titles)) > 20


KUBERNETES = DEPLOY / "kubernetes"


def pod(name):
    return yaml.safe_load((KUBERNETES / name).read_text())["spec"]["template"]["spec"]


def mounts(name):
    """Of each container: where it sees which volume."""
    paths = {volume["name"]: volume.get("hostPath", {}).get("path") for volume in pod(name)["volumes"]}
    seen = [{mount["mountPath"]: paths[mount["name"]] for mount in c["volumeMounts"]} for c in pod(name)["containers"]]
    assert {place for container in seen for place in container.values()} == set(paths.values())
    return seen


@pytest.mark.parametrize(
    ("daemons", "trainer"),
    [("daemonset.yaml", "trainer-example.yaml"), ("daemonset-two-superchips.yaml", "run-example.yaml")],
)
def test_trainers_see_the_sockets_of_their_nodes_daemons_at_the_daemons_own_paths(daemons, trainer):
    sockets = [
        {path: host for path, host in seen.items() if path.startswith("/run/superoffloadd")} for seen in mounts(daemons)
    ]
    (seen,) = mounts(trainer)
    assert {path: host for path, host in seen.items() if path.startswith("/run/")} == {
        path: host for its in sockets for path, host in its.items()
    }
    assert pod(trainer)["hostPID"] and pod(daemons)["hostPID"]
    (variable,) = [v for v in pod(trainer)["containers"][0]["env"] if v["name"] == "SUPEROFFLOAD_ENDPOINT"]
    endpoints = {variable["value"].replace("{local_rank}", str(rank)) for rank in range(len(sockets))}
    assert endpoints == {f"unix:{path}/control.sock" for its in sockets for path in its}
    for container in pod(daemons)["containers"]:
        assert container["readinessProbe"]["exec"]["command"][1].removeprefix("--endpoint=") in endpoints


@pytest.mark.parametrize("name", ["daemonset.yaml", "daemonset-two-superchips.yaml"])
def test_the_manifests_daemons_start_with_their_configuration_and_may_stop_in_peace(name, tmp_path):
    kustomization = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())
    config = KUBERNETES / kustomization["configMapGenerator"][0]["files"][0]
    (seconds,) = re.findall(r"stop_checkpoints { seconds: (\d+) }", config.read_text())
    assert pod(name)["terminationGracePeriodSeconds"] > int(seconds)
    assert yaml.safe_load((KUBERNETES / name).read_text())["spec"]["updateStrategy"] == {"type": "OnDelete"}
    kept, ports = set(), set()
    for container in pod(name)["containers"]:
        ((_, place),) = [variable.values() for variable in container["env"]]
        kept.add(place)
        ports.add(container["ports"][0]["containerPort"])
        given = [
            f for f in container["args"] if not f.startswith(("--config", "--superchip", "--runtime", "--metrics"))
        ]
        flags = [*given, f"--config={config}", "--superchip=0", f"--runtime_directory={tmp_path}/run"]
        (tmp_path / "run").mkdir(exist_ok=True)
        run = subprocess.run(
            [os.environ["SUPEROFFLOAD_DAEMON"], *flags, "--exit_on_stdin_eof", "--metrics_address=off"],
            env={**os.environ, "STATE_DIRECTORY": f"{tmp_path}{place}"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
        )
        assert run.returncode == 0, run.stderr
    assert len(kept) == len(ports) == len(pod(name)["containers"])


def test_manifests_are_what_kubernetes_knows():
    import kubernetes_validate  # only here

    folder = DEPLOY / "kubernetes"
    manifests = {path.name: yaml.safe_load(path.read_text()) for path in folder.glob("*.yaml")}
    assert manifests.pop("kustomization.yaml")["kind"] == "Kustomization"  # of no API server, and of no schema
    for name, manifest in manifests.items():
        assert kubernetes_validate.validate(manifest, "1.30", strict=True) == "1.30", name
    misspelled = {**manifests["daemonset.yaml"], "specs": {}}
    with pytest.raises(kubernetes_validate.ValidationError, match="specs"):
        kubernetes_validate.validate(misspelled, "1.30", strict=True)


def test_the_containerfile_has_nothing_to_object_to(tmp_path):
    def lint(path):
        # It changes the folder inside a command, and takes the versions that the distribution has.
        flags = ["--no-color", "--failure-threshold=warning", "--ignore=DL3003", "--ignore=DL3008"]
        return subprocess.run([HADOLINT, *flags, path], capture_output=True, text=True)

    containerfile = DEPLOY / "Containerfile"
    done = lint(containerfile)
    assert done.returncode == 0, done.stdout + done.stderr
    broken = tmp_path / "Containerfile"
    broken.write_text(containerfile.read_text().replace("ENTRYPOINT [", "ENTRYPOINT superoffloadd ["))
    assert lint(broken).returncode != 0


def test_the_containerfile_copies_all_that_the_build_and_the_package_take():
    copied = {
        source.split("/")[0]
        for line in re.findall(r"^COPY (.*)", (DEPLOY / "Containerfile").read_text(), re.MULTILINE)
        for source in line.split()[:-1]
    }
    cmake = (ROOT / "CMakeLists.txt").read_text() + (DEPLOY / "packages.cmake").read_text()
    taken = {match.split("/")[0] for match in re.findall(r"(?<![\w./{}@])[\w.]+(?:/[\w.@-]+)*", cmake)}
    here = {path.name for path in ROOT.iterdir()} - {"build", "tests"}
    assert (taken & here) | {"CMakeLists.txt", "CMakePresets.json"} <= copied <= here


def test_what_is_built_without_tests_includes_nothing_of_them(tmp_path):
    """The container's build, and Debian's and the sdist's users', have no folder tests/."""
    flags = ["-DSUPEROFFLOAD_WITH_TESTS=OFF", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON", "-DCMAKE_UNITY_BUILD=OFF"]
    subprocess.run(["cmake", "-G", "Ninja", "-S", ROOT, "-B", tmp_path, *flags], check=True, capture_output=True)
    commands = json.loads((tmp_path / "compile_commands.json").read_text())
    sources = {path for path in (pathlib.Path(command["file"]) for command in commands) if path.is_relative_to(ROOT)}
    headers = {path for folder in ("client", "kernels", "proto", "server") for path in (ROOT / folder).rglob("*.h")}
    assert len(sources) > 100
    assert not [path for path in sources | headers if '#include "tests/' in path.read_text()]


@pytest.mark.skipif(os.geteuid() != 0, reason="the epilog runs as root")
def test_the_slurm_epilog_frees_what_the_job_left_and_nothing_else(daemon, tmp_path):
    def leave(name):
        superoffload.torch.AdamW([torch.nn.Parameter(torch.ones(8))], endpoint=daemon.endpoint, name=name).close()

    for name in ("slurm-42-a", "slurm-42-b", "slurm-421-a", "kept"):
        leave(name)
    attached = superoffload.torch.AdamW(
        [torch.nn.Parameter(torch.ones(8))], endpoint=daemon.endpoint, name="slurm-42-attached"
    )
    environment = {
        **os.environ,
        "PATH": f"{CTL}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "42",
        "SLURM_JOB_UID": str(os.getuid()),
        "SUPEROFFLOAD_SOCKETS": daemon.endpoint.removeprefix("unix:"),
        "TRIES": "1",
    }

    def epilog():
        return subprocess.run([DEPLOY / "slurm" / "epilog.sh"], env=environment, capture_output=True, text=True)

    def names():
        words = [CTL / "superoffloadctl", f"--endpoint={daemon.endpoint}", "list", "--json"]
        listed = subprocess.run(words, capture_output=True, text=True)
        return sorted(optimizer["name"] for optimizer in json.loads(listed.stdout)["optimizers"])

    # A process of the job that has outlived it keeps memory: the node must not take the next job.
    done = epilog()
    assert done.returncode == 1 and "slurm-42-attached" in done.stderr
    assert names() == ["kept", "slurm-42-attached", "slurm-421-a"]
    attached.close()
    assert epilog().returncode == 0
    assert names() == ["kept", "slurm-421-a"]
    environment["SUPEROFFLOAD_SOCKETS"] = str(tmp_path / "control.sock")
    with socket.socket(socket.AF_UNIX) as nobody:
        nobody.bind(environment["SUPEROFFLOAD_SOCKETS"])
        assert epilog().returncode == 1
    assert subprocess.run(["sh", "-n", DEPLOY / "slurm" / "prolog.sh"]).returncode == 0
