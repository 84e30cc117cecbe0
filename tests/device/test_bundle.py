"""What a bundle asks of the machine that it is unpacked on."""

import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).parent
NEEDS, IMPORTS = HERE / "needs_of_bundle.sh", HERE / "imports_of_bundle.py"
WITHOUT_PATH = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
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
    shutil.copy(BUILD / "tests/device/libpack_alone.so", folder / "lib")
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


def imports(folder, python=sys.executable):
    return subprocess.run([python, "-B", "-S", IMPORTS, folder], capture_output=True, text=True, env=WITHOUT_PATH)


@pytest.fixture
def modules(folder):
    """The Python of a bundle, made of what is installed here."""
    for name in ("superoffload", "grpc", "google", "typing_extensions"):
        found = importlib.util.find_spec(name)
        folders = found.submodule_search_locations
        place = pathlib.Path(next(iter(folders)) if folders else found.origin)
        (shutil.copytree if place.is_dir() else shutil.copy)(place, folder / "python" / place.name)
    ignored = shutil.ignore_patterns("*_of_bundle*", "test_*", "__pycache__")
    shutil.copytree(HERE, folder / "tests" / "device", ignore=ignored)
    shutil.copy(HERE / "first_of_bundle.py", folder / "tests" / "__init__.py")
    (folder / "tests" / "support").mkdir()
    for name in ("fake_cuda_graphs.py", "fake_torch_gpu.py", "fake_jax_gpu.py", "late_torch.py"):
        shutil.copy(HERE.parent / "support" / name, folder / "tests" / "support")
    (folder / "dry").mkdir()
    (folder / "dry" / "pytest.py").touch()
    shutil.copy(os.environ["SUPEROFFLOAD_LIBRARY"], folder / "lib" / "libsuperoffload.so.0")
    return folder


def test_a_bundle_is_imported_by_a_python_that_has_nothing(modules):
    done = imports(modules)
    if "no handlers" in done.stderr and "XLA" in done.stderr:
        pytest.skip("built without JAX")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("lost", "words"),
    [
        ("python/superoffload/v1/optimizer_pb2.py", "superoffload.v1.optimizer_pb2"),
        ("python/superoffload/torch/gpu/forward.py", "needs superoffload.torch.gpu.forward"),
        ("python/typing_extensions.py", "needs typing_extensions"),
        ("tests/support/late_torch.py", "tests.support.fake_torch_gpu needs tests.support.late_torch"),
        ("lib/libsuperoffload.so.0", "libsuperoffload"),
    ],
)
def test_what_is_missing_is_named_also_where_only_pytorch_would_ask_for_it(modules, lost, words):
    (modules / lost).unlink()
    done = imports(modules)
    assert done.returncode == 1 and words in done.stderr


def test_the_machines_protobuf_stays_behind_the_bundles(tmp_path):
    """Whether it is a package of one owner, or a .pth file has claimed `google` at Python's start."""
    bundle, site = tmp_path / "bundle", tmp_path / "site"
    for folder in (bundle / "python", site):
        (folder / "google" / "protobuf").mkdir(parents=True)
        (folder / "google" / "protobuf" / "__init__.py").touch()
    (site / "google" / "__init__.py").touch()
    (site / "google" / "auth.py").touch()
    shutil.copy(HERE / "google_of_bundle.py", bundle / "python/google/__init__.py")
    (bundle / "tests").mkdir()
    shutil.copy(HERE / "first_of_bundle.py", bundle / "tests" / "__init__.py")
    ask = (
        "import sys; sys.path.insert(0, sys.argv[1]); import google; sys.path.append(sys.path.pop(0)); "
        "import tests, google.protobuf, google.auth; print(google.protobuf.__file__)"
    )
    path = f"{bundle}:{bundle / 'python'}"
    done = subprocess.run(
        [sys.executable, "-S", "-c", ask, site], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert done.stdout.strip() == str(bundle / "python/google/protobuf/__init__.py"), done.stderr


def test_an_archive_is_unpacked_once_and_its_own_checks_run(tmp_path):
    bundle, device = tmp_path / "bundle", tmp_path / "bundle/tests/device"
    device.mkdir(parents=True)
    (bundle / "bin").mkdir()
    (bundle / "bin/kernel_check").touch()
    (device / "run.sh").write_text('#!/bin/sh\necho "$0" "$@"\n')
    (device / "run.sh").chmod(0o755)
    archive = tmp_path / "bundle.tar.gz"
    subprocess.run(["tar", "-C", bundle, "-czf", archive, "."], check=True)
    command = [HERE / "run.sh", "smoke", "--bundle", archive, "--output", "out"]
    said = set()
    for _ in range(2):
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "TMPDIR": str(tmp_path)}
        )
        said.add(done.stdout)
    (line,) = said
    script, *words = line.split()
    assert pathlib.Path(script).parents[3] == tmp_path and pathlib.Path(script).parents[2] != bundle
    assert words == ["smoke", "--output", f"{tmp_path}/out"]


def test_an_archive_that_is_no_bundle_is_refused(tmp_path):
    (tmp_path / "notes").touch()
    subprocess.run(["tar", "-C", tmp_path, "-czf", tmp_path / "notes.tar.gz", "notes"], check=True)
    command = [HERE / "run.sh", "smoke", "--bundle", tmp_path / "notes.tar.gz", "--output", "out"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "TMPDIR": str(tmp_path)})
    assert done.returncode == 1 and "is no bundle: tests/device/bundle.sh makes one" in done.stderr
