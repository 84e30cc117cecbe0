"""The README's example does what the README says."""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]
NUMBER = re.compile(r"\d+\.\d+")


def test_the_example_prints_what_stands_below_it(tmp_path):
    readme = (ROOT / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    (expected,) = re.findall(r"```text\n(.*?)```", readme, re.DOTALL)
    printed = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True, text=True
    ).stdout
    assert NUMBER.sub("#", printed) == NUMBER.sub("#", expected)
    # Torch multiplies matrices of bf16 differently on other machines.
    for ours, theirs in zip(NUMBER.findall(printed), NUMBER.findall(expected), strict=True):
        assert abs(float(ours) - float(theirs)) <= 0.03
