"""A hook calls its owner as long as that lives, and does not keep it alive."""

import gc
import weakref

import pytest
import torch

from superoffload.torch.hooks import eager, weakly, weakly_passing


class Owner:
    def __init__(self):
        self.log = []

    def note(self, *told):
        self.log.append(told)
        return "what torch would take for another input"


def with_index(method):
    return weakly(method, 7)


@pytest.mark.parametrize(("hooked", "noted"), [(weakly, ()), (with_index, (7,)), (weakly_passing, ("module",))])
def test_a_hook_calls_with_what_it_is_to_and_returns_nothing(hooked, noted):
    owner = Owner()
    assert hooked(owner.note)("module", "inputs") is None
    assert owner.log == [noted]


@pytest.mark.parametrize("hooked", [weakly, with_index, weakly_passing])
def test_a_hook_keeps_nobody_alive_and_then_does_nothing(hooked):
    owner = Owner()
    log, gone = owner.log, weakref.ref(owner)
    hook = hooked(owner.note)
    gc.disable()  # the last reference goes with the owner: there is no cycle to collect
    try:
        del owner
        assert gone() is None
    finally:
        gc.enable()
    assert hook("module") is None
    assert log == []


@pytest.mark.parametrize("hooked", [weakly, with_index, weakly_passing])
def test_a_hook_calls_the_method_of_the_owners_own_class(hooked):
    class Special(Owner):
        def note(self, *told):
            self.log.append("special")

    owner = Special()
    hooked(owner.note)("module")
    assert owner.log == ["special"]


def test_a_tensor_that_keeps_a_hook_does_not_keep_the_owner():
    owner, tensor = Owner(), torch.zeros(2, requires_grad=True)
    tensor.register_hook(eager(weakly(owner.note, 3)))
    tensor.sum().backward()
    assert owner.log == [(3,)]
    gone = weakref.ref(owner)
    del owner
    gc.collect()
    assert gone() is None
    tensor.sum().backward()
    assert tensor.grad.tolist() == [2.0, 2.0]
