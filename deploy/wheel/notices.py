"""Licences of what a wheel carries beside ours: their texts, and licenses.json, the list for programs.

Each entry has the Debian package, its version, the libraries in the wheel that come from it ("in ours": compiled into
our programs), their licence as an SPDX expression (METADATA has all of them in one), the names of its licences as far
as its copyright file is machine-readable, and the file with the texts.
"""

import json
import pathlib
import re
import shutil
import subprocess

# What is compiled into our programs and the library: vectors, JSON, and the C++ runtime in libsuperoffload.so.
_COMPILED_IN = ("libhwy-dev", "nlohmann-json3-dev", "libstdc++-12-dev")
# What of each package's licences concerns the library, as an SPDX expression.
_EXPRESSIONS = {
    "libabsl": "Apache-2.0",
    "libc-ares": "MIT",
    "libcap": "BSD-3-Clause OR GPL-2.0-only",
    "libcivetweb": "MIT",
    "libgcrypt": "LGPL-2.1-or-later",
    "libgpg-error": "LGPL-2.1-or-later",
    "libgrpc": "Apache-2.0 AND BSD-3-Clause AND MIT",
    "libgrpc++": "Apache-2.0 AND BSD-3-Clause AND MIT",
    "libhwloc": "BSD-3-Clause",
    "libhwy-dev": "Apache-2.0",
    "liblz4": "BSD-2-Clause",
    "liblzma": "LicenseRef-Public-Domain",
    "libnuma": "LGPL-2.1-only",
    "libprometheus-cpp-core": "MIT",
    "libprometheus-cpp-pull": "MIT",
    "libprotobuf": "BSD-3-Clause",
    "libre2": "BSD-3-Clause",
    "libssl": "Apache-2.0",
    "libstdc++-12-dev": "GPL-3.0-or-later WITH GCC-exception-3.1",
    "libsystemd": "LGPL-2.1-or-later",
    "libudev": "LGPL-2.1-or-later",
    "libzstd": "BSD-3-Clause OR GPL-2.0-only",
    "nlohmann-json3-dev": "MIT",
}
_OURS = "Apache-2.0"
_LIBRARY_VERSION = r"-?[\d.]*"  # as Debian puts it behind a package's name
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


def _expression(package: str) -> str:
    for name, expression in _EXPRESSIONS.items():
        if re.fullmatch(re.escape(name) + _LIBRARY_VERSION, package):
            return expression
    raise SystemExit(f"{package} is new in the wheel: read its copyright file and name its licence in {__file__}")


def _joined(expressions: set[str]) -> str:
    """One SPDX expression of all that is in the wheel."""
    terms = {term for expression in expressions for term in expression.split(" AND ")} - {_OURS}
    return " AND ".join([_OURS, *(f"({term})" if " OR " in term else term for term in sorted(terms))])


def _say(metadata: pathlib.Path, expression: str) -> None:
    """Puts the expression into METADATA, which knows one since version 2.4."""
    head, gap, body = metadata.read_text().partition("\n\n")
    lines = [line for line in head.splitlines() if not line.startswith(("Metadata-Version:", "License"))]
    files = [f"License-File: {path.name}" for path in sorted((metadata.parent / "licenses").iterdir())]
    lines = ["Metadata-Version: 2.4", *lines, f"License-Expression: {expression}", *files]
    metadata.write_text("\n".join(lines) + gap + body)


def _entry(package: str, libraries: list[str], folder: pathlib.Path) -> dict[str, object]:
    notice = folder / f"{package}.txt"
    shutil.copyfile(pathlib.Path("/usr/share/doc") / package / "copyright", notice)
    names = set(_STANZA.findall(notice.read_text(errors="replace")))
    return {
        "package": package,
        "version": _output("dpkg-query", "--show", "--showformat=${Version}", package),
        "libraries": sorted(libraries) or ["in ours"],
        "expression": _expression(package),
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
    _say(information / "METADATA", _joined({str(entry["expression"]) for entry in entries}))
