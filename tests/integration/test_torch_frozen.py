"""Frozen blocks stream: what trains beside them gets the same bits as when they stay."""

import collections.abc
import gc

import grpc
import pytest
import torch
from tests.integration.test_torch_staying import SLOT
from tests.integration.test_torch_streams import BLOCKS, WIDTH, Model, evaluate, loss_of, same, train_unseen, weights_of
from tests.support.fake_torch_gpu import driver_count, fake_gpu, gpu_daemon, late_gpu, nothing_stays  # noqa: F401

import superoffload.torch
from superoffload.torch import cuda, stream_frozen

pytestmark = pytest.mark.usefixtures("nothing_stays")


class Adapter(torch.nn.Module):
    """A linear layer that is frozen, and what is trained beside it."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down = torch.nn.Linear(base.in_features, 4, bias=False)
        self.up = torch.nn.Linear(4, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))

    @torch.no_grad()
    def merge(self):
        self.base.weight += self.up.weight @ self.down.weight


def build(reentrant=None):
    torch.manual_seed(5)
    model = Model(reentrant)
    for block in model.layers:
        block.down = Adapter(block.down)
    model = model.bfloat16()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".down.down" in name or ".down.up" in name)
    model.embedding.weight.requires_grad_(True)
    return model


def adamw(model, daemon, **options):
    return superoffload.torch.AdamW(
        model.named_parameters(), lr=1e-2, max_grad_norm=0.5, endpoint=daemon.endpoint, **options
    )


def train(model, optimizer, steps=5):
    losses = []
    for step in range(steps):
        for micro_batch in range(2):
            loss = loss_of(model, 2 * step + micro_batch)
            loss.backward()
            losses += [loss.item(), evaluate(model, 100 + step)]
        optimizer.step()
        losses.append(evaluate(model, 200 + step, torch.inference_mode))
        optimizer.zero_grad()
    return losses


@pytest.fixture(scope="module")
def expected():
    return {}


def resident_run(expected, daemon, reentrant=None):
    if reentrant not in expected:
        model = build(reentrant)
        optimizer = adamw(model, daemon)
        losses = train(model, optimizer)
        expected[reentrant] = losses, weights_of(model)
        optimizer.close()
    return expected[reentrant]


@pytest.mark.parametrize(("slots", "reentrant"), [(1, None), (1, True), (3, None), (3, False), (8, True)])
def test_adapters_train_the_same_bits(gpu_daemon, expected, slots, reentrant):  # noqa: F811
    losses, weights = resident_run(expected, gpu_daemon, reentrant)
    model = build(reentrant)
    frozen = stream_frozen(model, "cuda:0", stream_slots=slots, resident_share=0)
    optimizer = adamw(model, gpu_daemon)
    assert train(model, optimizer) == losses
    same(weights_of(model), weights)
    assert frozen.report == ""
    optimizer.close()
    frozen.close()
    same(weights_of(model), weights)


def test_with_torch_optim_and_nobody_who_keeps_it(fake_gpu):  # noqa: F811
    runs = []
    for streams in (False, True):
        model = build()
        if streams:
            stream_frozen(model, "cuda:0", stream_slots=2, resident_share=0)
            gc.collect()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        runs.append((train(model, optimizer), weights_of(model)))
    assert runs[0][0] == runs[1][0]
    same(runs[1][1], runs[0][1])


@pytest.fixture
def expected_weights(gpu_daemon, expected):  # noqa: F811
    """Of a GPU that is not late."""
    return resident_run(expected, gpu_daemon)[1]


def test_copies_that_are_late(gpu_daemon, expected_weights, late_gpu):  # noqa: F811
    model = build()
    stream_frozen(model, "cuda:0", stream_slots=2, resident_share=0)
    optimizer = adamw(model, gpu_daemon)
    train_unseen(model, optimizer, steps=5)
    same(weights_of(model), expected_weights)
    optimizer.close()


def test_blocks_stay_as_there_is_room(gpu_daemon, expected, monkeypatch):  # noqa: F811
    losses, weights = resident_run(expected, gpu_daemon)
    monkeypatch.setattr(superoffload.torch.gpu.staying, "_SLACK", 0)
    model = build()
    frozen = stream_frozen(model, "cuda:0", stream_slots=2, resident_share=1)
    optimizer = adamw(model, gpu_daemon)
    others = driver_count("fakeCudaUsedBytes") - 2 * SLOT
    monkeypatch.setattr(cuda, "total_bytes", lambda device: others + 5 * SLOT)
    assert train(model, optimizer) == losses
    assert frozen.report.startswith(f"3 of {BLOCKS} blocks stay on the GPU and 3 stream")
    assert driver_count("fakeCudaUsedBytes") == others + 5 * SLOT
    same(weights_of(model), weights)
    # A loop that finds no memory, and tries the step again.
    monkeypatch.setattr(cuda, "total_bytes", lambda device: others + 3 * SLOT + 1)
    cuda.on_failed_allocation(0, 1, 0, 0)
    before = evaluate(model, 7)
    assert frozen.report.startswith(f"1 of {BLOCKS} ")
    frozen.close()
    frozen.close()
    assert evaluate(model, 7) == before


def test_the_gpu_has_the_slots_only(fake_gpu):  # noqa: F811
    model = build()
    gc.collect()
    before = driver_count("fakeCudaUsedBytes")
    frozen = stream_frozen(model, "cuda:0", stream_slots=2)
    assert 0 <= driver_count("fakeCudaUsedBytes") - (before + 2 * SLOT) < 4096  # with events
    frozen.close()
    del frozen
    assert driver_count("fakeCudaUsedBytes") == before


def test_memory_goes_with_the_model(fake_gpu):  # noqa: F811
    model = build()
    gc.collect()
    before = driver_count("fakeCudaUsedBytes")
    stream_frozen(model, "cuda:0")
    del model
    gc.collect()
    assert driver_count("fakeCudaUsedBytes") == before


def test_weights_of_a_model_on_meta(fake_gpu):  # noqa: F811
    whole = build()
    weights = weights_of(whole)
    asked = collections.Counter()

    class Read(collections.abc.Mapping):
        def __getitem__(self, name):
            asked[name] += 1
            return weights[name]

        def __iter__(self):
            return iter(weights)

        def __len__(self):
            return len(weights)

    with torch.device("meta"):
        model = build()
    frozen = stream_frozen(model, "cuda:0", Read())
    assert set(asked) == {name for name, p in model.named_parameters() if not p.requires_grad and "layers" in name}
    assert set(asked.values()) == {1}, "files are read once"
    rest = {name: weights[name] for name, tensor in model.named_parameters() if tensor.is_meta}
    assert rest.keys() == {name for name, p in model.named_parameters() if p.requires_grad} | {
        "norm.weight",
        "norm.bias",
    }
    model.load_state_dict(rest, strict=False, assign=True)
    model.head.weight = model.embedding.weight
    assert evaluate(model, 3) == evaluate(whole, 3)
    frozen.close()


def test_state_dicts_have_the_values(fake_gpu):  # noqa: F811
    model, other = build(), build()
    stream_frozen(model, "cuda:0", stream_slots=1)
    for parameter in other.parameters():
        parameter.data.mul_(1.5)
    same(weights_of(model), weights_of(build()))
    assert evaluate(model, 3) == evaluate(build(), 3)
    model.load_state_dict(weights_of(other))
    assert evaluate(model, 3) == evaluate(other, 3)
    same(weights_of(model), weights_of(other))
    missing = model.load_state_dict({}, strict=False).missing_keys
    assert set(missing) == set(weights_of(other))


@pytest.mark.parametrize("evaluates", [False, True])
def test_merging_while_it_streams(fake_gpu, evaluates):  # noqa: F811
    """Also long after the first steps."""
    model = build()
    frozen = stream_frozen(model, "cuda:0", stream_slots=1)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    train(model, optimizer)
    loss_of(model, 0).backward()
    optimizer.step()
    if evaluates:
        evaluate(model, 0)
    with pytest.raises(superoffload.Error, match=r"layers\.0\.down\.base\.weight.*close\(\)") as error:
        model.layers[0].down.merge()
    assert error.value.code == grpc.StatusCode.FAILED_PRECONDITION
    frozen.close()
    expected = model.layers[0].down.base.weight + model.layers[0].down.up.weight @ model.layers[0].down.down.weight
    model.layers[0].down.merge()
    assert torch.equal(model.layers[0].down.base.weight, expected)


@pytest.mark.parametrize("write", [lambda p: p.add_(1), lambda p: setattr(p, "data", torch.ones_like(p))])
def test_what_is_written_is_not_lost_in_silence(fake_gpu, write):  # noqa: F811
    model = build()
    frozen = stream_frozen(model, "cuda:0")
    evaluate(model, 0)
    with torch.no_grad(), superoffload.torch.guards.own_operations.ours():
        write(model.layers[2].up.weight)
    said = r"layers\.2\.up\.weight is frozen and streams, and was written to"
    for use in (lambda: evaluate(model, 0), model.state_dict):
        with pytest.raises(superoffload.Error, match=said):
            use()
    with pytest.warns(match=said):
        frozen.close()


def test_ranks_of_ddp_do_not_send_them(fake_gpu):  # noqa: F811
    model = build()
    stream_frozen(model, "cuda:0")
    streams = {name for name, p in model.named_parameters() if not p.requires_grad and "layers" in name}
    assert set(model._ddp_params_and_buffers_to_ignore) == streams


def _shard(model):
    model.layers[1].up.weight = torch.nn.Parameter(torch.ones(WIDTH, WIDTH).to_sparse(), requires_grad=False)


@pytest.mark.parametrize(
    ("code", "change", "says"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, lambda model: model.requires_grad_(True), "no frozen parameters"),
        (grpc.StatusCode.INVALID_ARGUMENT, lambda model: model.to("meta"), "is on meta and has no value"),
        (grpc.StatusCode.UNIMPLEMENTED, _shard, r"layers\.1\.up\.weight is sharded, quantized or sparse"),
    ],
)
def test_what_cannot_stream(fake_gpu, code, change, says):  # noqa: F811
    model = build()
    change(model)
    with pytest.raises(superoffload.Error, match=says) as error:
        stream_frozen(model, "cuda:0")
    assert error.value.code == code
