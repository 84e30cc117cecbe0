"""Loops that look at parameters, or write to them, between steps: equal to torch.optim, or the expected error."""

import copy
import multiprocessing
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
import torch.multiprocessing  # tensors in ForkingPickler
from tests.support.loops import assert_agree, batch, loop_daemon, net, ours, ours_on_gpu, ours_on_host, theirs  # noqa: F401

import superoffload

STEPS = 8
CHANGED = "push_params.*pull_params"


def step_again_after_push(optimizer):
    """What the error says: the model wins, and the same step is called again."""
    try:
        optimizer.step()
    except superoffload.Error as error:
        assert "push_params" in str(error)
        before = optimizer.last_result
        optimizer.push_params()
        optimizer.step()
        assert optimizer.last_result.committed_steps == (before.committed_steps if before else 0) + 1


def clamp(model, _):
    for p in model.parameters():
        p.data.clamp_(-0.001, 0.001)  # nearly all elements, of which a GPU compares a few


def copy_back(model, slow):
    """Lookahead."""
    for p, q in zip(model.parameters(), slow, strict=True):
        q.lerp_(p.detach(), 0.5)
        p.data.copy_(q)


def broadcast(model, _):
    for p in model.parameters():
        array = p.data.numpy()  # as gloo and NCCL write: behind torch's back
        array *= 0.9


WRITES = [clamp, copy_back, broadcast]


def train(make, write, step_of, model=None):
    model = model or net()
    optimizer = make(model.parameters())
    slow = [p.detach().clone() for p in model.parameters()]
    for step in range(STEPS):
        model(batch(step)).square().mean().backward()
        step_of(optimizer)
        optimizer.zero_grad()
        if step % 3 == 2:
            write(model, slow)
    return model.parameters()


@pytest.mark.parametrize("write", WRITES)
def test_written_parameters_are_an_error_before_the_step_that_would_undo_them(ours, write):  # noqa: F811
    model, written = net(), []

    def write_and_remember(model, slow):
        write(model, slow)
        written[:] = [p.detach().clone() for p in model.parameters()]

    with pytest.raises(superoffload.Error, match=CHANGED):
        train(ours, write_and_remember, lambda optimizer: optimizer.step(), model)
    (optimizer,) = ours.built
    assert optimizer.last_result.committed_steps == 3, "nothing was committed on top of the change"
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), written, strict=True)), "and nothing undone"


@pytest.mark.parametrize("write", WRITES)
def test_after_push_params_the_same_step_can_be_called_again(ours_on_host, write):  # noqa: F811
    def loop(make):
        return train(make, write, (lambda o: o.step()) if make is theirs else step_again_after_push)

    assert_agree(loop, ours_on_host)


def test_after_pull_params_the_same_step_can_be_called_again(ours_on_host):  # noqa: F811
    def loop(make):
        model = net()
        optimizer = make(model.parameters())
        for step in range(STEPS):
            model(batch(step)).square().mean().backward()
            if make is not theirs and step % 3 == 2:
                model[0].weight.data.add_(1)
                with pytest.raises(superoffload.Error, match=CHANGED):
                    optimizer.step()
                optimizer.pull_params()
            optimizer.step()
            optimizer.zero_grad()
        return model.parameters()

    assert_agree(loop, ours_on_host)


def test_a_single_element_is_found(ours_on_host):  # noqa: F811
    model = torch.nn.Linear(300, 300)
    optimizer = ours_on_host([("weight", model.weight), ("bias", model.bias)])
    model(torch.ones(1, 300)).sum().backward()
    optimizer.step()
    array = model.weight.detach().numpy()
    array[123, 45] = -array[123, 45]
    with pytest.raises(superoffload.Error, match=f"parameter weight .*{CHANGED}"):
        optimizer.step()
    array[123, 45] = -array[123, 45]
    optimizer.step()


