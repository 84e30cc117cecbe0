"""Inputs of checkpointed blocks leave the GPU and come back: the same bits."""

import gc
import re
import urllib.request
import weakref

import pytest
import torch
import transformers
from tests.conftest import Daemon
from tests.integration.test_torch_streams import (
    BLOCKS,
    build,
    loss_of,
    optimizer_of,
    same,
    train,
    train_unseen,
    weights_of,
)
from tests.support.daemon_deaths import kill
from tests.support.fake_torch_gpu import (  # noqa: F401
    driver_count,
    fake_gpu,
    gpu_daemon,
    late_gpu,
    nothing_stays,
    registered,
)
from torch.optim.optimizer import _global_optimizer_pre_hooks

from superoffload.torch import cuda, offload_activations
from superoffload.torch.gpu import activations

pytestmark = pytest.mark.usefixtures("nothing_stays")

INPUT = 4 * 8 * 32 * 2  # bytes of a block's


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(activations, "_LEAST_BYTES", INPUT)
    monkeypatch.setattr(activations, "_SLACK", 0)
    monkeypatch.setattr(activations, "_FIRST_STEPS", 1)


@pytest.fixture(scope="module")
def expected():
    """Losses and weights, by reentrance."""
    return {}


@pytest.fixture
def on_the_gpu(gpu_daemon, expected):  # noqa: F811
    def trained(reentrant):
        if reentrant not in expected:
            model = build(reentrant)
            optimizer = optimizer_of(model, gpu_daemon)
            expected[reentrant] = train(model, optimizer), weights_of(model)
            optimizer.close()
        return expected[reentrant]

    return trained


@pytest.mark.parametrize("slots", [0, 2])
@pytest.mark.parametrize("reentrant", [False, True])
def test_the_same_bits(gpu_daemon, on_the_gpu, reentrant, slots):  # noqa: F811
    losses, weights = on_the_gpu(reentrant)
    model = build(reentrant)
    optimizer = optimizer_of(model, gpu_daemon, slots)
    offload = offload_activations(model, optimizer, resident_share=0)
    assert train(model, optimizer) == losses
    optimizer.synchronize()
    same(weights_of(model), weights)
    mebibytes = BLOCKS * INPUT / (1 << 20)
    assert f"{mebibytes:.1f} of {mebibytes:.1f} MiB" in offload.report
    assert len(registered) == 1
    offload.close()
    optimizer.close()
    del offload
    gc.collect()
    assert registered == []


def test_memory_is_given_back_once_nothing_is_copied(gpu_daemon, monkeypatch):  # noqa: F811
    done = []
    monkeypatch.setattr(cuda, "synchronize", lambda device: done.append("waited"))
    monkeypatch.setattr(cuda, "unregister_host", lambda memory: done.append("unregistered"))
    model = build(True)
    optimizer = optimizer_of(model, gpu_daemon)
    offload = offload_activations(model, optimizer, resident_share=0)
    train(model, optimizer, steps=1)
    offload.close()
    optimizer.close()
    done.clear()
    del offload
    gc.collect()
    assert done == ["waited", "unregistered"]
    registered.clear()


@pytest.fixture
def weights_that_were_not_late(on_the_gpu):
    return on_the_gpu(False)[1]


def test_copies_that_are_late(gpu_daemon, weights_that_were_not_late, late_gpu):  # noqa: F811
    model = build(False)
    optimizer = optimizer_of(model, gpu_daemon)
    offload = offload_activations(model, optimizer, resident_share=0)
    train_unseen(model, optimizer)
    same(weights_of(model), weights_that_were_not_late)
    offload.close()
    optimizer.close()


def left_and_all(offload):
    return tuple(float(number) for number in re.match(r"([\d.]+) of ([\d.]+) MiB", offload.report).groups())


def test_only_what_does_not_fit_leaves(gpu_daemon, on_the_gpu, monkeypatch):  # noqa: F811
    losses, weights = on_the_gpu(False)
    model = build(False)
    optimizer = optimizer_of(model, gpu_daemon)
    offload = offload_activations(model, optimizer, resident_share=1)
    others = driver_count("fakeCudaUsedBytes")
    monkeypatch.setattr(cuda, "total_bytes", lambda device: others + 2 * INPUT)
    monkeypatch.setattr(cuda, "used_bytes", lambda device: others + offload._most_stayed)
    gone = []

    def train_one(step):
        losses = train(model, optimizer, steps=1, first=step)
        gone.append(offload._gone // INPUT)
        return losses

    seen = train_one(0) + train_one(1)
    monkeypatch.setattr(cuda, "total_bytes", lambda device: others + BLOCKS * INPUT)
    seen += train_one(2)
    # A loop that finds no memory, and tries again.
    monkeypatch.setattr(cuda, "total_bytes", lambda device: others + INPUT + 1)
    cuda.on_failed_allocation(0, 1, 0, 0)
    seen += train_one(3)
    assert gone == [BLOCKS, BLOCKS, BLOCKS - 2, BLOCKS - 1]
    assert seen == losses
    optimizer.synchronize()
    same(weights_of(model), weights)
    offload.close()
    optimizer.close()


def test_a_second_backward_pass(gpu_daemon):  # noqa: F811
    model = build(True)
    optimizer = optimizer_of(model, gpu_daemon)
    for offloads in (False, True):
        offload = offload_activations(model, optimizer, resident_share=0) if offloads else None
        loss = loss_of(model, 0)
        loss.backward(retain_graph=True)
        loss.backward()
        gradients = [parameter.grad.clone() for parameter in model.parameters()]
        optimizer.zero_grad()
        if offload is None:
            expected = gradients
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))
    assert offload._gone == BLOCKS * INPUT
    offload.close()
    optimizer.close()


