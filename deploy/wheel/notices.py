"""Licences of what a wheel carries beside ours: their texts, and licenses.json, the list for programs.

Each entry has the Debian package, its version, the libraries in the wheel that come from it ("in ours": compiled into
our programs), the names of its licences as far as its copyright file is machine-readable, and the file with the texts.
"""

import json
import pathlib
import re
import shutil
import subprocess

# What is compiled into our programs and the library: vectors, JSON, and the C++ runtime in libsuperoffload.so.
_COMPILED_IN = ("libhwy-dev", "nlohmann-json3-dev", "libstdc++-12-dev")
_GRAFTED = re.compile(r"-[0-9a-f]{8}\.so")
_STANZA = re.compile(r"^Files:.*?^License: *(\S[^\n]*)", re.MULTILINE | re.DOTALL)


def _output(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def _packages(libraries: list[str]) -> dict[str, list[str]]:
    """Package -> libraries. Those of another architecture have this machine's names."""
    owners: dict[str, list[str]] = {}
    for line in _output("dpkg-query", "--search", *(f"*/{name}" for name in libraries)).splitlines():
        package, _, path = line.partition(": ")
        name = pathlib.PurePath(path).name
        if package.startswith("diversion"):
            continue
        found = owners.setdefault(package.split(":")[0], [])
        if name in libraries and name not in found:
            found.append(name)
    missing = set(libraries) - {name for names in owners.values() for name in names}
    if missing:
        raise SystemExit(f"no package has {', '.join(sorted(missing))}: its licence is not known")
    return owners


def _entry(package: str, libraries: list[str], folder: pathlib.Path) -> dict[str, object]:
    notice = folder / f"{package}.txt"
    shutil.copyfile(pathlib.Path("/usr/share/doc") / package / "copyright", notice)
    names = set(_STANZA.findall(notice.read_text(errors="replace")))
    return {
        "package": package,
        "version": _output("dpkg-query", "--show", "--showformat=${Version}", package),
        "libraries": sorted(libraries) or ["in ours"],
        "licenses": sorted(names) or ["see the text"],
        "text": notice.name,
    }


def add(unpacked: pathlib.Path, root: pathlib.Path) -> None:
    """Writes *.dist-info/licenses of an unpacked wheel."""
    (information,) = unpacked.glob("*.dist-info")
    folder = information / "licenses"
    folder.mkdir(exist_ok=True)
    shutil.copy(root / "LICENSE", folder)
    grafted = [_GRAFTED.sub(".so", path.name) for path in sorted((unpacked / "superoffload.libs").iterdir())]
    owners = _packages(grafted) | {package: [] for package in _COMPILED_IN}
    entries = [_entry(package, libraries, folder) for package, libraries in sorted(owners.items())]
    (folder / "licenses.json").write_text(json.dumps(entries, indent=1) + "\n")
