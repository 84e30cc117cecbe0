"""The wheel, made of what the build has made, in a virtual environment that knows nothing of this tree."""

import email
import json
import os
import pathlib
import re
import subprocess
import sys
import xml.etree.ElementTree as xml
import zipfile

import packaging.licenses
import pytest
from tests.support import quickstart, virtual_environment
from tests.support.build_directory import BUILD

ROOT = pathlib.Path(__file__).parents[2]
LIMIT_BYTES = 20_000_000
PROGRAMS = ("superoffloadd", "superoffload-plan", "superoffloadctl")
SVG = "{http://www.w3.org/2000/svg}"

TRAINS = """
import superoffload.torch, torch
weight = torch.nn.Parameter(torch.ones(64))
optimizer = superoffload.torch.AdamW([weight], lr=0.5)
weight.sum().backward()
optimizer.step()
assert weight[0].item() < 1
print(superoffload.torch.__file__)
"""
TRAINS_INSIDE_OF_JIT = """
import jax, jax.numpy as jnp, superoffload.jax
optimizer = superoffload.jax.adamw(0.5)
params = optimizer.init({"weight": jnp.ones(64)})
step = jax.jit(lambda params: optimizer.step(jax.grad(lambda params: params["weight"].sum())(params)))
params, _ = step(params)
assert params["weight"][0] < 1 and optimizer.committed_steps == 1
print(superoffload.jax.__file__)
"""
ASKS = """
import sys
from superoffload._core import control
import google.protobuf, grpc
control.Connection(sys.argv[1]).close()
print(google.protobuf.__version__, grpc.__version__)
"""


