"""Folders include, and modules import, only what layers.toml lets them know."""

import ast
import fnmatch
import graphlib
import pathlib
import re
import tomllib

ROOT = pathlib.Path(__file__).resolve().parents[2]
TABLE = tomllib.loads((pathlib.Path(__file__).parent / "layers.toml").read_text())
SOURCES = {".h", ".hpp", ".cc", ".cu", ".cuh", ".inc"}
INCLUDE = re.compile(r'^\s*#\s*include\s*(?:"([^"]+)"|<([^>]+)>)', re.MULTILINE)
OURS = ("proto/", "kernels/", "server/", "client/", "tests/")


def layer_of(path: str, table: dict) -> str | None:
    """The longest row of the table that holds `path`."""
    above = [layer for layer in table["includes"] if f"{path}/".startswith(layer + "/")]
    return max(above, key=len, default=None)


def file_of(included: str) -> str | None:
    """Our file that an include names; None when it is somebody else's or is generated."""
    if included.endswith(".pb.h"):
        return None
    if included.startswith("superoffload/v1/"):
        return "proto/" + included
    if included.startswith("superoffload/"):
        return "client/include/" + included
    if included.startswith(OURS):
        return included
    return None


def include_faults(root: pathlib.Path, table: dict) -> list[tuple[str, str, str]]:
    """What no row allows, as (file, what it includes, why not)."""
    faults = []
    for path in sorted(path for top in OURS[:-1] for path in (root / top).rglob("*") if path.suffix in SOURCES):
        name = path.relative_to(root).as_posix()
        layer = layer_of(name, table)
        if layer is None:
            faults.append((name, "", "its folder has no row in layers.toml"))
            continue
        for quoted, angled in INCLUDE.findall(path.read_text()):
            included = quoted or angled
            ours = file_of(included)
            if ours is not None:
                known = layer_of(ours, table)
                if known != layer and known not in table["includes"][layer]:
                    faults.append((name, included, f"{layer} may not know {known}"))
            elif (owners := owners_of(included, table)) and not name.startswith(tuple(owners)):
                faults.append((name, included, "only " + ", ".join(owners) + " may know it"))
    return faults


def owners_of(header: str, table: dict) -> list[str]:
    """Who may include a header that is not ours; nobody in particular when empty."""
    for pattern, owners in table["headers"].items():
        if header == pattern or fnmatch.fnmatchcase(header, pattern):
            return owners
    return []


