"""Options and names: what changes nothing is taken, what would have to change results is refused."""

import warnings

import grpc
import pytest
import torch

import superoffload.torch


def build():
    torch.manual_seed(1)
    return torch.nn.Linear(8, 8)


def train(model, optimizer, steps=1):
    for _ in range(steps):
        model(torch.ones(2, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def refused(call, code, *words):
    with pytest.raises(superoffload.Error) as raised:
        call()
    assert raised.value.code == code
    assert all(word in str(raised.value) for word in words), raised.value


def test_torchs_defaults_are_taken_and_change_nothing():
    models = [build(), build()]
    options = dict(foreach=None, fused=False, capturable=False, differentiable=False, maximize=False, amsgrad=False)
    for model, given in zip(models, ({}, options), strict=True):
        train(model, superoffload.torch.AdamW(model.parameters(), 1e-2, (0.9, 0.99), 1e-8, 0.1, **given), 3)
    assert torch.equal(models[0].weight, models[1].weight)
    superoffload.torch.Adam(build().parameters(), 1e-3, (0.9, 0.999), 1e-8, 0, False, fused=True, foreach=True)


@pytest.mark.parametrize(
    "option", [{"amsgrad": True}, {"maximize": True}, {"differentiable": True}, {"max_grad_norm": 1.0}], ids=str
)
def test_what_would_change_results_is_refused_wherever_it_is_said(option):
    (name,) = option
    if name != "max_grad_norm":
        refused(lambda: superoffload.torch.AdamW(build().parameters(), **option), grpc.StatusCode.UNIMPLEMENTED, name)
    model = build()
    groups = [{"params": [model.weight]}, {"params": [model.bias], **option}]
    refused(lambda: superoffload.torch.AdamW(groups), grpc.StatusCode.UNIMPLEMENTED, "parameter group 1", name)
    optimizer = superoffload.torch.AdamW(model.parameters())
    before = model.weight.detach().clone()
    state = optimizer.state_dict()
    state["param_groups"][0].update(option)
    refused(lambda: optimizer.load_state_dict(state), grpc.StatusCode.UNIMPLEMENTED, name)
    optimizer.param_groups[0].update(option)
    refused(lambda: train(model, optimizer), grpc.StatusCode.UNIMPLEMENTED, name)
    assert torch.equal(model.weight, before)
    del optimizer.param_groups[0][name]
    train(model, optimizer)
    assert not torch.equal(model.weight, before)


def test_state_of_torchs_other_weight_decay_is_refused():
    model, theirs = build(), build()
    torch_optimizer = torch.optim.Adam(theirs.parameters(), weight_decay=0.1)
    train(theirs, torch_optimizer)
    optimizer = superoffload.torch.AdamW(model.parameters(), weight_decay=0.1)
    refused(
        lambda: optimizer.load_state_dict(torch_optimizer.state_dict()),
        grpc.StatusCode.FAILED_PRECONDITION,
        "build Adam",
    )


def test_an_optimizer_of_another_kind_is_not_attached_to(daemon):
    model = build()
    superoffload.torch.AdamW(model.parameters(), endpoint=daemon.endpoint, name="run").close()
    refused(
        lambda: superoffload.torch.Adam(model.parameters(), endpoint=daemon.endpoint, name="run"),
        grpc.StatusCode.FAILED_PRECONDITION,
        "is AdamW, but this is Adam",
    )


@pytest.mark.parametrize("name", ["exp/1", "", "ä", "x" * 129, "a b"])
def test_a_name_that_cannot_be_is_refused_and_not_changed_into_another(daemon, name):
    refused(
        lambda: superoffload.torch.AdamW(build().parameters(), endpoint=daemon.endpoint, name=name),
        grpc.StatusCode.INVALID_ARGUMENT,
        "name",
    )


def test_a_name_in_a_daemon_that_ends_with_the_process_is_warned_about(daemon):
    def caught(**options):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            superoffload.torch.AdamW(build().parameters(), **options).close()
        return [warning for warning in caught if "begins at step 0" in str(warning.message)]

    (warning,) = caught(name="kept")
    assert warning.filename == __file__
    assert not caught(name="kept", endpoint=daemon.endpoint)
    assert not caught()


def test_each_parameter_may_have_a_group_of_its_own():
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(1100)]
    optimizer = superoffload.torch.AdamW(
        [{"params": [parameter], "lr": 1e-3 * (1 + index % 7)} for index, parameter in enumerate(parameters)]
    )
    sum(parameter.sum() for parameter in parameters).backward()
    optimizer.step()
    steps = [round((1 - parameter[0].item()) * 1000) for parameter in parameters]
    assert steps == [1 + index % 7 for index in range(1100)]
