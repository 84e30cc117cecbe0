"""Loops that do something to gradients, or take some and drop them: equal to torch.optim, or the expected error."""

import itertools

import pytest
import torch
from tests.support.loops import (  # noqa: F401
    assert_agree,
    batch,
    lone_rank,
    loop_daemon,
    net,
    ours,
    ours_on_host,
    recorded,
    told,
)

import superoffload

STEPS = 9
EDITED = "changed between backward and step"
LEFT_THE_GPU = "left the GPU"
CLIPPED = "clip after the last change"


def agree_or_be_told(loop, ours, tolerance=2e-6):  # noqa: F811
    """An error is right, too: of a gradient that has left a GPU, or of one that was clipped and then changed."""
    try:
        return assert_agree(loop, ours, tolerance)
    except (superoffload.Error, RuntimeError) as error:
        if CLIPPED in str(error):
            assert ours.form != "off"
        else:
            assert ours.form.startswith("gpu"), error
            assert LEFT_THE_GPU in str(error) or "single memory location" in str(error), error
        return None


def mul(p):
    p.grad.mul_(0.5)


def data_mul(p):
    p.grad.data.mul_(0.5)


def clamp(p):
    p.grad.data.clamp_(-1e-3, 1e-3)


def numpy(p):
    array = p.grad.numpy()
    array *= 0.5


def copy(p):
    p.grad.data.copy_(p.grad.data.flip(0))


def replace(p):
    p.grad = p.grad.sign() * 1e-3


@pytest.mark.parametrize("every", [1, 5])
@pytest.mark.parametrize("edit", [mul, data_mul, clamp, numpy, copy, replace])
def test_edited_gradients(ours, edit, every):  # noqa: F811
    if edit is numpy and ours.form.startswith("gpu"):
        pytest.skip("a GPU's tensors have no numpy()")

    def loop(make):
        model = net()
        optimizer = make(model.parameters())
        for step in range(STEPS):
            model(batch(step)).square().mean().backward()
            if step % every == every - 1:
                for p in model.parameters():
                    edit(p)
            optimizer.step()
            optimizer.zero_grad()
        return model.parameters()

    caught = agree_or_be_told(loop, ours)
    if caught is not None:
        assert told(caught, EDITED) == (ours.form != "off")
        assert all(w.filename == __file__ for w in caught if EDITED in str(w.message)), "the loop's own line"


def clamp_outliers(p):
    p.grad.data.clamp_(-p.grad.data.abs().max() * 0.99, None)


def drop_largest(p):
    array = p.grad.numpy().reshape(-1)
    array[abs(array).argmax()] = 0


def zero_first_row(p):
    p.grad.data[0] = 0


@pytest.mark.parametrize("edit", [clamp_outliers, drop_largest, zero_first_row])
def test_edits_of_few_elements_that_begin_late(ours_on_host, edit):  # noqa: F811
    """In large gradients, long after the loop was watched."""

    def loop(make):
        torch.manual_seed(1)
        model = torch.nn.Linear(64, 4096, bias=False)
        optimizer = make(model.parameters())
        for step in range(STEPS):
            model(batch(step, 64)).square().mean().backward()
            if step > 5:
                edit(model.weight)
            optimizer.step()
            optimizer.zero_grad()
        return model.parameters()

    caught = assert_agree(loop, ours_on_host)
    assert told(caught, EDITED) == (ours_on_host.form != "off")


def test_gradients_reduced_by_hand(ours, lone_rank):  # noqa: F811
    def loop(make):
        model = net()
        optimizer = make(model.parameters())
        for step in range(STEPS):
            model(batch(step)).square().mean().backward()
            for p in model.parameters():
                torch.distributed.all_reduce(p.grad)
                p.grad.data.div_(4)
            optimizer.step()
            optimizer.zero_grad()
        return model.parameters()

    caught = agree_or_be_told(loop, ours)
    if "auto" in ours.form:
        assert told(caught, EDITED) == 0, "with torch.distributed nothing is submitted early"