def test_what_stays_and_is_written_is_refused_as_by_torch(gpu_daemon):  # noqa: F811
    model = build(False)
    optimizer = optimizer_of(model, gpu_daemon)
    offload = offload_activations(model, optimizer, resident_share=0)
    hidden = []
    model.norm.register_forward_pre_hook(lambda module, given: hidden.append(given[0]))
    loss = loss_of(model, 0)
    with torch.no_grad():
        hidden[0].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    assert offload._gone > 0
    offload.close()
    optimizer.close()


def test_the_model_keeps_it_and_not_the_optimizer(gpu_daemon):  # noqa: F811
    model = build(True)
    optimizer = optimizer_of(model, gpu_daemon)
    offload = weakref.ref(offload_activations(model, optimizer, resident_share=0))
    train(model, optimizer, steps=1)
    assert offload()._gone > 0
    hooks = len(_global_optimizer_pre_hooks)
    optimizer.close()
    kept = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert kept() is None
    del model
    gc.collect()
    assert offload() is None
    assert len(_global_optimizer_pre_hooks) == hooks - 1
    assert registered == []


def test_without_memory_of_the_daemons_they_stay(fake_gpu, on_the_gpu):  # noqa: F811
    losses, _ = on_the_gpu(False)
    small = Daemon("--memory_budget_bytes=67108864")
    try:
        model = build(False)
        optimizer = optimizer_of(model, small)
        offload = offload_activations(model, optimizer, resident_share=0)
        with pytest.warns(match="activations stay on the GPU for which.*memory_budget_bytes"):
            assert train(model, optimizer) == losses
        assert left_and_all(offload)[0] == 0
        offload.close()
        optimizer.close()
    finally:
        small.stop()


def lent_bytes(daemon):
    with urllib.request.urlopen(f"http://{daemon.info.metrics_address}/metrics") as answer:
        return float(re.search(r'superoffload_memory_bytes{use="lent"} (\S+)', answer.read().decode())[1])


def test_memory_is_the_users_until_the_optimizer_ends(fake_gpu, on_the_gpu):  # noqa: F811
    """Also with a daemon that has taken over."""
    losses, weights = on_the_gpu(False)
    kept = Daemon("--keeper")
    try:
        model = build(False)
        optimizer = optimizer_of(model, kept)
        offload = offload_activations(model, optimizer, resident_share=0)
        seen = train(model, optimizer, steps=2)
        lent = lent_bytes(kept)
        assert lent == 64 << 20
        kill(kept)
        optimizer.state_tensors()
        seen += train(model, optimizer, steps=2, first=2)
        assert seen == losses
        assert lent_bytes(kept) == lent
        assert offload._gone == BLOCKS * INPUT
        same(weights_of(model), weights)
        offload.close()
        optimizer.close()
        assert lent_bytes(kept) == 0
    finally:
        kept.stop()


@pytest.mark.parametrize("enabled_later", [False, True])
def test_what_transformers_would_copy_by_itself(gpu_daemon, enabled_later):  # noqa: F811
    def train_llama(offloads):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4
        )
        model = transformers.LlamaForCausalLM(config).bfloat16()
        optimizer = optimizer_of(model, gpu_daemon)
        offload = None
        if offloads and enabled_later:
            offload = offload_activations(model, optimizer, resident_share=0)
        model.gradient_checkpointing_enable(offload=offloads)  # which pins memory, and fails without a GPU
        if offloads and not enabled_later:
            offload = offload_activations(model, optimizer, resident_share=0)
        losses = []
        for step in range(3):
            tokens = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(step))
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        optimizer.close()
        return losses, offload, model

    losses, _, _ = train_llama(False)
    seen, offload, model = train_llama(True)
    assert seen == losses
    assert offload._gone == 4 * 4 * 16 * 32 * 2
    offload.close()
    assert "save_on_cpu" in model.model.layers[0]._gradient_checkpointing_func.func.__code__.co_names