def test_swapping_averaged_weights_in_and_back_is_accepted(ours_on_host):  # noqa: F811
    def loop(make):
        model = net()
        optimizer = make(model.parameters())
        average = copy.deepcopy(model)
        seen = []
        for step in range(STEPS):
            model(batch(step)).square().mean().backward()
            for _ in range(2):
                optimizer.step() if _ else None
                kept = [p.detach().clone() for p in model.parameters()]
                with torch.no_grad():
                    for p, a in zip(model.parameters(), average.parameters(), strict=True):
                        a.lerp_(p, 0.1)
                        p.copy_(a)
                    seen.append(model(batch(0)).square().mean())
                    for p, k in zip(model.parameters(), kept, strict=True):
                        p.copy_(k)
            optimizer.zero_grad()
        return [*model.parameters(), *seen]

    assert_agree(loop, ours_on_host)


def test_views_ties_and_saved_state_see_every_step(ours):  # noqa: F811
    """Made before or after building, also through .data."""

    def loop(make):
        model = net()
        row, flat = model[0].weight.data[3], model[2].weight.detach().view(-1)
        shadow = torch.nn.Parameter(torch.empty(0), requires_grad=False)
        shadow.data = model[0].weight.data
        optimizer = make(model.parameters())
        saved, late = model.state_dict(), model[0].bias.data[5:9]
        seen = []
        for step in range(STEPS):
            loss = (model(batch(step)) + batch(step) @ model[0].weight.detach()[:8].T * 0.1).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            looked_at = [row, flat, shadow, late, *saved.values()]
            assert torch.equal(row, model[0].weight[3]) and torch.equal(shadow, model[0].weight)
            seen += [tensor.clone() for tensor in looked_at]
        if make is ours:
            optimizer.close()
            with torch.no_grad():
                model[0].weight.mul_(2)
            assert torch.equal(row, model[0].weight[3]) and torch.equal(shadow, model[0].weight)
        return seen

    assert_agree(loop, ours)


def test_on_a_gpu_a_tensor_that_covers_several_parameters_is_refused(ours_on_gpu):  # noqa: F811
    both = torch.ones(16, 8)
    halves = [torch.nn.Parameter(both[:8]), torch.nn.Parameter(both[8:])]
    with pytest.raises(superoffload.Error, match=r"shape \[16, 8\].*after building"):
        ours_on_gpu(halves)
    assert [half.data_ptr() for half in halves] == [both.data_ptr(), both[8:].data_ptr()], "nothing was moved"
    del both
    ours_on_gpu(halves)


def test_on_a_gpu_memory_formats_are_refused(ours_on_gpu):  # noqa: F811
    convolution = torch.nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
    with pytest.raises(superoffload.Error, match="contiguous_format"):
        ours_on_gpu(convolution.parameters())
    convolution.to(memory_format=torch.contiguous_format)
    optimizer = ours_on_gpu(convolution.parameters())
    convolution.to(memory_format=torch.channels_last)
    convolution(torch.ones(2, 3, 6, 6)).square().mean().backward()
    with pytest.raises(superoffload.Error, match=CHANGED):
        optimizer.step()
    optimizer.push_params()
    convolution.zero_grad()
    convolution(torch.ones(2, 3, 6, 6)).square().mean().backward()
    optimizer.step()
    assert convolution.weight.is_contiguous() and optimizer.last_result.committed_steps == 1