def test_pcgrad(ours):  # noqa: F811
    """Gradients of two tasks, kept by reference, projected on each other."""

    def loop(make):
        model = net()
        optimizer = make(model.parameters())
        for step in range(STEPS):
            tasks = []
            for task in range(2):
                optimizer.zero_grad()
                model(batch(step))[:, 4 * task : 4 * task + 4].square().mean().backward()
                tasks.append([p.grad for p in model.parameters()])
            for p, a, b in zip(model.parameters(), *tasks, strict=True):
                dot = (a * b).sum()
                p.grad = a + b - torch.where(dot < 0, dot / (b * b).sum(), 0.0) * b
            optimizer.step()
        return model.parameters()

    agree_or_be_told(loop, ours)


def test_actor_critic(ours):  # noqa: F811
    """DDPG: the actor's loss goes through the critic, whose gradients of it are dropped; targets follow in between."""

    def loop(make):
        actor, critic = net(1, 4), torch.nn.Sequential(torch.nn.Linear(12, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
        target = net(2, 4)
        target.load_state_dict(actor.state_dict())
        actor_optimizer, critic_optimizer = make(actor.parameters(), "Adam"), make(critic.parameters(), "Adam")
        for step in range(STEPS):
            states = batch(step)
            with torch.no_grad():
                wanted = critic(torch.cat([states, target(states)], 1)) * 0.9 + states[:, :1]
            critic_optimizer.zero_grad()
            (critic(torch.cat([states, batch(step + 100, 4)], 1)) - wanted).square().mean().backward()
            critic_optimizer.step()
            actor_optimizer.zero_grad()
            (-critic(torch.cat([states, actor(states)], 1))).mean().backward()
            with torch.no_grad():  # reads the critic and the actor between backward and step
                for p, q in zip(target.parameters(), actor.parameters(), strict=True):
                    p.lerp_(q, 0.1)
            actor_optimizer.step()
        return [*actor.parameters(), *critic.parameters(), *target.parameters()]

    agree_or_be_told(loop, ours, 5e-6)


@pytest.mark.parametrize("zeroing", ["optimizer", "model"])
def test_generator_and_discriminator(ours, zeroing):  # noqa: F811
    """DCGAN: three backward passes reach the discriminator, of which its optimizer sees two."""

    def loop(make):
        g, d = net(1, 8), net(2, 1)
        g_optimizer, d_optimizer = make(g.parameters(), betas=(0.5, 0.999)), make(d.parameters(), betas=(0.5, 0.999))
        loss = torch.nn.BCEWithLogitsLoss()
        ones, zeros = torch.ones(16, 1), torch.zeros(16, 1)
        for step in range(STEPS):
            (d_optimizer if zeroing == "optimizer" else d).zero_grad()
            loss(d(batch(step)), ones).backward()
            fake = g(batch(step + 100))
            loss(d(fake.detach()), zeros).backward()
            d_optimizer.step()
            (g_optimizer if zeroing == "optimizer" else g).zero_grad()
            loss(d(fake), ones).backward()
            g_optimizer.step()
        return [*g.parameters(), *d.parameters()]

    agree_or_be_told(loop, ours, 1e-5)


def test_a_step_that_is_skipped_after_backward(ours):  # noqa: F811
    def loop(make):
        model = net()
        optimizer = make(model.parameters())
        seen = []
        for step in range(2 * STEPS):
            loss = model(batch(step)).square().mean()
            seen.append(loss)
            loss.backward()
            if step % 4 != 3:
                optimizer.step()
            with torch.no_grad():
                seen.append(model(batch(0)).square().mean())
            optimizer.zero_grad()
        return [*model.parameters(), *seen]

    assert_agree(loop, ours, 1e-5)


@pytest.mark.parametrize("clip", [False, True])
def test_evaluation_between_backward_and_step(ours, clip):  # noqa: F811
    def loop(make):
        model = net()
        optimizer = make(model.parameters())
        seen = []
        for step in range(STEPS):
            model(batch(step)).square().mean().backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            with torch.no_grad():
                seen.append(model(batch(0)).square().mean())
                seen += [p.clone() for p in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
        return [*model.parameters(), *seen]

    assert_agree(loop, ours)


def test_a_changing_number_of_micro_batches(ours):  # noqa: F811
    def loop(make):
        model = net()
        optimizer = make(model.parameters())
        micro = itertools.count()
        for passes in (1, 1, 1, 1, 1, 3, 1, 2, 2, 2, 2, 2, 3, 1):
            for _ in range(passes):
                model(batch(next(micro))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.parameters()

    agree_or_be_told(loop, ours)


def test_gradients_that_go_on_over_steps(ours):  # noqa: F811
    """Without zero_grad() they accumulate, as in torch."""

    def loop(make):
        model = net()
        optimizer = make(model.parameters())
        for step in range(STEPS):
            model(batch(step)).square().mean().backward()
            optimizer.step()
        return model.parameters()

    agree_or_be_told(loop, ours)


@pytest.mark.parametrize("between", [None, mul, data_mul])
@pytest.mark.parametrize("clips", [False, True])
def test_gradients_that_go_on_over_some_steps(ours, clips, between):  # noqa: F811
    """zero_grad() is left out late, when gradients are submitted early."""

    def loop(make):
        model = net()
        optimizer = make(model.parameters())
        for step in range(STEPS):
            model(batch(step)).square().mean().backward()
            if clips:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            if step in (0, 5, 6):
                for parameter in model.parameters() if between else []:
                    between(parameter)
            else:
                optimizer.zero_grad()
        return model.parameters()

    agree_or_be_told(loop, ours)


def test_a_step_with_gradients_that_were_zeroed_in_place(ours):  # noqa: F811
    """Moments and weights decay, as in torch."""

    def loop(make):
        model = net()
        optimizer = make(model.parameters())
        for step in range(STEPS):
            if step not in (4, 7):
                model(batch(step)).square().mean().backward()
            optimizer.step()
            model.zero_grad(set_to_none=False)
        return model.parameters()

    assert_agree(loop, ours)


def test_gradients_that_were_edited_are_there_after_the_step(ours):  # noqa: F811
    def loop(make):
        model = net()
        optimizer = make(model.parameters())
        seen = []
        for step in range(STEPS):
            model(batch(step)).square().mean().backward()
            for parameter in model.parameters():
                mul(parameter)
            optimizer.step()
            seen += [parameter.grad.clone() for parameter in model.parameters()]
            optimizer.zero_grad()
        return seen

    agree_or_be_told(loop, ours)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_what_is_left_of_gradients_after_the_step(ours, set_to_none):  # noqa: F811
    def loop(make):
        model = net()
        optimizer = make(model.parameters())
        for step in range(STEPS):
            model.zero_grad(set_to_none=set_to_none)
            model(batch(step)).square().mean().backward()
            kept = [p.grad for p in model.parameters()]
            values = [gradient.clone() for gradient in kept]
            optimizer.step()
            if not ours.form.startswith("gpu"):
                assert all(p.grad is gradient for p, gradient in zip(model.parameters(), kept, strict=True))
                assert all(torch.equal(*pair) for pair in zip(kept, values, strict=True))
        return model.parameters()

    assert_agree(loop, ours)


def test_a_step_without_gradients_does_nothing_and_says_so(ours):  # noqa: F811
    def loop(make):
        model = net()
        optimizer = make(model.parameters(), weight_decay=0.1)
        for step in range(2 * STEPS):
            model(batch(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.step()
        return model.parameters()

    assert told(assert_agree(loop, ours), "no parameter has a gradient") == 1


def test_heads_that_are_all_used(ours):  # noqa: F811
    def loop(make):
        model, heads = net(), torch.nn.ModuleList(torch.nn.Linear(8, 1) for _ in range(3))
        optimizer = make([*model.parameters(), *heads.parameters()])
        for step in range(STEPS):
            for head in heads:
                head(model(batch(step))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [*model.parameters(), *heads.parameters()]

    torch.manual_seed(4)
    state = torch.get_rng_state()

    def seeded(make):
        torch.set_rng_state(state)
        return loop(make)

    assert_agree(seeded, ours)


@pytest.mark.parametrize("kind", ["AdamW", "Adam"])
def test_a_reward_is_maximized(ours, kind):  # noqa: F811
    """REINFORCE: clipped, with weight decay, which has no sign."""

    def loop(make):
        policy = net()
        optimizer = make(policy.parameters(), kind, maximize=True, weight_decay=0.1)
        norms = []
        for step in range(STEPS):
            log_probabilities = policy(batch(step)).log_softmax(1)
            (log_probabilities[:, 0] * batch(step)[:, 1]).mean().backward()
            norms.append(torch.nn.utils.clip_grad_norm_(policy.parameters(), 0.05))
            optimizer.step()
            optimizer.zero_grad()
        return [*policy.parameters(), *norms]

    assert_agree(loop, ours)
