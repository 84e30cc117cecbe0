"""Virtual environments of tests: fresh, but with what the test's own Python has installed."""

import pathlib
import subprocess
import sys


def make(folder: pathlib.Path) -> None:
    """A .pth file shows torch, pip and what our package depends on. Editable installs, ours too, are not seen."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "installed.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")) + "\n")
