"""What deploy/ ships fits the daemon: rules, dashboard, manifests, Slurm scripts."""

import json
import os
import pathlib
import re
import subprocess
import sys
import urllib.request

import pytest
import torch
import yaml

import superoffload.torch

DEPLOY = pathlib.Path(__file__).parents[2] / "deploy"
PROMTOOL = DEPLOY.parent / "build" / "prometheus" / "usr" / "bin" / "promtool"
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


def test_manifests_name_each_other_and_the_daemons_files():
    folder = DEPLOY / "kubernetes"
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    documents = [yaml.safe_load((folder / name).read_text()) for name in kustomization["resources"]]
    (daemonset,) = [document for document in documents if document["kind"] == "DaemonSet"]
    pod = daemonset["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    config = folder / kustomization["configMapGenerator"][0]["files"][0]
    flags = [f"--config={config}", "--exit_on_stdin_eof", "--metrics_address=off", "--runtime_directory=/tmp/so-k8s"]
    run = subprocess.run([os.environ["SUPEROFFLOAD_DAEMON"], *flags], stdin=subprocess.DEVNULL, capture_output=True)
    assert run.returncode == 0, run.stderr
    trainer = yaml.safe_load((folder / "trainer-example.yaml").read_text())
    assert trainer["spec"]["template"]["spec"]["volumes"][0]["hostPath"]["path"] == "/run/superoffloadd"


@pytest.mark.skipif(os.geteuid() != 0, reason="the epilog runs as root")
def test_the_slurm_epilog_frees_what_the_job_left_and_nothing_else(daemon):
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
    }
    subprocess.run([DEPLOY / "slurm" / "epilog.sh"], env=environment, check=True)
    listed = subprocess.run(
        [CTL / "superoffloadctl", f"--endpoint={daemon.endpoint}", "list", "--json"], capture_output=True, text=True
    )
    names = [optimizer["name"] for optimizer in json.loads(listed.stdout)["optimizers"]]
    assert sorted(names) == ["kept", "slurm-42-attached", "slurm-421-a"]
    attached.close()
    assert subprocess.run(["sh", "-n", DEPLOY / "slurm" / "prolog.sh"]).returncode == 0
