"""Loops that write to optimizer.state: equal to torch.optim, or told."""

import copy
import itertools

import pytest
import torch
from tests.support.loops import assert_agree, batch, lone_rank, loop_daemon, net, ours, ours_on_host  # noqa: F401
from torch.distributed.optim import ZeroRedundancyOptimizer

import superoffload.torch

STEPS = 6
WRITTEN_AT = 3


def zero_moments(optimizer, parameters):
    for p in parameters:
        for key in ("exp_avg", "exp_avg_sq"):
            optimizer.state[p][key].zero_()


def zero_one(optimizer, parameters):
    optimizer.state[parameters[0]]["exp_avg"].zero_()


def prune(optimizer, parameters):
    """As ReLoRA resets: most of the moments."""
    for p in parameters:
        for key in ("exp_avg", "exp_avg_sq"):
            moment = optimizer.state[p][key]
            moment.data.mul_(torch.arange(moment.numel()).view(moment.shape) % 10 == 0)


def write_rows(optimizer, parameters):
    """As dead neurons are revived."""
    state = optimizer.state[parameters[0]]
    state["exp_avg"][3:5] = 0
    state["exp_avg_sq"][3:5] = 0


def write_array(optimizer, parameters):
    array = optimizer.state[parameters[0]]["exp_avg"].numpy()
    array *= 0.5


def zero_steps(optimizer, parameters):
    for p in parameters:
        optimizer.state[p]["step"].zero_()


def set_steps(optimizer, parameters):
    for p in parameters:
        optimizer.state[p]["step"] = torch.tensor(17.0)


def set_moments(optimizer, parameters):
    for p in parameters:
        optimizer.state[p]["exp_avg"] = torch.full_like(p, 0.01)


def set_data(optimizer, parameters):
    optimizer.state[parameters[0]]["exp_avg"].data = torch.full_like(parameters[0], 0.01)


def clear_all(optimizer, parameters):
    optimizer.state.clear()


def clear_each(optimizer, parameters):
    for p in parameters:
        optimizer.state[p].clear()


def pop_one(optimizer, parameters):
    optimizer.state.pop(parameters[1])


def replace_by_nothing(optimizer, parameters):
    optimizer.state[parameters[1]] = {}


def replace_by_another(optimizer, parameters):
    state = optimizer.state[parameters[0]]
    optimizer.state[parameters[0]] = {key: value.clone() / 2 for key, value in state.items() if key != "master"}


WRITES = [
    zero_moments,
    zero_one,
    prune,
    write_rows,
    write_array,
    zero_steps,
    set_steps,
    set_moments,
    set_data,
    clear_all,
    clear_each,
    pop_one,
    replace_by_nothing,
    replace_by_another,
]


def train(optimizer, model, write=lambda *_: None, steps=range(STEPS)):
    for step in steps:
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == WRITTEN_AT:
            write(optimizer, list(model.parameters()))


def results(optimizer, model):
    states = [optimizer.state[p][key] for p in model.parameters() for key in ("step", "exp_avg", "exp_avg_sq")]
    return [*model.parameters(), *states]


@pytest.mark.parametrize("write", WRITES)
def test_what_is_written_counts(ours, write):  # noqa: F811
    def loop(make):
        model = net()
        optimizer = make(model.parameters())
        train(optimizer, model, write)
        return results(optimizer, model)

    assert_agree(loop, ours)


@pytest.mark.parametrize("save", [lambda o: copy.deepcopy(o.state_dict()), lambda o: o.torch_state_dict()])
def test_what_is_written_is_saved(ours_on_host, save):  # noqa: F811
    def loop(make):
        models = net(1), net(1)
        optimizer = make(models[0].parameters())
        train(optimizer, models[0], zero_moments, range(WRITTEN_AT + 1))
        saved = save(optimizer) if hasattr(optimizer, "torch_state_dict") else copy.deepcopy(optimizer.state_dict())
        other = make(models[1].parameters())
        models[1].load_state_dict(models[0].state_dict())
        other.load_state_dict(saved)
        train(other, models[1], steps=range(WRITTEN_AT + 1, STEPS))
        return results(other, models[1])

    assert_agree(loop, ours_on_host)


