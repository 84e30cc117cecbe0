"""What a bundle asks of the machine that it is unpacked on."""

import os
import pathlib
import shutil
import subprocess

import pytest

NEEDS = pathlib.Path(__file__).parent / "needs_of_bundle.sh"
BUILD = pathlib.Path(os.environ["SUPEROFFLOAD_BUILD"])


def needs(folder):
    return subprocess.run([NEEDS, folder], capture_output=True, text=True)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "bin").mkdir()
    return tmp_path


def compile_library(path, source, *flags):
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-x", "none", "-o", path, *flags]
    subprocess.run(command, input=source, text=True, check=True)


def test_our_library_and_what_is_linked_like_it_run_with_glibc_2_34(folder):
    library = pathlib.Path(os.environ["SUPEROFFLOAD_LIBRARY"]).resolve()
    if b"libasan" in library.read_bytes() or b"libtsan" in library.read_bytes():
        pytest.skip("a sanitizer's runtime is another matter")
    shutil.copy(library, folder / "lib" / "libsuperoffload.so.0")
    shutil.copy(BUILD / "tests/device/kernel_check", folder / "bin")
    done = needs(folder)
    assert done.returncode == 0, done.stderr


def test_a_newer_glibc_is_refused_by_the_names_of_what_needs_it(folder):
    compile_library(folder / "lib/libnew.so", "unsigned arc4random(void); unsigned f(void) { return arc4random(); }")
    if "GLIBC_2.36" not in subprocess.check_output(["readelf", "-V", folder / "lib/libnew.so"], text=True):
        pytest.skip("this compiler's glibc has no arc4random")
    done = needs(folder)
    assert done.returncode == 1
    assert "lib/libnew.so needs GLIBC_2.36, the newest allowed is 2.34, for arc4random" in done.stderr


def test_a_library_that_is_not_in_it_is_refused(folder):
    compile_library(folder / "lib/libother.so", "int g(void) { return 1; }")
    compile_library(folder / "lib/libours.so", "int g(void); int f(void) { return g(); }", folder / "lib/libother.so")
    (folder / "lib/libother.so").unlink()
    done = needs(folder)
    assert done.returncode == 1 and "libother.so, which is not in the bundle" in done.stderr


def test_a_shared_cxx_runtime_in_our_library_is_refused(folder):
    compile_library(folder / "lib/libsuperoffload.so.0", "int f(void) { return 1; }", "-Wl,--no-as-needed", "-lstdc++")
    done = needs(folder)
    assert done.returncode == 1 and "shares the C++ runtime" in done.stderr


def test_what_is_no_program_is_refused(folder):
    (folder / "bin/notes").write_text("not a program")
    assert needs(folder).returncode == 1
