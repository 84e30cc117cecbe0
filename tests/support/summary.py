"""The last lines of tests/run.sh: which tests are flaky, and `N passed, N failed`.

Usage: summary.py RESULTS REPORT...   the JUnit files that runners must have left in the folder RESULTS

NAME-again.xml holds what failed in NAME.xml and ran once more by itself (see runners.sh). A test that passes there is
flaky: it counts as passed, and both logs of it are printed.
"""

import pathlib
import sys
import xml.etree.ElementTree as xml

AGAIN = "-again"
LONGEST_LOG = 60  # lines


class Report:
    """What one runner said of its tests."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self.cases: dict[str, list[xml.Element]] = {}  # a test whose teardown fails has two
        for case in xml.parse(path).getroot().iter("testcase"):
            self.cases.setdefault(_name(case), []).append(case)

    def failed(self) -> set[str]:
        return {name for name in self.cases if self._failures(name)}

    def passed(self) -> set[str]:
        skipped = {name for name, cases in self.cases.items() if any(_is_skipped(case) for case in cases)}
        return self.cases.keys() - self.failed() - skipped

    def log(self, name: str) -> str:
        """What the runner kept of a test's output, its end if it is long."""
        texts = [f"{node.get('message', '')}\n{node.text or ''}" for node in self._failures(name)]
        texts += [node.text or "" for case in self.cases[name] for node in case.iter("system-out")]
        lines = "\n".join(texts).splitlines()
        return "\n".join(lines[-LONGEST_LOG:])

    def _failures(self, name: str) -> list[xml.Element]:
        return [node for case in self.cases[name] for node in case if node.tag in ("failure", "error")]


def _name(case: xml.Element) -> str:
    words = dict.fromkeys(case.get(key, "") for key in ("classname", "name"))  # ctest says the name twice
    return ".".join(words)


def _is_skipped(case: xml.Element) -> bool:
    return (
        case.find("skipped") is not None
        or case.get("status") in ("notrun", "disabled")
        or case.get("result") == "skipped"
    )


def summarize(results: pathlib.Path, expected: list[str]) -> tuple[list[str], int, int]:
    """The lines about single tests, and how many passed and failed. A runner without a report is one failure."""
    lines: list[str] = []
    passed = failed = 0
    stems = {path.stem.removesuffix(AGAIN) for path in results.glob("*.xml")}
    for name in expected:
        if pathlib.Path(name).stem not in stems:
            lines.append(f"failed: {name} is missing, since its runner ended before it could report")
            failed += 1
    for stem in sorted(stems):
        path, again_path = results / f"{stem}.xml", results / f"{stem}{AGAIN}.xml"
        if not path.exists():
            lines.append(
                f"flaky: the runner of {path.name} ended before it could report, and did when it ran by itself"
            )
            path = again_path
        first = Report(path)
        again = Report(again_path) if again_path.exists() else None
        passed += len(first.passed())
        for test in sorted(first.failed()):
            if again is None or test not in again.passed():
                lines.append(f"failed: {test} ({path.name})")
                failed += 1
                continue
            lines += [f"flaky: {test} failed, and passed when it ran by itself ({path.name}, {again_path.name})"]
            lines += ["-- when it failed:", first.log(test), "-- when it passed:", again.log(test), "--"]
            passed += 1
    return lines, passed, failed


if __name__ == "__main__":
    said, good, bad = summarize(pathlib.Path(sys.argv[1]), sys.argv[2:])
    print(*said, f"{good} passed, {bad} failed", sep="\n")
    sys.exit(bad > 0 or good == 0)
