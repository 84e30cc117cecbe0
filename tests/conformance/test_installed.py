"""The installed tree as a C and C++ user finds it."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
from tests.support.build_directory import BUILD, exclusively

ROOT = pathlib.Path(__file__).parents[2]

PROJECT = """
cmake_minimum_required(VERSION 3.25)
project(consumer LANGUAGES C CXX)
set(CMAKE_CXX_STANDARD 20)
add_executable(trainer trainer.cc)
{readme}
find_package(absl CONFIG REQUIRED)
target_link_libraries(trainer PRIVATE absl::flags absl::flags_parse)
add_executable(plain plain.c)
target_link_libraries(plain PRIVATE superoffload::client)
"""
PLAIN = """
#include <stdio.h>
#include <superoffload/superoffload.h>
int main(void) {
  struct superoffload_connection* connection = NULL;
  char token[65];
  int code = superoffload_connect("/nonexistent", &connection, token);
  printf("%d %s\\n", code, superoffload_last_error());
  return 0;
}
"""


def run(*words, **arguments):
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, **arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("root")
    with exclusively():
        run("cmake", "--install", BUILD, "--prefix", "/usr", env={**os.environ, "DESTDIR": str(folder)})
    return folder


def test_its_planner_is_found_without_variables(root):
    words = ("plan", "--model=gpt2-1b", "--machine=laptop", "--batch=1", "--sequence=128", "--quick")
    bare = {name: value for name, value in os.environ.items() if not name.startswith("SUPEROFFLOAD")}
    assert run(root / "usr/bin/superoffloadctl", *words, env=bare).startswith("gpt2-1b on laptop: ")


def test_cmake_and_pkg_config_users_build_against_it(root, tmp_path, daemon):
    (readme,) = re.findall(r"```cmake\n(.*?)```", (ROOT / "client/README.md").read_text(), re.DOTALL)
    (tmp_path / "CMakeLists.txt").write_text(PROJECT.format(readme=readme))
    (tmp_path / "plain.c").write_text(PLAIN)
    (tmp_path / "trainer.cc").write_text((ROOT / "client/examples/train_bigram.cc").read_text())
    (config,) = root.glob("usr/lib*/**/superoffload-config.cmake")
    run("cmake", "-S", tmp_path, "-B", tmp_path / "b", "-G", "Ninja", f"-Dsuperoffload_DIR={config.parent}")
    run("ninja", "-C", tmp_path / "b")
    assert run(tmp_path / "b" / "plain").startswith("14 ")
    (tmp_path / "text").write_text("to be or not to be " * 100)
    trained = run(tmp_path / "b/trainer", f"--text={tmp_path}/text", "--steps=10", f"--endpoint={daemon.endpoint}")
    assert "loss" in trained
    (pc,) = root.glob("usr/lib*/**/superoffload.pc")
    flags = run(
        "pkg-config", "--cflags", "--libs", "superoffload", env={**os.environ, "PKG_CONFIG_PATH": str(pc.parent)}
    )
    assert "-lsuperoffload" in flags


TRAINS = """
import superoffload.plan, superoffload.torch, torch
weight = torch.nn.Parameter(torch.ones(64))
optimizer = superoffload.torch.AdamW([weight], lr=0.5)
weight.sum().backward()
optimizer.step()
print(superoffload.torch.__file__, weight[0].item() < 1)
"""


def test_pip_installs_the_python_package(tmp_path):
    (command,) = re.findall(r"^    (pip install \./\S+)", (ROOT / "deploy/README.md").read_text(), re.MULTILINE)
    clone = tmp_path / "clone"
    generated = shutil.ignore_patterns("__pycache__", "*_pb2*", "*.egg-info", "build")
    for folder in ("client/python", "client/examples/recipes", "proto"):
        shutil.copytree(ROOT / folder, clone / folder, ignore=generated)
    for file in ("CMakeLists.txt", "README.md"):  # the version, the description
        shutil.copy(ROOT / file, clone)
    fresh = tmp_path / "fresh"
    run(sys.executable, "-m", "venv", "--without-pip", fresh)
    (site,) = fresh.glob("lib/python*/site-packages")
    # What is behind a .pth file has packages, but no editable install of this one: torch, and what builds need.
    installed = [path for path in sys.path if path.endswith("-packages")]
    (site / "installed.pth").write_text("\n".join(installed) + "\n")
    pip = [sys.executable, "-m", "pip", "--python", fresh / "bin/python", *command.split()[1:]]
    run(*pip, "--no-deps", "--no-build-isolation", "--quiet", cwd=clone)
    file, trained = run(fresh / "bin/python", "-c", TRAINS, cwd=tmp_path).split()
    assert pathlib.Path(file).is_relative_to(site) and trained == "True"
    assert "superoffload plan" in run(fresh / "bin/superoffload", "--help")
