"""Generates the modules of superoffload/v1, then builds as pyproject.toml says.

With $SUPEROFFLOAD_PROGRAMS, a folder with bin/, lib/ and share/, the wheel holds the daemon and its like and is one
architecture's, for every Python 3; deploy/wheel.sh makes such a folder. Without it, the wheel holds Python alone.
"""

import os
import pathlib
import re
import shutil
import sys

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.dist import Distribution
from wheel.bdist_wheel import bdist_wheel

HERE = pathlib.Path(__file__).parent.resolve()
ROOT = HERE.parent.parent
PROGRAMS = os.environ.get("SUPEROFFLOAD_PROGRAMS")

sys.path.insert(0, str(HERE))
from generate import generate  # noqa: E402


class BuildWithPrograms(build_py):
    def run(self):
        super().run()
        recipes = pathlib.Path(self.build_lib) / "superoffload" / "finetune" / "recipes"
        shutil.copytree(ROOT / "client" / "examples" / "recipes", recipes, dirs_exist_ok=True)
        if PROGRAMS:
            shutil.copytree(PROGRAMS, pathlib.Path(self.build_lib) / "superoffload", dirs_exist_ok=True)


class OneArchitecture(Distribution):
    def has_ext_modules(self):
        return bool(PROGRAMS)


class EveryPython(bdist_wheel):
    def get_tag(self):
        platform = os.environ.get("SUPEROFFLOAD_PLATFORM") or super().get_tag()[2]
        return "py3", "none", platform


scripts = ["superoffload = superoffload.__main__:main"]
if PROGRAMS:
    programs = ("superoffloadd", "superoffload-plan", "superoffloadctl")
    scripts += [f"{name} = superoffload._core.programs:{name.replace('-', '_')}" for name in programs]
generate(ROOT / "proto", HERE)
(version,) = re.findall(
    r"^project\(superoffloadd VERSION ([\d.]+)", (ROOT / "CMakeLists.txt").read_text(), re.MULTILINE
)
setup(
    version=version,
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    entry_points={"console_scripts": scripts},
    distclass=OneArchitecture,
    cmdclass={"build_py": BuildWithPrograms, "bdist_wheel": EveryPython},
)
