"""What README files name exists: files, headings, commands, flags, and the tests that show what a fault does."""

import json
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDERS = ("client", "deploy", "kernels", "proto", "server", "systemd", "tests")
LINK = re.compile(r"\]\(([^)\s]+)\)")
PATH = re.compile(rf"`((?:{'|'.join(FOLDERS)})/[\w./@-]+)`")
COMMAND = re.compile(r"\bsuperoffloadctl ([a-z][a-z-]+)\b")
FLAG = re.compile(r"\bsuperoffloadd --(\w+)")
PRESET = re.compile(r"\bcmake --preset (\w+)")
OPTION = re.compile(r" -D(SUPEROFFLOAD_\w+)=")
PACKAGE = re.compile(r"\bsuperoffloadd_([\d.]+)_\w+\.deb")
UNIT = re.compile(r"\bsystemctl [a-z-]+ (?:--now )?(superoffloadd@)\w*(\.\w+)")
SHOWN_BY = re.compile(r"`(tests/[^`]+)`: ((?:`[^`]+`(?:, )?)+)")


def readmes(root: pathlib.Path) -> list[pathlib.Path]:
    return [root / "README.md", *(path for top in FOLDERS for path in sorted((root / top).rglob("README.md")))]


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)


def headings(path: pathlib.Path) -> set[str]:
    """The anchors that a forge makes of a page's headings."""
    found = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


def dead_links(root: pathlib.Path) -> list[str]:
    dead = []
    for path in readmes(root):
        for link in LINK.findall(without_code(path.read_text())):
            name, _, anchor = link.partition("#")
            if "://" in name or name.startswith("mailto:"):
                continue
            target = path.parent / name if name else path
            if not target.exists() or (anchor and target.suffix == ".md" and anchor not in headings(target)):
                dead.append(f"{path.relative_to(root)}: {link}")
    return dead


def named(root: pathlib.Path, pattern: re.Pattern) -> list[tuple[str, str]]:
    return [(str(path.relative_to(root)), name) for path in readmes(root) for name in pattern.findall(path.read_text())]


def fault_rows(root: pathlib.Path) -> list[tuple[str, str]]:
    """Each fault with the cell that says which tests show it."""
    table = (root / "server" / "README.md").read_text().split("\n## What survives what\n")[1]
    rows = [row.strip("|").split(" | ") for row in table.splitlines() if row.startswith("| ")]
    return [(cells[0].strip(), cells[-1].strip()) for cells in rows[2:]]


def is_defined(root: pathlib.Path, file: str, test: str) -> bool:
    path = root / file
    if not path.is_file():
        return False
    if path.suffix == ".py":
        return re.search(rf"^def {re.escape(test)}\(", path.read_text(), re.MULTILINE) is not None
    suite, _, name = test.partition(".")
    return (
        re.search(rf"^TEST\w*\({re.escape(suite)},\s*{re.escape(name)}\)", path.read_text(), re.MULTILINE) is not None
    )


def unshown_faults(root: pathlib.Path) -> list[str]:
    """Rows whose tests do not exist, or that name none."""
    faults = []
    for fault, cell in fault_rows(root):
        shown = [(file, test) for file, names in SHOWN_BY.findall(cell) for test in re.findall(r"`([^`]+)`", names)]
        if not shown or SHOWN_BY.sub("", cell).strip("; "):
            faults.append(f"{fault}: write its tests as `tests/FILE`: `TEST`, `TEST`; `tests/FILE`: ...")
        faults += [f"{fault}: {file} has no {test}" for file, test in shown if not is_defined(root, file, test)]
    return faults


def test_every_relative_link_of_a_readme_leads_somewhere():
    assert not dead_links(ROOT)


def test_every_path_is_that_of_a_file():
    assert not [(readme, path) for readme, path in named(ROOT, PATH) if not (ROOT / path).exists()]


def test_every_command_of_superoffloadctl_is_in_its_usage():
    usage = (ROOT / "client/ctl/main.cc").read_text()
    assert not [(readme, name) for readme, name in named(ROOT, COMMAND) if f"  superoffloadctl {name} " not in usage]


def test_every_flag_of_superoffloadd_is_its_own():
    flags = re.findall(r"^ABSL_FLAG\([\w:]+, (\w+),", (ROOT / "server/main.cc").read_text(), re.MULTILINE)
    assert not [(readme, name) for readme, name in named(ROOT, FLAG) if name not in flags]


def test_every_preset_and_option_of_cmake_is_the_projects():
    presets = {preset["name"] for preset in json.loads((ROOT / "CMakePresets.json").read_text())["configurePresets"]}
    lists = [ROOT / "CMakeLists.txt", *(path for top in FOLDERS for path in (ROOT / top).rglob("CMakeLists.txt"))]
    text = "".join(path.read_text() for path in [*lists, *(ROOT / "deploy").glob("*.cmake")])
    options = re.findall(r"\b(?:option|set)\((SUPEROFFLOAD_\w+)", text)
    assert named(ROOT, PRESET) and named(ROOT, OPTION)
    assert not [(readme, name) for readme, name in named(ROOT, PRESET) if name not in presets]
    assert not [(readme, name) for readme, name in named(ROOT, OPTION) if name not in options]


def test_every_package_and_unit_is_one_that_is_made():
    (version,) = re.findall(
        r"^project\(superoffload\w* VERSION ([\d.]+)", (ROOT / "CMakeLists.txt").read_text(), re.MULTILINE
    )
    assert {name for _, name in named(ROOT, PACKAGE)} == {version}
    assert f"newTag: {version}}}" in (ROOT / "deploy/kubernetes/kustomization.yaml").read_text()
    assert f"\n## {version} " in (ROOT / "CHANGELOG.md").read_text()
    units = {"".join(unit) for _, unit in named(ROOT, UNIT)}
    assert units and not [unit for unit in units if not (ROOT / "systemd" / unit).is_file()]


def test_every_fault_is_shown_by_tests_that_exist():
    assert len(fault_rows(ROOT)) > 20
    assert not unshown_faults(ROOT)


def test_planted_dead_links_are_found(tmp_path):
    (tmp_path / "server").mkdir()
    (tmp_path / "README.md").write_text(
        "# A b\n[x](server) [y](gone.md) [z](#a-b) [w](#c) `[q](code)` [u](https://u)\n"
    )
    (tmp_path / "server" / "README.md").write_text("[up](../README.md#a-b) [down](../README.md#gone)\n")
    assert dead_links(tmp_path) == ["README.md: gone.md", "README.md: #c", "server/README.md: ../README.md#gone"]


def test_planted_faults_without_tests_are_found(tmp_path):
    (tmp_path / "server").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text("def test_whole():\n    pass\n")
    (tmp_path / "tests" / "b_test.cc").write_text("TEST_P(BTest, Whole) {}\n")
    (tmp_path / "server" / "README.md").write_text(
        "# X\n## What survives what\n| fault | effect | shown by |\n| --- | --- | --- |\n"
        "| one | e | `tests/test_a.py`: `test_whole`; `tests/b_test.cc`: `BTest.Whole` |\n"
        "| two | e | `tests/test_a.py`: `test_who` |\n"
        "| three | e | `tests/b_test.cc`: `BTest.Gone` |\n"
        "| four | e | by hand |\n"
    )
    found = unshown_faults(tmp_path)
    assert [line.split(":")[0] for line in found] == ["two", "three", "four"]