def run(*words, **arguments):
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, **arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def clean(**more):
    """An environment without what points into this tree."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("SUPEROFFLOAD", "LD_"))} | more


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    if "libasan" in run("ldd", BUILD / "server/superoffloadd") or "libtsan" in run(
        "ldd", BUILD / "server/superoffloadd"
    ):
        pytest.skip("nobody packs a sanitizer's build")
    output = tmp_path_factory.mktemp("wheel")
    run(sys.executable, ROOT / "deploy/wheel/make_wheel.py", BUILD, output)
    (path,) = output.iterdir()
    return path


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    folder = tmp_path_factory.mktemp("fresh") / "fresh"
    virtual_environment.make(folder)
    run(folder / "bin/python", "-m", "pip", "install", "--quiet", "--no-deps", wheel)
    return folder


def test_one_wheel_is_for_every_python_and_for_glibc_2_34_and_small(wheel):
    assert re.fullmatch(r"superoffload-[\d.]+-py3-none-manylinux_2_34_\w+\.whl", wheel.name)
    assert wheel.stat().st_size < LIMIT_BYTES
    names = zipfile.ZipFile(wheel).namelist()
    assert not [name for name in names if re.search(r"\.(cpython|abi3)[^/]*\.so$", name)]
    for name in (*(f"bin/{program}" for program in PROGRAMS), "lib/libsuperoffload.so.0", "py.typed"):
        assert f"superoffload/{name}" in names
    assert "superoffload/share/systemd/superoffloadd@.service" in names


def test_it_holds_every_module_of_the_package(wheel):
    package = ROOT / "client/python"
    modules = {path.relative_to(package).as_posix() for path in (package / "superoffload").rglob("*.py")}
    held = {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")}
    assert "superoffload/torch/ranks/shards.py" in held and held >= modules


def test_it_holds_the_published_recipes(wheel):
    recipes = {f"superoffload/finetune/recipes/{path.name}" for path in (ROOT / "client/examples/recipes").iterdir()}
    assert len(recipes) == 7 and recipes <= set(zipfile.ZipFile(wheel).namelist())


def test_every_library_that_it_carries_is_listed_with_its_licence(wheel):
    archive = zipfile.ZipFile(wheel)
    (listed,) = [name for name in archive.namelist() if name.endswith("/licenses/licenses.json")]
    entries = json.loads(archive.read(listed))
    carried = {
        re.sub(r"-[0-9a-f]{8}\.so", ".so", name.split("/")[1]) for name in archive.namelist() if ".libs/" in name
    }
    assert carried and carried <= {library for entry in entries for library in entry["libraries"]}
    for entry in entries:
        assert entry["licenses"] and entry["expression"] and archive.read(f"{os.path.dirname(listed)}/{entry['text']}")


def test_its_metadata_say_what_it_is_and_whose_licences_it_carries(wheel):
    archive = zipfile.ZipFile(wheel)
    (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    metadata = email.message_from_bytes(archive.read(name))
    assert metadata.get_payload().startswith("# superoffload") and metadata["Summary"]
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert "Typing :: Typed" in metadata.get_all("Classifier")
    expression = metadata["License-Expression"]
    assert packaging.licenses.canonicalize_license_expression(expression) == expression
    assert expression.startswith("Apache-2.0 AND ") and "LGPL-2.1-or-later" in expression and not metadata["License"]
    folder = name.replace("METADATA", "licenses/")
    assert {f"{folder}{file}" for file in metadata.get_all("License-File")} <= set(archive.namelist())


def test_it_trains_without_variables_and_with_its_own_daemon(environment, tmp_path):
    trained = run(environment / "bin/python", "-c", TRAINS, cwd=tmp_path, env=clean())
    assert pathlib.Path(trained.strip()).is_relative_to(environment)
    for program in PROGRAMS:
        assert run(environment / "bin" / program, "--version", env=clean()).startswith(f"{program} ")


def test_it_runs_scripts_that_do_not_know_it(environment, tmp_path):
    script = TRAINS.replace("import superoffload.torch, torch", "import sys, torch").replace(
        "superoffload.torch.AdamW", "torch.optim.AdamW"
    )
    script = script.replace("superoffload.torch.__file__", "sys.modules['superoffload.torch'].__file__")
    trained = run(
        environment / "bin/superoffload",
        "run",
        "--",
        environment / "bin/python",
        "-c",
        script,
        cwd=tmp_path,
        env=clean(),
    )
    assert pathlib.Path(trained.strip()).is_relative_to(environment)


def test_it_plans(environment, tmp_path):
    words = ("plan", "--model=gpt2-1b", "--machine=laptop", "--batch=1", "--sequence=128", "--quick")
    for program in ("superoffloadctl", "superoffload"):
        planned = run(environment / "bin" / program, *words, cwd=tmp_path, env=clean())
        assert planned.startswith("gpt2-1b on laptop: ")


def test_it_trains_inside_of_jit(environment, tmp_path):
    trained = run(environment / "bin/python", "-c", TRAINS_INSIDE_OF_JIT, cwd=tmp_path, env=clean())
    assert pathlib.Path(trained.strip()).is_relative_to(environment)


def test_no_wheel_is_made_that_jax_could_not_call(tmp_path):
    (tmp_path / "CMakeCache.txt").write_text("SUPEROFFLOAD_XLA_INCLUDE:PATH=\n")
    made = subprocess.run(
        [sys.executable, ROOT / "deploy/wheel/make_wheel.py", tmp_path, tmp_path / "wheels"],
        capture_output=True,
        text=True,
    )
    assert made.returncode == 1 and "without XLA's headers" in made.stderr


def test_the_quick_start_takes_the_wheel_and_ends_with_a_table_a_picture_and_three_lines(wheel, tmp_path):
    tree = quickstart.tree(tmp_path)
    (tree / "build/wheels").mkdir()
    (tree / "build/wheels" / wheel.name).symlink_to(wheel)
    ended = quickstart.run(tree, "--steps=8", "--hidden=64", "--layers=2")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for row in ("time that the trainer waits for the optimizer", "memory of the trainer's process", "was killed once"):
        assert row in ended.stdout
    (simulated,) = (line for line in ended.stdout.splitlines() if "GPU memory, of 95 GiB" in line)
    assert re.fullmatch(r".* 1\d\d GiB: does not fit +\d\d GiB", simulated)
    script, watch, install = ended.stdout.splitlines()[-3:]
    assert "superoffload.torch.AdamW(" in script and "install-service" in install
    run(watch.split()[-2], "--version", env=clean())
    drawn = xml.parse(tree / "build/quickstart.svg").getroot()
    curves = [path.get("d") for path in drawn.iter(f"{SVG}path")]
    assert len(curves) == 2 and all(curve.count("L") == 7 for curve in curves)
    assert [line for line in drawn.iter(f"{SVG}line") if line.get("stroke-dasharray")]
    assert "kill -9" in (tree / "build/quickstart.svg").read_text()


@pytest.mark.parametrize("versions", ["protobuf==4.25.* grpcio==1.62.*", "protobuf==5.29.*", "protobuf==6.33.*"])
def test_the_bounds_of_protobuf_and_grpcio_hold(wheel, tmp_path, daemon, versions):
    target = tmp_path / "installed"
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", target, *versions.split(), wheel)
    answered = run(
        *(sys.executable, "-c", ASKS, daemon.endpoint), cwd=tmp_path, env=clean(PYTHONPATH=str(target))
    ).split()
    for version, asked in zip(answered, versions.split(), strict=False):
        assert version.startswith(asked.partition("==")[2].rstrip("*"))


def test_a_missing_framework_is_named_with_the_extra_that_brings_it(wheel, tmp_path):
    target = tmp_path / "installed"
    without_torch = ["grpcio", "protobuf", "typing_extensions"]
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", target, wheel, *without_torch)
    imports = subprocess.run(
        [sys.executable, "-S", "-c", "import superoffload.torch"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=clean(PYTHONPATH=str(target)),
    )
    assert "ModuleNotFoundError: superoffload.torch needs torch" in imports.stderr
    assert "pip install 'superoffload[torch]'" in imports.stderr
