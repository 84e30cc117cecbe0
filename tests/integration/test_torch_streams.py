"""Weights that stream: a model trains the same bits as one whose blocks stay on the GPU."""

import copy
import functools
import gc
import json
import re
import urllib.request

import grpc
import pytest
import torch
from tests.conftest import Daemon
from tests.integration.test_ctl import ctl
from tests.support.daemon_deaths import train_through_a_death
from tests.support.fake_torch_gpu import fake_gpu, gpu_daemon, late_gpu  # noqa: F401
from torch.utils.checkpoint import checkpoint

import superoffload.torch
from superoffload.torch import GpuOptions, cuda
from superoffload.torch.gpu.live import GpuParameters
from superoffload.torch.live import LiveParameters

BLOCKS = 6
WIDTH = 32


class Block(torch.nn.Module):
    """As of a transformer: two sublayers, of which one has a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up = torch.nn.Linear(WIDTH, 2 * WIDTH)
        self.down = torch.nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.gain = torch.nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return x + self.gain * self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Model(torch.nn.Module):
    def __init__(self, reentrant=None):
        super().__init__()
        self.embedding = torch.nn.Embedding(50, WIDTH)
        self.layers = torch.nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.head = torch.nn.Linear(WIDTH, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.reentrant = reentrant
        self.order = list(range(BLOCKS))

    def forward(self, tokens):
        x = self.embedding(tokens)
        for index in self.order:
            layer = self.layers[index]
            if self.reentrant is None or not torch.is_grad_enabled():
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.head(self.norm(x))


def build(reentrant=None):
    torch.manual_seed(5)
    return Model(reentrant).bfloat16()


def loss_of(model, seed):
    tokens = torch.randint(50, (4, 9), generator=torch.Generator().manual_seed(seed))
    logits = model(tokens[:, :-1]).float()
    return torch.nn.functional.cross_entropy(logits.reshape(-1, 50), tokens[:, 1:].reshape(-1))


def optimizer_of(model, daemon, slots=0, **options):
    options = {"lr": 1e-2, "max_grad_norm": 0.5, "endpoint": daemon.endpoint} | options
    if slots:
        options = {"weights": "streamed", "gpu": GpuOptions(stream_slots=slots, mover="trainer")} | options
    return superoffload.torch.AdamW(model.named_parameters(), **options)


def evaluate(model, seed, mode=torch.no_grad):
    with mode():
        return loss_of(model, seed).item()


def train(model, optimizer, steps=4, first=0):
    """Two micro-batches a step, and evaluations wherever a loop may have them."""
    losses = []
    for step in range(first, first + steps):
        for micro_batch in range(2):
            loss = loss_of(model, 2 * step + micro_batch)
            loss.backward()
            losses.append(loss.item())
            losses.append(evaluate(model, 100 + step))
        optimizer.step()
        losses.append(evaluate(model, 200 + step, torch.inference_mode))
        optimizer.zero_grad()
    return losses


def train_unseen(model, optimizer, steps=4):
    """The same, but nobody reads a loss, which a GPU that is late would not have yet."""
    for step in range(steps):
        for micro_batch in range(2):
            loss_of(model, 2 * step + micro_batch).backward()
            with torch.no_grad():
                loss_of(model, 100 + step)
        optimizer.step()
        optimizer.zero_grad()


def weights_of(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(ours, others):
    assert ours.keys() == others.keys()
    assert [name for name in ours if not torch.equal(ours[name], others[name])] == []


_resident = {}  # losses and weights of a model whose blocks stay, by how they are recomputed


@pytest.fixture
def resident(gpu_daemon):  # noqa: F811
    def of(reentrant):
        if reentrant not in _resident:
            model = build(reentrant)
            optimizer = optimizer_of(model, gpu_daemon)
            losses = train(model, optimizer)
            optimizer.synchronize()
            _resident[reentrant] = losses, weights_of(model)
            optimizer.close()
        return _resident[reentrant]

    return of


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("slots", [1, 2, 3, 8])
def test_blocks_that_stream_train_the_same_bits(gpu_daemon: Daemon, resident, slots, reentrant):  # noqa: F811
    model = build(reentrant)
    optimizer = optimizer_of(model, gpu_daemon, slots)
    losses = train(model, optimizer)
    expected, weights = resident(reentrant)
    assert losses == expected
    same(weights_of(model), weights)
    optimizer.close()
    same(weights_of(model), weights)


# With one slot each block but the last leaves it in forward, and each but the first in backward.
def test_what_streams_is_described_and_counted(fake_gpu, metered_daemon):  # noqa: F811
    model = build()
    optimizer = optimizer_of(model, metered_daemon, slots=1, name="run")
    block = sum(parameter.numel() * parameter.element_size() for parameter in model.layers[0].parameters())
    gpu = json.loads(ctl(metered_daemon, "describe", "run", "--json"))["gpu"]
    assert (gpu["streamed_units"], gpu["stream_slots"], int(gpu["streamed_bytes"])) == (BLOCKS, 1, BLOCKS * block)

    def scraped(name):
        text = (
            urllib.request.urlopen(f"http://{metered_daemon.info.metrics_address}/metrics", timeout=30).read().decode()
        )
        return int(re.search(rf"^{name}{{.*}} (\d+)$", text, re.MULTILINE)[1])

    assert scraped("superoffload_gpu_streamed_units") == BLOCKS
    totals = []
    for step in range(3):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.synchronize()
        optimizer.zero_grad()
        totals.append(scraped("superoffload_streamed_bytes_total"))
    copy = totals[0] / (2 * BLOCKS - 1)
    assert block <= copy < 1.1 * block, "parameters are aligned"
    assert [total / copy for total in totals] == [2 * BLOCKS - 1, 4 * BLOCKS - 3, 6 * BLOCKS - 5]
    optimizer.close()


# With as many slots as blocks the daemon publishes ahead of the verdict.
@pytest.mark.parametrize("slots", [2, 8])
def test_a_model_is_saved_at_any_time(gpu_daemon, slots):  # noqa: F811
    model, others = build(), build()
    optimizer, resident = optimizer_of(model, gpu_daemon, slots), optimizer_of(others, gpu_daemon)
    for step in range(5):
        for each in (model, others):
            loss_of(each, step).backward()
        resident.synchronize()
        same(weights_of(model), weights_of(others))
        for each in (optimizer, resident):
            each.step()
        resident.synchronize()
        same(weights_of(model), weights_of(others))
        for each in (optimizer, resident):
            each.zero_grad()
    optimizer.close()
    resident.close()


@pytest.mark.parametrize("weights", [0.2, 0.5, 1])
def test_part_of_the_blocks_streams(gpu_daemon: Daemon, resident, weights):  # noqa: F811
    model = build()
    optimizer = optimizer_of(model, gpu_daemon, slots=2, weights=weights)
    expected, trained = resident(None)
    assert train(model, optimizer) == expected
    same(weights_of(model), trained)
    optimizer.close()


@pytest.fixture
def expected_weights(resident):
    """Of a GPU that is not late."""
    return resident(None)[1]


# Torch's work is late, and who reads what is not there yet reads NaN. Nobody waits for it, as .item() would.
@pytest.mark.parametrize("slots", [1, 3])
def test_a_gpu_that_is_late_reads_the_same_bits(gpu_daemon, expected_weights, late_gpu, slots):  # noqa: F811
    model = build()
    optimizer = optimizer_of(model, gpu_daemon, slots)
    train_unseen(model, optimizer)
    same(weights_of(model), expected_weights)
    optimizer.close()


def train_in_other_orders(model, optimizer):
    """Blocks are skipped, called twice and called in another order; gradients come of two backward passes."""
    losses = []
    for step, order in enumerate([[0, 1, 2, 3, 4, 5], [5, 3, 1], [0, 0, 1, 2, 2], [4, 1, 4, 1], [0, 1, 2, 3, 4, 5]]):
        model.order = order
        loss = loss_of(model, step)
        loss.backward(retain_graph=True)
        losses += [loss.item(), evaluate(model, 50 + step)]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("slots", [1, 2, 4])
def test_other_orders_of_calls_read_the_right_values(gpu_daemon, slots):  # noqa: F811
    runs = []
    for streams in (0, slots):
        model = build()
        optimizer = optimizer_of(model, gpu_daemon, streams)
        losses = train_in_other_orders(model, optimizer)
        optimizer.synchronize()
        runs.append((losses, weights_of(model)))
        optimizer.close()
    assert runs[0][0] == runs[1][0]
    same(runs[0][1], runs[1][1])


@pytest.mark.parametrize("reentrant", [None, False])
def test_compiled_blocks_stream(gpu_daemon, resident, reentrant):  # noqa: F811
    torch._dynamo.reset()
    model = build(reentrant)
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    optimizer = optimizer_of(model, gpu_daemon, slots=2)
    losses = train(model, optimizer)
    assert losses == resident(reentrant)[0]
    same(weights_of(model), resident(reentrant)[1])
    optimizer.close()


@pytest.mark.parametrize(("dies_in", "micro_batch"), [(1, 0), (2, 1)])
def test_a_daemon_that_dies_costs_at_most_one_step(gpu_daemon, resident, dies_in, micro_batch):  # noqa: F811
    kept = Daemon("--keeper", "--metrics_address=off")
    model = build()
    optimizer = optimizer_of(model, kept, slots=2, name="kept")
    batch = functools.partial(loss_of, model)
    for _ in train_through_a_death(kept, optimizer, batch, range(4), (dies_in, micro_batch)):
        pass
    same(weights_of(model), resident(None)[1])
    optimizer.close()
    kept.stop()


def test_what_is_loaded_into_the_model_is_pushed(gpu_daemon):  # noqa: F811
    other = {name: value * 0.5 for name, value in build().state_dict().items()}
    runs = []
    for slots in (0, 2):
        model = build()
        optimizer = optimizer_of(model, gpu_daemon, slots)
        train(model, optimizer, steps=1)
        model.load_state_dict(other)
        same(weights_of(model), other)
        model.layers[3].gain.data = torch.full((WIDTH,), 0.25).bfloat16()
        model.layers[3].gain.grad = torch.ones(WIDTH).bfloat16()
        with pytest.raises(superoffload.Error, match="changed by somebody else"):
            optimizer.step()
        optimizer.push_params()
        optimizer.zero_grad()
        train(model, optimizer, steps=1, first=1)
        optimizer.synchronize()
        runs.append(weights_of(model))
        optimizer.close()
    same(*runs)


def test_what_was_loaded_and_then_changed_is_not_pushed(gpu_daemon):  # noqa: F811
    model = build()
    optimizer = optimizer_of(model, gpu_daemon, slots=2)
    before, other = weights_of(model), build().state_dict()
    model.load_state_dict(other)
    other["layers.1.gain"].mul_(2)
    with pytest.raises(superoffload.Error, match=r"layers\.1\.gain, which streams, was written to before push_params"):
        optimizer.push_params()
    optimizer.pull_params()
    same(weights_of(model), before)
    optimizer.close()


def test_what_is_written_in_place_is_found_and_undone(gpu_daemon, resident):  # noqa: F811
    model = build()
    optimizer = optimizer_of(model, gpu_daemon, slots=2)
    train(model, optimizer)
    with torch.no_grad():
        model.layers[2].up.weight.mul_(2)
    loss_of(model, 1).backward()
    with pytest.raises(superoffload.Error, match=r"layers\.2\.up\.weight was changed by somebody else"):
        optimizer.step()
    with pytest.raises(superoffload.Error, match="in a place that it shares with other blocks"):
        optimizer.push_params()
    optimizer.pull_params()
    same(weights_of(model), resident(None)[1])
    optimizer.close()


def regularize(model):
    return sum(parameter.float().square().sum() for parameter in model.layers[1].parameters())


@pytest.mark.parametrize("use", [copy.deepcopy, regularize, lambda model: model.layers[4].up.weight.detach().clone()])
def test_uses_outside_of_a_block_are_refused(gpu_daemon, use):  # noqa: F811
    model = build()
    optimizer = optimizer_of(model, gpu_daemon, slots=2)
    for step in range(2):
        with pytest.raises(superoffload.Error, match=r"layers\..*outside of its block's forward"):
            use(model)
        train(model, optimizer, steps=1, first=step)
    optimizer.close()


def test_a_gradient_of_a_block_that_nobody_read_is_refused(gpu_daemon):  # noqa: F811
    model = build()
    optimizer = optimizer_of(model, gpu_daemon, slots=2)
    train(model, optimizer)
    model.order = [0, 1]
    x = torch.nn.functional.linear(torch.ones(2, WIDTH).bfloat16(), model.layers[4].up.weight)
    with pytest.raises(superoffload.Error, match=r"layers\.4\.up\.weight streams, and its gradient was computed"):
        x.sum().backward()
    optimizer.zero_grad()
    model.order = list(range(BLOCKS))
    train(model, optimizer, steps=1)
    optimizer.close()


def test_another_process_goes_on_with_what_it_left(gpu_daemon, resident):  # noqa: F811
    model = build()
    optimizer = optimizer_of(model, gpu_daemon, slots=3, name="named")
    train(model, optimizer, steps=2)
    optimizer.close()
    for slots in (2, 0):  # streaming, and resident where the blocks have buckets of their own
        steps = 1
        model = build()
        optimizer = optimizer_of(model, gpu_daemon, slots, name="named", sync="pull_params")
        train(model, optimizer, steps, first=2 if slots else 3)
        optimizer.synchronize()
        weights = weights_of(model)
        optimizer.close()
    same(weights, resident(None)[1])


def test_a_model_on_meta_gets_its_weights_where_the_daemon_publishes_them(gpu_daemon, resident):  # noqa: F811
    values = build().state_dict()
    with torch.device("meta"):
        model = Model().bfloat16()
    gpu = GpuOptions(device="cuda:0", weights=values, stream_slots=2)
    optimizer = optimizer_of(model, gpu_daemon, weights="streamed", gpu=gpu)
    train(model, optimizer)
    same(weights_of(model), resident(None)[1])
    optimizer.close()


def test_what_cannot_be_had_together_is_refused(gpu_daemon):  # noqa: F811
    def refused(**options):
        with pytest.raises((superoffload.Error, ValueError)) as error:
            optimizer_of(build(), gpu_daemon, **options)
        return str(error.value)

    assert "where gradients land" in refused(weights="streamed", gpu=GpuOptions(gradient_slots="in_place"))
    assert "leave one of the two out" in refused(weights=0.5, gpu=GpuOptions(resident_buckets=3))
    assert "'streamed'" in refused(weights="flowing") and "0 to 1" in refused(weights=1.5)
    with pytest.raises(superoffload.Error, match=r"pass model\.named_parameters"):
        superoffload.torch.AdamW(build().parameters(), endpoint=gpu_daemon.endpoint, weights="streamed")
    optimizer_of(build(), gpu_daemon, name="shares").close()
    assert "share buckets" in refused(weights="streamed", name="shares")


def test_blocks_that_are_compiled_together_are_refused(gpu_daemon):  # noqa: F811
    for compiles in (torch.compile, lambda model, backend: torch.compile(lambda *x: model(*x), backend=backend)):
        torch._dynamo.reset()
        model = build()
        optimizer = optimizer_of(model, gpu_daemon, slots=2)
        whole = compiles(model, backend="eager")
        with pytest.raises(Exception, match="compile each of them"):
            whole(torch.randint(50, (2, 4)))
        optimizer.close()


def test_blocks_that_are_compiled_later_stream(gpu_daemon, resident):  # noqa: F811
    torch._dynamo.reset()
    model = build()
    optimizer = optimizer_of(model, gpu_daemon, slots=2)
    losses = train(model, optimizer, steps=2)
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    losses += train(model, optimizer, steps=2, first=2)
    assert losses == resident(None)[0]
    same(weights_of(model), resident(None)[1])
    optimizer.close()


def test_a_model_may_be_blocks_only(gpu_daemon):  # noqa: F811
    def trained(slots):
        torch.manual_seed(5)
        model = torch.nn.Sequential(*(Block() for _ in range(3))).bfloat16()
        named = [(f"layers.{name}", parameter) for name, parameter in model.named_parameters()]
        where = {"weights": "streamed", "gpu": GpuOptions(stream_slots=slots)} if slots else {}
        optimizer = superoffload.torch.AdamW(named, lr=1e-2, endpoint=gpu_daemon.endpoint, **where)
        for step in range(4):
            data = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step)).bfloat16()
            model(data).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        weights = weights_of(model)
        optimizer.close()
        return weights

    same(trained(2), trained(0))


def test_a_model_has_its_values_when_its_optimizer_is_gone(gpu_daemon, resident):  # noqa: F811
    model = build()
    optimizer = optimizer_of(model, gpu_daemon, slots=2)
    train(model, optimizer)
    del optimizer
    gc.collect()
    same(weights_of(model), resident(None)[1])


def test_a_model_has_its_values_when_its_optimizer_cannot_be_built(gpu_daemon, monkeypatch):  # noqa: F811
    expected = weights_of(build())
    for fails in ("publish", "move_in"):
        model = build()

        def fail(self):
            raise superoffload.Error(grpc.StatusCode.RESOURCE_EXHAUSTED, "there is no room")

        with monkeypatch.context() as patch:
            patch.setattr(LiveParameters if fails == "publish" else GpuParameters, fails, fail)
            with pytest.raises(superoffload.Error, match="there is no room"):
                optimizer_of(model, gpu_daemon, slots=2)
        same(weights_of(model), expected)
        optimizer_of(model, gpu_daemon, slots=2).close()
        same(weights_of(model), expected)


def test_blocks_that_are_captured_are_refused(gpu_daemon, monkeypatch):  # noqa: F811
    model = build()
    optimizer = optimizer_of(model, gpu_daemon, slots=2)
    monkeypatch.setattr(cuda, "is_capturing", lambda: True)
    with pytest.raises(superoffload.Error, match="CUDA graph is being captured of a block that streams"):
        model(torch.randint(50, (2, 4)))
    optimizer.close()


@pytest.mark.parametrize("kind", ["AdamW8bit", "Lion"])
def test_any_optimizer_streams_and_what_is_frozen_stays(gpu_daemon, kind):  # noqa: F811
    def trained(**where):
        model = build()
        for layer in model.layers:
            layer.up.requires_grad_(False)
        optimizer = getattr(superoffload.torch, kind)(
            model.named_parameters(), lr=1e-3, endpoint=gpu_daemon.endpoint, **where
        )
        losses = train(model, optimizer)
        optimizer.synchronize()
        weights = weights_of(model)
        optimizer.close()
        return losses, weights

    expected, streamed = trained(), trained(weights="streamed", gpu=GpuOptions(stream_slots=2))
    assert streamed[0] == expected[0]
    same(streamed[1], expected[1])