def test_the_loop_has_keys_of_its_own(ours_on_host):  # noqa: F811
    """Lookahead keeps its slow weights there. They are saved and loaded with the state."""

    def loop(make):
        models = net(1), net(1)
        optimizers = [make(model.parameters()) for model in models]
        for step in itertools.count():
            model, optimizer = models[step >= 4], optimizers[step >= 4]
            if step == 4:
                models[1].load_state_dict(models[0].state_dict())
                optimizer.load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
            if step == 8:
                break
            model(batch(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            for p in model.parameters():
                optimizer.state[p].setdefault("slow", p.detach().clone())
                optimizer.state[p]["slow"].lerp_(p.detach(), 0.5)
        assert all("slow" in optimizer.state[p] for p in model.parameters())
        return [*model.parameters(), *(optimizer.state[p]["slow"] for p in model.parameters())]

    assert_agree(loop, ours_on_host)


def test_a_copy_of_another_moment_is_written(ours_on_host):  # noqa: F811
    model = net()
    optimizer = ours_on_host(model.parameters())
    train(optimizer, model, steps=range(1))
    stale = optimizer.state[model[0].weight]["exp_avg"]
    train(optimizer, model, steps=range(1, 2))
    stale.zero_()
    with pytest.raises(superoffload.Error, match="take it from optimizer.state again"):
        train(optimizer, model, steps=range(2, 3))
    assert optimizer.committed_steps == 2
    optimizer.step()
    assert optimizer.committed_steps == 3


def test_copies_that_nobody_has_are_not_kept(ours_on_host):  # noqa: F811
    model = net()
    optimizer = ours_on_host(model.parameters())
    train(optimizer, model, steps=range(1))
    kept = optimizer.state[model[0].bias]["exp_avg"]
    for p in model.parameters():
        optimizer.state[p]["exp_avg"].norm()
    assert optimizer.state[model[0].bias]["exp_avg"] is kept
    assert len(optimizer._copies._present) == 2, "the one that is kept, and the last"


@pytest.mark.parametrize(
    ("write", "sentence"),
    [
        (lambda state: state.pop("exp_avg"), "begin anew"),
        (lambda state: state.update(exp_avg=torch.zeros(3)), "is given as"),
    ],
)
def test_what_cannot_be_written(ours_on_host, write, sentence):  # noqa: F811
    model = net()
    optimizer = ours_on_host(model.parameters())
    train(optimizer, model, steps=range(1))
    with pytest.raises(superoffload.Error, match=sentence):
        write(optimizer.state[model[0].weight])
    optimizer.state[model[0].weight] = {"exp_avg": torch.zeros_like(model[0].weight)}
    with pytest.raises(superoffload.Error, match="has no step"):
        train(optimizer, model, steps=range(1, 2))


@pytest.mark.parametrize("pickled", [False, True])
def test_torch_says_that_it_cannot_load_the_state(ours_on_host, pickled, tmp_path):  # noqa: F811
    model = net()
    optimizer = ours_on_host(model.parameters())
    train(optimizer, model, steps=range(1))
    state = optimizer.state_dict()
    if pickled:
        torch.save(state, tmp_path / "state.pt")
        state = torch.load(tmp_path / "state.pt", weights_only=True)
    with pytest.raises((ValueError, TypeError), match=r"torch_state_dict\(\) makes one that it can"):
        torch.optim.AdamW(model.parameters()).load_state_dict(state)
    optimizer.load_state_dict(state)


def test_what_zero_redundancy_optimizer_consolidates_is_the_state(ours_on_host, lone_rank):  # noqa: F811
    def begin():
        model = net()
        return model, ZeroRedundancyOptimizer(model.parameters(), optimizer_class=ours_on_host, lr=1e-2)

    model, optimizer = begin()
    train(optimizer, model, steps=range(3))
    optimizer.consolidate_state_dict()
    saved, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    train(optimizer, model, steps=range(3, STEPS))
    resumed, optimizer = begin()
    resumed.load_state_dict(weights)
    optimizer.optim.push_params()
    optimizer.load_state_dict(saved)
    train(optimizer, resumed, steps=range(3, STEPS))
    assert all(map(torch.equal, model.parameters(), resumed.parameters()))