def test_on_a_gpu_averaged_weights_are_swapped_in_and_back_between_steps(ours_on_gpu):  # noqa: F811
    def loop(make):
        model = net()
        optimizer = make(model.parameters())
        average = copy.deepcopy(model)
        seen = []
        for step in range(STEPS):
            model(batch(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            kept = [p.detach().clone() for p in model.parameters()]
            with torch.no_grad():
                for p, a in zip(model.parameters(), average.parameters(), strict=True):
                    a.lerp_(p, 0.1)
                    p.copy_(a)
                seen.append(model(batch(0)).square().mean())
                for index, (p, k) in enumerate(zip(model.parameters(), kept, strict=True)):
                    if index % 2:
                        p.copy_(k)
                    else:
                        p.data = k
        return [*model.parameters(), *seen]

    assert_agree(loop, ours_on_gpu)


def test_on_a_gpu_memory_that_another_process_shares_is_an_error(ours_on_gpu):  # noqa: F811
    """Steps would not reach the other process; on a real GPU torch itself refuses to share memory that is not its."""
    model = net()
    optimizer = ours_on_gpu(model.parameters())
    model.share_memory()
    model(batch(0)).square().mean().backward()
    with pytest.raises(superoffload.Error, match=CHANGED):
        optimizer.step()


def test_memory_formats_and_slices_of_other_tensors(ours_on_host):  # noqa: F811
    def loop(make):
        torch.manual_seed(3)
        convolution = torch.nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        storage = torch.randn(8, 20)
        column = torch.nn.Parameter(storage[:, 4:8])
        strides = [convolution.weight.stride(), column.stride()]
        optimizer = make([*convolution.parameters(), column])
        for step in range(STEPS):
            images = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(step))
            pooled = convolution(images).mean((2, 3))
            (pooled @ column).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert [convolution.weight.stride(), column.stride()] == strides
        return [*convolution.parameters(), storage]

    assert_agree(loop, ours_on_host)


def test_shared_memory_sees_every_step(ours_on_host):  # noqa: F811
    model = net()
    optimizer = ours_on_host(model.parameters())
    model.share_memory()
    reader, writer = multiprocessing.get_context("spawn").Pipe()
    for p in model.parameters():  # to another process, and here it is the same one
        writer.send_bytes(ForkingPickler.dumps(p.detach()))
    received = [ForkingPickler.loads(reader.recv_bytes()) for p in model.parameters()]
    for step in range(STEPS):
        before = [p.clone() for p in received]
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert all(p.is_shared() for p in model.parameters())
        assert not any(torch.equal(*pair) for pair in zip(before, received, strict=True))
        assert all(torch.equal(*pair) for pair in zip(received, model.parameters(), strict=True))


def test_parameters_that_share_memory_are_refused(ours_on_host):  # noqa: F811
    a, b = torch.nn.Parameter(torch.ones(8, 8)), torch.nn.Parameter(torch.ones(8, 8))
    b.data = a.data
    with pytest.raises(superoffload.Error, match="share memory"):
        ours_on_host([a, b])
    halves = torch.ones(8, 8)
    ours_on_host([torch.nn.Parameter(halves[:, :4]), torch.nn.Parameter(halves[:, 4:])])
    with pytest.raises(superoffload.Error, match="share memory"):
        ours_on_host([torch.nn.Parameter(halves[:, :5]), torch.nn.Parameter(halves[:, 4:])])
    with pytest.raises(superoffload.Error, match="share memory"):
        ours_on_host([torch.nn.Parameter(torch.ones(1, 8).expand(8, 8))])


def test_a_model_that_was_cast_is_refused(ours_on_host):  # noqa: F811
    model = net()
    optimizer = ours_on_host(model.parameters())
    model.double()
    model(batch(0).double()).square().mean().backward()
    with pytest.raises(superoffload.Error, match="build a new optimizer"):
        optimizer.step()
    model.float()
    for p in model.parameters():
        p.grad = p.grad.float()
    optimizer.step()


def gradual_freezing(make):
    """The first layer is frozen for some steps: its weights, moments and step count stay, and go on from there."""
    model = net()
    optimizer = make(model.parameters(), weight_decay=0.1)
    for step in range(3 * STEPS):
        model[0].requires_grad_(step // 4 % 2 == 0)
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*model.parameters(), *(optimizer.state[p]["step"] for p in model.parameters())]


def heads(make):
    """Several tasks share a trunk; each step trains one head, and one head is never used."""
    torch.manual_seed(5)
    trunk, heads = torch.nn.Linear(8, 48), [torch.nn.Linear(48, 4) for _ in range(4)]
    parameters = [p for layer in (trunk, *heads) for p in layer.parameters()]
    optimizer = make(parameters, kind="Adam", weight_decay=0.1)
    for step in range(2 * STEPS):
        heads[step % 3](torch.tanh(trunk(batch(step)))).square().mean().backward()
        if step % 5 == 4:
            torch.nn.utils.clip_grad_norm_(parameters, 0.01)
        optimizer.step()
        optimizer.zero_grad()
    return parameters


def experts(make):
    """Tokens choose one of many experts; most experts have none in a step."""
    torch.manual_seed(6)
    router, experts = torch.nn.Linear(8, 16), [torch.nn.Linear(8, 8) for _ in range(16)]
    parameters = [p for layer in (router, *experts) for p in layer.parameters()]
    optimizer = make(parameters, weight_decay=0.1)
    for step in range(2 * STEPS):
        tokens = batch(step)[:5]
        scores = router(tokens).softmax(-1)
        loss = sum(
            (score[choice] * experts[choice](token)).square().mean()
            for token, score in zip(tokens, scores, strict=True)
            for choice in [int(score.argmax())]
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return parameters


@pytest.mark.parametrize("loop", [gradual_freezing, heads, experts])
def test_parameters_without_gradients_are_left_alone(ours, loop):  # noqa: F811
    assert not assert_agree(loop, ours)


def gradual_unfreezing(make):
    """Layers join one after the other, each with its own learning rate, as Lightning's BaseFinetuning has them."""
    torch.manual_seed(7)
    layers = [torch.nn.Linear(8, 8) for _ in range(4)]
    for layer in layers[1:]:
        layer.requires_grad_(False)
    optimizer = make(layers[0].parameters(), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)
    for step in range(4 * STEPS):
        if step % STEPS == STEPS - 1 and step // STEPS < 3:
            layer = layers[step // STEPS + 1]
            layer.requires_grad_(True)
            optimizer.add_param_group({"params": layer.parameters(), "lr": 3e-3, "weight_decay": 0.0})
            schedule.base_lrs.append(3e-3)
            schedule.lr_lambdas.append(schedule.lr_lambdas[0])
        x = batch(step)
        for layer in reversed(layers):
            x = torch.tanh(layer(x))
        x.square().mean().backward()
        if step % 5 == 0:
            torch.nn.utils.clip_grad_norm_([p for layer in layers for p in layer.parameters()], 0.1)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    parameters = [p for layer in layers for p in layer.parameters()]
    return [*parameters, *(optimizer.state[p][key] for p in parameters for key in ("step", "exp_avg", "exp_avg_sq"))]


def test_groups_that_are_added_later(ours_on_host):  # noqa: F811
    assert not assert_agree(gradual_unfreezing, ours_on_host)


def test_a_group_that_cannot_be_added_leaves_the_optimizer_as_it_is(ours_on_host):  # noqa: F811
    model = net()
    optimizer = ours_on_host(model[0].parameters())
    with pytest.raises(superoffload.Error, match="dense"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(4, dtype=torch.float64))]})
    assert len(optimizer.param_groups) == 1
    model(batch(0)).square().mean().backward()
    optimizer.step()
    assert optimizer.last_result.committed_steps == 1


