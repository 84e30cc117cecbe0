"""What fails once and passes by itself costs no run, and is named; what fails twice fails."""

import pathlib
import subprocess
import sys

SUPPORT = pathlib.Path(__file__).parent


def run(results: pathlib.Path, line: str) -> None:
    subprocess.run(["bash", "-euo", "pipefail", "-c", f"source {SUPPORT}/runners.sh; {line}"], check=True, cwd=results)


def summary(results: pathlib.Path, *expected: str) -> tuple[int, list[str]]:
    done = subprocess.run(
        [sys.executable, SUPPORT / "summary.py", results, *expected], stdout=subprocess.PIPE, text=True
    )
    return done.returncode, done.stdout.splitlines()


def pytest_file(folder: pathlib.Path, *lines: str) -> pathlib.Path:
    path = folder / "test_made.py"
    path.write_text("\n".join(["import pathlib", *lines]))
    return path


ONCE = [
    "def test_once():",
    "    mark = pathlib.Path(__file__).with_suffix('.mark')",
    "    seen = mark.exists()",
    "    mark.touch()",
    "    assert seen, 'too early'",
]


def test_pytest_repeats_what_failed(tmp_path):
    path = pytest_file(tmp_path, *ONCE, "def test_well(): pass", "def test_broken(): assert not 'broken'")
    run(tmp_path, f"run_pytest {sys.executable} {tmp_path} made {path}")
    code, lines = summary(tmp_path, "made.xml")
    assert code == 1 and lines[-1] == "2 passed, 1 failed"
    assert any(line.startswith("flaky: test_made.test_once ") for line in lines)
    assert any("too early" in line for line in lines)
    assert any(line.startswith("failed: test_made.test_broken ") for line in lines)


def test_a_flaky_test_leaves_the_run_green(tmp_path):
    run(tmp_path, f"run_pytest {sys.executable} {tmp_path} made {pytest_file(tmp_path, *ONCE)}")
    code, lines = summary(tmp_path, "made.xml")
    assert code == 0 and lines[-1] == "1 passed, 0 failed"


def test_many_failures_are_not_repeated(tmp_path):
    path = pytest_file(tmp_path, *(f"def test_{number}(): assert False" for number in range(21)))
    run(tmp_path, f"run_pytest {sys.executable} {tmp_path} made {path}")
    assert not (tmp_path / "made-again.xml").exists()
    assert summary(tmp_path, "made.xml")[1][-1] == "0 passed, 21 failed"


def test_ctest_repeats_what_failed(tmp_path):
    once = "test -e mark || { touch mark; echo too early; exit 1; }"
    (tmp_path / "CTestTestfile.cmake").write_text(
        f"add_test(Made.Once bash -c [=[{once}]=])\nadd_test(Made.Broken false)\nadd_test(Made.Well true)\n"
    )
    run(tmp_path, f"run_ctest {tmp_path} {tmp_path} made")
    code, lines = summary(tmp_path, "made.xml")
    assert code == 1 and lines[-1] == "2 passed, 1 failed"
    assert any(line.startswith("flaky: Made.Once") for line in lines)
    assert any("too early" in line for line in lines)


# Behaves as a program of GoogleTest does: --gtest_filter, --gtest_output, a report in its format.
FAKE_GTEST = """
for word; do
  case "$word" in --gtest_filter=*) filter="${word#*=}";; --gtest_output=xml:*) report="${word#*:}";; esac
done
echo "$filter" >>filters
[[ -e mark || "${CRASH:-}" == "" ]] || { touch mark; exit 139; }
if [[ -e mark ]]; then state='/>'; else state='>\\n<failure message="too early"/></testcase>'; fi
touch mark
printf '<testsuites><testsuite>\\n<testcase name="Once/0" status="run" classname="Made/Suite"%b\\n' "$state" >"$report"
[[ "$filter" == Made* ]] || printf '<testcase name="Well" status="run" classname="Made/Suite"/>\\n' >>"$report"
printf '</testsuite></testsuites>\\n' >>"$report"
"""


def run_fake_gtest(folder: pathlib.Path) -> tuple[int, list[str]]:
    (folder / "fake_gtest").write_text(FAKE_GTEST)
    words = f"{folder} made '-*DeathTest*' bash ./fake_gtest"
    run(folder, f"run_gtest {words}; repeat_gtest {words}")
    return summary(folder, "made.xml")


def test_gtest_repeats_what_failed(tmp_path):
    code, lines = run_fake_gtest(tmp_path)
    assert code == 0 and lines[-1] == "2 passed, 0 failed"
    assert any(line.startswith("flaky: Made/Suite.Once/0 ") for line in lines)
    assert (tmp_path / "filters").read_text().split() == ["-*DeathTest*", "Made/Suite.Once/0"]


def test_a_program_that_crashed_is_repeated_as_a_whole(tmp_path, monkeypatch):
    monkeypatch.setenv("CRASH", "once")
    code, lines = run_fake_gtest(tmp_path)
    assert code == 0 and lines[-1] == "2 passed, 0 failed"
    assert lines[0].startswith("flaky: the runner of made.xml ended")


def test_a_runner_that_never_reports_is_a_failure(tmp_path):
    pytest_file(tmp_path, "def test_well(): pass")
    run(tmp_path, f"run_pytest {sys.executable} {tmp_path} made {tmp_path}/test_made.py")
    code, lines = summary(tmp_path, "made.xml", "absent.xml")
    assert code == 1 and lines[-1] == "1 passed, 1 failed"
