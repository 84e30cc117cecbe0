"""The build backend of the sdist: cmake, then the Python package with what it has built. See make_sdist.py."""

import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "sdist"


def _xla_headers() -> pathlib.Path:
    (jaxlib,) = importlib.util.find_spec("jaxlib").submodule_search_locations
    return pathlib.Path(jaxlib) / "include"


def _enter() -> None:
    os.chdir(ROOT / "client" / "python")
    sys.argv[1:] = []


def get_requires_for_build_wheel(config_settings=None):
    return []


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    import make_wheel
    from setuptools import build_meta

    subprocess.run(
        [
            "cmake",
            "-S",
            ROOT,
            "-B",
            BUILD,
            "-G",
            "Ninja",
            "-DCMAKE_BUILD_TYPE=Release",
            "-DSUPEROFFLOAD_WITH_TESTS=OFF",
            f"-DSUPEROFFLOAD_XLA_INCLUDE={_xla_headers()}",
        ],
        check=True,
    )
    targets = ["superoffloadd", "superoffload-plan", "superoffloadctl", "superoffload_client"]
    subprocess.run(["ninja", "-C", BUILD, *targets], check=True)
    programs = pathlib.Path(BUILD, "programs")
    shutil.rmtree(programs, ignore_errors=True)
    make_wheel.stage(BUILD, programs, "strip")
    os.environ["SUPEROFFLOAD_PROGRAMS"] = str(programs)
    _enter()
    return build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)
