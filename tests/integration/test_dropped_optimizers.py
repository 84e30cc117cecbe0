"""An optimizer ends with the last reference to it, though the model keeps its hooks, which do nothing from then on."""

import copy
import gc
import weakref

import pytest
import torch
from tests.integration.test_ctl import ctl
from tests.integration.test_torch_gpu import build, loss_of, optimizer_of
from tests.support.fake_torch_gpu import fake_gpu, gpu_daemon  # noqa: F401

import superoffload


def drop(optimizers):
    """Returns whether the optimizer in the list, and its submitter, end without the garbage collector."""
    gone = [weakref.ref(optimizers[0]), weakref.ref(optimizers[0].submitter())]
    gc.collect()
    gc.disable()
    try:
        optimizers.clear()
        return [each() for each in gone] == [None, None]
    finally:
        gc.enable()


def gradients(model):
    return [None if parameter.grad is None else parameter.grad.clone() for parameter in model.parameters()]


def hooks(model):
    """How many hooks the parameters have."""
    kinds = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return sum(len(getattr(p, kind) or ()) for p in model.parameters() for kind in kinds)


@pytest.mark.parametrize("where", ["daemon", "gpu_daemon"])
@pytest.mark.parametrize("overlap", ["auto", True, False])
def test_hooks_that_a_model_keeps_keep_no_optimizer_and_do_nothing_without_it(request, where, overlap):
    daemon = request.getfixturevalue(where)
    model = build()
    optimizers = [optimizer_of(model, daemon, overlap=overlap)]
    for step in range(5):
        loss_of(model, step).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizers[0].step()
        optimizers[0].zero_grad()
    loss_of(model, 5).backward()  # of a step that nobody ends
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    state = optimizers[0].state_dict()
    name = optimizers[0].name
    assert name in ctl(daemon, "list")
    assert drop(optimizers)
    assert name not in ctl(daemon, "list")
    assert hooks(model) > 0
    alone = build()
    with torch.no_grad():
        for mine, other in zip(alone.parameters(), model.parameters(), strict=True):
            mine.copy_(other)
    for each in (alone, model):
        each.zero_grad()
        loss_of(each, 6).backward()
    assert all(map(torch.equal, gradients(alone), gradients(model)))
    with pytest.raises(superoffload.Error, match="is closed"):
        copy.deepcopy(state)
    again = optimizer_of(model, daemon, overlap=overlap)
    again.step()
    assert again.committed_steps == 1