def imported_modules(path: pathlib.Path, package: str) -> list[str]:
    """Every name that a file imports, wherever in it, with its module."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: package.count(".") + 2 - node.level] if node.level else []
            module = ".".join([*above, *filter(None, [node.module])])
            found += [f"{module}.{alias.name}" for alias in node.names]
    return found


def import_faults(root: pathlib.Path, table: dict) -> list[tuple[str, str, str]]:
    faults = []
    for where, forbidden in table["imports"].items():
        top = root / where
        files = sorted(top.rglob("*.py")) if top.is_dir() else [top] if top.exists() else []
        if not files:
            faults.append((where, "", "there is no such file or folder"))
        for path in files:
            package = ".".join(path.relative_to(root).parts[2:-1])  # below client/python
            faults += [
                (path.relative_to(root).as_posix(), module, f"{where} may not know {banned}")
                for module in imported_modules(path, package)
                for banned in forbidden
                if f"{module}.".startswith(banned if banned.endswith("_") else banned + ".")
            ]
    return faults


def faults(root: pathlib.Path, table: dict) -> list[str]:
    """What is neither allowed nor excused, and excuses that nothing needs."""
    found = include_faults(root, table) + import_faults(root, table)
    excused = {(name, what) for name, whats in table["still"].items() for what in whats}
    return [
        *(f"{name}: {what}: {why}" for name, what, why in found if (name, what) not in excused),
        *(f"{name}: {what}: drop its row in [still]" for name, what in sorted(excused - {row[:2] for row in found})),
    ]


def test_folders_and_modules_know_only_what_they_may():
    assert not faults(ROOT, TABLE)


def test_the_table_has_no_cycle_and_keeps_client_and_server_apart():
    rows = TABLE["includes"]
    for layer, known in rows.items():
        assert set(known) <= rows.keys(), layer
        strangers = {"server": "client/", "client": "server/"}.get(layer.split("/")[0])
        assert strangers is None or not any(f"{other}/".startswith(strangers) for other in known), layer
    graphlib.TopologicalSorter(rows).prepare()  # raises CycleError


def known_below(layer: str, rows: dict[str, list[str]]) -> set[str]:
    """All that a layer may know, directly or through what it knows."""
    found, left = set(), [layer]
    while left:
        fresh = set(rows[left.pop()]) - found
        found |= fresh
        left += fresh
    return found


def test_the_daemon_knows_no_planner_and_no_simulator():
    rows = TABLE["includes"]
    assert "server/simulator" in known_below("server/plan", rows)
    assert not {"server/plan", "server/simulator"} & known_below("server/main.cc", rows)


def plant(root: pathlib.Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_planted_includes_are_found(tmp_path):
    plant(
        tmp_path,
        {
            "server/memory/arena.h": '#include "server/memory/binding.h"\n#include "kernels/base/check.h"\n',
            "server/memory/upward.h": '#include "server/engine/record.h"\n',
            "client/src/stranger.cc": '#  include "server/memory/arena.h"\n',
            "server/rpc/stranger.cc": "#include <superoffload/client.hpp>\n",
            "server/surprise/new.cc": "",
            "kernels/adam/adam.cc": "#include <thread>\n#include <vector>\n",
            "server/engine/spec.cc": '#include "superoffload/v1/optimizer.pb.h"\n#include "absl/time/time.h"\n',
            "server/optimizer/table.cc": "#include <grpcpp/grpcpp.h>\n",
            "server/main.cc": '#include "server/plan/answer.h"\n',
            "server/host/daemon.cc": '#include "server/simulator/machine.h"\n',
        },
    )
    assert {row[:2] for row in include_faults(tmp_path, TABLE)} == {
        ("server/memory/upward.h", "server/engine/record.h"),
        ("client/src/stranger.cc", "server/memory/arena.h"),
        ("server/rpc/stranger.cc", "superoffload/client.hpp"),
        ("server/surprise/new.cc", ""),
        ("kernels/adam/adam.cc", "thread"),
        ("server/engine/spec.cc", "superoffload/v1/optimizer.pb.h"),
        ("server/optimizer/table.cc", "grpcpp/grpcpp.h"),
        ("server/main.cc", "server/plan/answer.h"),
        ("server/host/daemon.cc", "server/simulator/machine.h"),
    }


def test_planted_imports_are_found(tmp_path):
    core = "client/python/superoffload/_core"
    plant(
        tmp_path,
        {
            f"{core}/library.py": "import ctypes\nfrom . import error\nfrom superoffload._core import daemon\n",
            f"{core}/daemon.py": "def start():\n    import torch.nn\n",
            f"{core}/attachment.py": "from ..torch import optimizer\n",
        },
    )
    rows = {"imports": {core: ["torch", "superoffload.torch"], "client/gone": ["torch"]}}
    assert [row[:2] for row in import_faults(tmp_path, rows)] == [
        (f"{core}/attachment.py", "superoffload.torch.optimizer"),
        (f"{core}/daemon.py", "torch.nn"),
        ("client/gone", ""),
    ]


def test_an_excuse_that_nothing_needs_is_found(tmp_path):
    name = "server/engine/spec.h"
    plant(tmp_path, {name: '#include "server/transport/futex.h"\n'})
    still = {name: ["server/transport/futex.h", "server/rpc/from_proto.h"], "server/gone.h": ["absl/time/time.h"]}
    assert faults(tmp_path, {**TABLE, "imports": {}, "still": still}) == [
        "server/engine/spec.h: server/rpc/from_proto.h: drop its row in [still]",
        "server/gone.h: absl/time/time.h: drop its row in [still]",
    ]
