"""A short run of every fuzzer; tests/fuzz/run.sh --seconds N is the long one."""

import pathlib
import subprocess


def test_every_fuzzer_runs_on_its_corpus_and_finds_nothing_new():
    script = pathlib.Path(__file__).with_name("run.sh")
    run = subprocess.run([script, "--seconds", "5"], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    assert run.stdout.splitlines()[-1] == "fuzzers=11 failures=0"
