"""The check of loops notices other bits."""

import pytest
import torch
from tests.device import loops_check


def test_other_bits_are_named_by_tensor_and_number():
    expected = [torch.zeros(3), torch.ones(4)]
    loops_check.compare(expected, [torch.zeros(3), torch.ones(4)])
    with pytest.raises(AssertionError, match="1 of 2 tensors have other bits.*tensor 1, 2 of 4 elements"):
        loops_check.compare(expected, [torch.zeros(3), torch.tensor([1.0, 2.0, 1.0, 3.0])])
