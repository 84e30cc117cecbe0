"""The same commit gives the same programs in every folder. tests/arm64.sh looks for the folder's path in a release."""

import pathlib
import re

ROOT = pathlib.Path(__file__).parents[2]


def test_gpu_kernels_have_no_unnamed_namespace():
    """Whose names nvcc makes of a hash of the source's path."""
    kernels = sorted((ROOT / "kernels").rglob("*.cu*"))
    assert kernels
    assert not [path.name for path in kernels if re.search(r"\bnamespace\s*\{", path.read_text())]
