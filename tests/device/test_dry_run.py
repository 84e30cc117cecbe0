"""Every subcommand of run.sh, with the fake driver and tiny sizes: arguments, budgets, logs and tables."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).parent
BUILD = pathlib.Path(os.environ["SUPEROFFLOAD_BUILD"])
SUBCOMMANDS = ("smoke", "bits", "bench", "kills", "sanitize", "largest")
SMI = """
Driver Version                            : 580.159.04
CUDA Version                              : 13.0
GPU 00000000:00:06.0
    Product Name                          : a stand-in
    Addressing Mode                       : HMM
    MIG Mode
        Current                           : Disabled
        Pending                           : Disabled
    PCI
        GPU Link Info
            PCIe Generation
                Max                       : 5
                Current                   : 4
    FB Memory Usage
        Total                             : 81559 MiB"""
MOST_VISIBLE = 12_000  # characters of a subcommand's output
MOST_FILES, MOST_FILE_BYTES = 8, 16 << 20


def run(*words, cwd=None, **environment):
    return subprocess.run(
        [HERE / "run.sh", *words],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        cwd=cwd,
        timeout=1200,
    )


@pytest.fixture(scope="module")
def python():
    return {"PYTHON": sys.executable}


@pytest.fixture(scope="module")
def dry(tmp_path_factory, python):
    """What was printed, and the output folder. compute-sanitizer and nvidia-smi are stand-ins."""
    folder = tmp_path_factory.mktemp("dry")
    tools = folder / "tools"
    tools.mkdir()
    (tools / "compute-sanitizer").write_text('#!/bin/sh\nwhile [ "${1#--}" != "$1" ]; do shift 2; done\nexec "$@"\n')
    (tools / "nvidia-smi").write_text(f"#!/bin/sh\ncat <<END\n{SMI}\nEND\n")
    for tool in tools.iterdir():
        tool.chmod(0o755)
    fake = {**os.environ, "LD_LIBRARY_PATH": str(BUILD / "tests/support/fake-cuda")}
    check = subprocess.run([BUILD / "tests/device/kernel_check", "--elements", "1"], capture_output=True, env=fake)
    if b"without GPU kernels" in check.stderr:
        pytest.skip("built without nvcc")
    path = f"{tools}:{os.environ['PATH']}"
    words = ["--dry-run", "--build", BUILD, "--output", "out", "--budget", "3000"]  # this machine may be busy
    quick = {"FAKE_CUDA_NO_THREADS": "1"}  # C++ tests of the kernels have the threads of each block
    done = run(*SUBCOMMANDS, *words, cwd=folder, PATH=path, **quick, **python)
    return done, folder / "out"


def report_of(dry, name):
    return json.loads((dry[1] / f"{name}.json").read_text())


def test_all_of_them_pass(dry):
    assert dry[0].returncode == 0, dry[0].stdout + dry[0].stderr


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_each_leaves_a_few_small_files_and_prints_a_short_summary(dry, name):
    files = list(dry[1].glob(f"{name}.*"))
    assert {f"{name}.log", f"{name}.json", f"{name}.txt"} <= {file.name for file in files}
    assert len(files) <= MOST_FILES and all(file.stat().st_size < MOST_FILE_BYTES for file in files)
    assert not (dry[1] / f"{name}.step").exists()
    printed = dry[0].stdout[dry[0].stdout.index(f"# {name}, ") :].split("\n# ")[0]
    assert len(printed) < MOST_VISIBLE and "DRY RUN" in printed
    assert (dry[1] / f"{name}.txt").read_text().rstrip() in printed


def test_smoke_prints_what_decides_how_memory_is_used(dry):
    text = (dry[1] / "smoke.txt").read_text()
    attributes = ("(88)", "(100)", "host NUMA id (134)", "copy engines (40)", "concurrent managed access", "IPC events")
    assert text.startswith("MemAvailable")
    others = (
        "exported as a descriptor",
        "CUDA of the driver",
        "MPS",
        "free and total bytes",
        "attached: mover",
        "from meta",
    )
    for words in attributes + others:
        assert words in text
    facts = report_of(dry, "smoke")["steps"][0]["result"]
    assert {name: value for name, value in facts.items() if "smi" in name} == {
        "nvidia-smi: Driver Version": "580.159.04",
        "nvidia-smi: CUDA Version": "13.0",
        "nvidia-smi: Product Name": "a stand-in",
        "nvidia-smi: Addressing Mode": "HMM",
        "nvidia-smi: MIG Mode/Current": "Disabled",
        "nvidia-smi: PCIe Generation/Current": "4",
        "nvidia-smi: FB Memory Usage/Total": "81559 MiB",
    }
    steps = report_of(dry, "smoke")["steps"]
    assert {f"three steps, mover {mover}: bits equal the host's" for mover in ("trainer", "daemon", "direct")} <= {
        step["title"] for step in steps
    }


def test_bench_has_every_row_in_its_regime(dry):
    report = report_of(dry, "bench")
    assert "32 k tokens" in report["regime"] and "clipped each step" in report["regime"]
    results = report["rows"]
    for mover in ("trainer", "daemon", "direct"):
        for speculation in ("always", "never"):
            for residents in (0, 4):
                row = results[f"superoffload, mover {mover}, speculation {speculation}, {residents} residents"]
                assert row["note"].startswith(f"mover {mover}, 8 of 8 steps clipped")
                assert len(row["milliseconds"]) == 2 and row["tokens"] == 32
    few = {
        label.split(": ")[1]: row for label, row in results.items() if label.startswith("half the model, 2 k tokens")
    }
    assert [row["tokens"] for row in few.values()] == [16] * 13
    for label in ("AdamW resident_buckets=8 resident_steps=4", "AdamW8bit resident_buckets=auto resident_steps=4"):
        assert " resident" in few[label]["note"] and few[label]["floor_milliseconds"] > 0
    text = (dry[1] / "bench.txt").read_text()
    for label in (
        "the floor",
        "emulated",
        "fp32 masters",
        "torchao CPUOffloadOptimizer (bf16",
        "layers compiled",
        "ZeRO-Offload",
    ):
        assert label in text
    for mover in ("trainer", "daemon", "direct"):
        assert re.search(rf"after backward: {mover} +\d+\.\d+ ms until step\(\) has the verdict, +\d", text)
        assert re.search(rf"GPU memory: {mover} .* took {mover}\n", text)
    for slot in ("bfloat16", "float32 "):
        assert re.search(rf"pack beside a product: bfloat16 to {slot} pack \d+\.\d+ ms alone, .*; product \d", text)
    assert "GPU memory: auto" in text and re.search(r"the link: both at once +\d+\.\d GB/s", text)
    assert results["superoffload, layers compiled (own floor), 4 residents"]["floor_milliseconds"] > 0
    assert (dry[1] / "bench.trace.json.gz").read_bytes()[:2] == b"\x1f\x8b"


def test_bits_compares_two_ranks_on_one_gpu(dry):
    (ranks,) = [step for step in report_of(dry, "bits")["steps"] if "two ranks" in step["title"]]
    assert ranks["result"] == {"sharded": "same bits", "replicated": "same bits", "streamed": "same bits"}


def test_bits_compares_loops_with_loops_that_wait(dry):
    steps = {step["title"]: step["outcome"] for step in report_of(dry, "bits")["steps"]}
    for way in ("memory nearly full", "averages of weights", "make_graphed_callables", "reduce-overhead"):
        assert steps[f"PyTorch, {way}: as the loop that waits"] == "passed"


def test_kills_kill_trainers_and_daemons_under_each_mover(dry):
    kills = {step["title"]: step["result"]["kills"] for step in report_of(dry, "kills")["steps"]}
    assert len(kills) == 6 and all(kills.values())


def test_what_is_asked_wrongly_is_answered_with_the_usage(tmp_path, python):
    nothing = run(**python)
    assert nothing.returncode == 2 and "SUBCOMMAND" in nothing.stdout
    unknown = run("smokes", "--output", tmp_path, "--build", BUILD, **python)
    assert unknown.returncode == 2 and "smokes" in unknown.stderr
    nowhere = run("smoke", "--build", BUILD, **python)
    assert nowhere.returncode == 2 and "--output" in nowhere.stderr


def test_without_a_driver_smoke_says_so(tmp_path, python):
    if pathlib.Path("/proc/driver/nvidia/version").exists():
        pytest.skip("there is a driver")
    done = run("smoke", "--build", BUILD, "--output", tmp_path, "--budget", "3000", **python)
    assert done.returncode == 1 and "no NVIDIA driver" in done.stdout
    assert "FAILED: three steps, mover trainer" in done.stdout, "the rest went on"