def test_a_named_optimizer_is_built_with_all_its_groups(loop_daemon):  # noqa: F811
    model = net()
    optimizer = superoffload.torch.AdamW(model[0].parameters(), endpoint=loop_daemon.endpoint, name="named-groups")
    with pytest.raises(superoffload.Error, match="when building"):
        optimizer.add_param_group({"params": model[2].parameters()})
    optimizer.close()


@pytest.mark.parametrize("clips", ["all", "trained"])
def test_a_layer_that_is_frozen_later(ours, clips):  # noqa: F811
    """As PEFT's set_adapter() does. Its gradient is None from then on, and the clip leaves it out."""

    def loop(make):
        model = net()
        optimizer = make(model.parameters())
        norms = []
        for step in range(STEPS):
            if step in (2, 5):
                model[0].requires_grad_(step == 5)
            model(batch(step)).square().mean().backward()
            given = [p for p in model.parameters() if clips == "all" or p.requires_grad]
            norms.append(torch.nn.utils.clip_grad_norm_(given, 0.05))
            optimizer.step()
            optimizer.zero_grad()
        return [*norms, *model.parameters()]

    assert_agree(loop, ours)


def test_one_half_is_stepped_before_the_backward_pass_of_the_other(ours_on_host):  # noqa: F811
    """The graph of the other half still has its parameters as they were."""

    def loop(make):
        halves = net(1), net(2)
        optimizer = make([p for half in halves for p in half.parameters()])
        for step in range(STEPS):
            losses = [half(batch(step)).square().mean() for half in halves]
            for loss in losses:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        return [p for half in halves for p in half.parameters()]

    assert_agree(loop, ours_on_host)
