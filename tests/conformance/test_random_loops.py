"""Loops that nobody wrote: what they see is what they see with torch.optim, or an error says why not.

RANDOM_LOOPS=N tries N of each form instead of a few. A loop that differs is named by its seed.
"""

import os

import pytest
import torch
from tests.support.loops import FORMS, loop_daemon, ours  # noqa: F401
from tests.support.random_loop import Loop, actions

import superoffload

COUNT = int(os.environ.get("RANDOM_LOOPS", 8))
# torch's own, where a loop writes a gradient that has left the GPU.
WRITTEN = "more than one element of the written-to tensor"


def same(ours, theirs):
    """NaN is what a gradient that has left the GPU shows to who reads it."""
    return torch.isnan(ours).any() or torch.allclose(ours, theirs, atol=2e-4, rtol=2e-4)


# Without "late": it stops the daemon in backward, and these loops do more than step() afterwards.
@pytest.mark.parametrize("ours", [form for form in FORMS if form != "late"], indirect=True)
@pytest.mark.parametrize("seed", range(COUNT))
def test_what_a_loop_sees(ours, seed):
    theirs = Loop(seed, lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))
    hosted = Loop(seed, ours)
    for number, action in enumerate(actions(seed)):
        expected = theirs.do(*action)
        try:
            seen = hosted.do(*action)
        except superoffload.Error:
            return
        except RuntimeError as error:
            assert WRITTEN in str(error)
            return
        assert len(seen) == len(expected)
        assert all(map(same, seen, expected)), f"seed {seed} {ours.form}: {actions(seed)[: number + 1]}"
