"""Every tensor that the PyTorch adapter makes names its dtype and device: a loop may have set other defaults."""

import ast
import pathlib

import pytest

ADAPTER = pathlib.Path(__file__).resolve().parents[2] / "client" / "python" / "superoffload" / "torch"
MAKE = {"arange", "empty", "empty_strided", "full", "linspace", "ones", "rand", "randint", "randn", "tensor", "zeros"}


def unnamed(source):
    """Calls that leave the dtype or the device to torch's defaults: their lines."""
    return [
        call.lineno
        for call in ast.walk(ast.parse(source))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in MAKE
        and isinstance(call.func.value, ast.Name)
        and call.func.value.id == "torch"
        and not {"dtype", "device"} <= {keyword.arg for keyword in call.keywords}
    ]


@pytest.mark.parametrize("path", sorted(ADAPTER.rglob("*.py")), ids=lambda path: str(path.relative_to(ADAPTER)))
def test_tensors_name_their_dtype_and_device(path):
    assert unnamed(path.read_text()) == []


def test_a_call_that_names_neither_is_found():
    assert unnamed("import torch\ntorch.zeros(3)\ntorch.ones(3, dtype=torch.int64, device='cpu')") == [2]
