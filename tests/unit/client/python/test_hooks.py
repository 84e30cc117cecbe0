"""A hook calls its owner as long as that lives, and does not keep it alive."""

import gc
import weakref

import pytest
import torch

from superoffload.torch.hooks import eager, weakly


class Owner:
    def __init__(self):
        self.log = []

    def note(self, *told):
        self.log.append(told)
        return len(self.log)


WAYS = pytest.mark.parametrize(
    ("given", "passes", "noted"),
    [((), 0, ()), ((7,), 0, (7,)), ((), 1, ("module",)), ((7, 8), 2, (7, 8, "module", "inputs"))],
)


@WAYS
def test_a_hook_calls_with_what_was_given_and_what_it_is_to_pass(given, passes, noted):
    owner = Owner()
    hook = weakly(owner.note, *given, passes=passes)
    assert [hook("module", "inputs", "outputs"), hook("module", "inputs", "outputs")] == [1, 2]
    assert owner.log == [noted, noted]


@WAYS
def test_a_hook_keeps_nobody_alive_and_then_does_nothing(given, passes, noted):
    owner = Owner()
    log, gone = owner.log, weakref.ref(owner)
    hook = weakly(owner.note, *given, passes=passes)
    gc.disable()  # the last reference goes with the owner: there is no cycle to collect
    try:
        del owner
        assert gone() is None
    finally:
        gc.enable()
    assert hook("module", "inputs") is None
    assert log == []


def test_a_hook_calls_the_method_of_the_owners_own_class():
    class Special(Owner):
        def note(self, *told):
            self.log.append("special")

    owner = Special()
    weakly(owner.note)("module")
    assert owner.log == ["special"]


def test_a_tensor_that_keeps_a_hook_does_not_keep_the_owner():
    class Silent(Owner):
        def note(self, *told):  # torch would take what it returns for another gradient
            super().note(*told)

    owner, tensor = Silent(), torch.zeros(2, requires_grad=True)
    tensor.register_hook(eager(weakly(owner.note, 3)))
    tensor.sum().backward()
    assert owner.log == [(3,)]
    gone = weakref.ref(owner)
    del owner
    gc.collect()
    assert gone() is None
    tensor.sum().backward()
    assert tensor.grad.tolist() == [2.0, 2.0]
