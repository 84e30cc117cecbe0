"""Code that reads parameters on a GPU and calls no hooks, CUDA graphs for instance: the host's bits, or an error."""

import pytest
import torch
from tests.conftest import Daemon
from tests.support.fake_cuda_graphs import Graph, capture, cuda_graphs  # noqa: F401
from tests.support.fake_torch_gpu import fake_gpu, gpu_daemon  # noqa: F401
from torch.utils.checkpoint import checkpoint

import superoffload.torch

STEPS = 8
DTYPE = torch.bfloat16


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 32)
        self.blocks = torch.nn.Sequential(Block(), Block(), Block())
        self.head = torch.nn.Linear(32, 50)

    def forward(self, tokens):
        return self.head(self.blocks(self.embedding(tokens)))


def build():
    torch.manual_seed(5)
    return Model().to(DTYPE)


def data(seed):
    tokens = torch.randint(50, (4, 9), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model, inputs, targets):
    logits = model(inputs).float()
    return torch.nn.functional.cross_entropy(logits.reshape(-1, 50), targets.reshape(-1))


def functional(model):
    """The same without a call of a module."""

    def forward(tokens):
        linear = torch.nn.functional.linear
        x = model.embedding.weight[tokens]
        for block in model.blocks:
            hidden = torch.nn.functional.gelu(linear(x, block.up.weight, block.up.bias))
            x = x + linear(hidden, block.down.weight, block.down.bias)
        return linear(x, model.head.weight, model.head.bias)

    return forward


def train(called, optimizer, steps=STEPS, first=0):
    for step in range(first, first + steps):
        loss_of(called, *data(step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def optimizer_of(model, daemon, **options):
    options = {"lr": 1e-2, "max_grad_norm": 0.5, "bucket_bytes": 4096, "endpoint": daemon.endpoint} | options
    return superoffload.torch.AdamW(model.named_parameters(), **options)


def weights(model, optimizer):
    optimizer.synchronize()
    return [parameter.detach().clone() for parameter in model.parameters()]


def same(a, b):
    return all(map(torch.equal, a, b))


@pytest.fixture(scope="module")
def expected():
    """Weights after STEPS on the host, by what computes them."""
    daemon = Daemon("--metrics_address=off")
    result = {}
    for what in (lambda model: model, functional):
        model = build()
        optimizer = optimizer_of(model, daemon)
        train(what(model), optimizer)
        result[what is functional] = weights(model, optimizer)
        optimizer.close()
    daemon.stop()
    return result


@pytest.fixture
def late_copies(fake_gpu, monkeypatch):
    """Streams are so late that a wait that is lacking shows."""
    monkeypatch.setenv("FAKE_CUDA_DELAY", "1500")


def graph_all(model):
    return torch.cuda.make_graphed_callables(model, (data(0)[0],))


def graph_blocks(model):
    samples = tuple((torch.zeros(4, 8, 32, dtype=DTYPE, requires_grad=True),) for _ in model.blocks)
    torch.cuda.make_graphed_callables(tuple(model.blocks), samples)
    return model


@pytest.mark.parametrize("steps_before", [0, 4])
@pytest.mark.parametrize("graph", [graph_all, graph_blocks])
def test_what_make_graphed_callables_has_captured_sees_its_parameters(
    late_copies, gpu_daemon, cuda_graphs, expected, graph, steps_before
):
    model = build()
    optimizer = optimizer_of(model, gpu_daemon)
    train(model, optimizer, steps_before)
    graphed = graph(model)
    for step in range(steps_before, STEPS):
        if step % 4 == 3:
            model.eval()  # runs the modules, not the graph
            loss_of(graphed, *data(100 + step))
            model.train()
        train(graphed, optimizer, 1, step)
    assert same(weights(model, optimizer), expected[False])
    optimizer.close()


class WholeStep:
    """Forward and backward in one graph, as torch's documentation has it."""

    def __init__(self, called, optimizer):
        self.inputs, self.targets = (tensor.clone() for tensor in data(0))
        for _ in range(2):
            loss_of(called, self.inputs, self.targets).backward()
            optimizer.zero_grad()
        optimizer.synchronize()
        self.graph = Graph()
        with capture(self.graph):
            loss_of(called, self.inputs, self.targets).backward()

    def train(self, optimizer, first, last):
        for step in range(first, last):
            for static, new in zip((self.inputs, self.targets), data(step), strict=True):
                static.copy_(new)
            self.graph.replay()
            optimizer.step()


@pytest.mark.parametrize("steps_before", [0, 4])
@pytest.mark.parametrize("what", [lambda model: model, functional], ids=["modules", "functional"])
def test_a_graph_of_forward_and_backward_sees_its_parameters(
    late_copies, gpu_daemon, cuda_graphs, expected, what, steps_before
):
    model = build()
    optimizer = optimizer_of(model, gpu_daemon)
    train(what(model), optimizer, steps_before)
    WholeStep(what(model), optimizer).train(optimizer, steps_before, STEPS)
    assert same(weights(model, optimizer), expected[what is functional])
    optimizer.close()


def test_a_capture_whose_replay_would_read_old_parameters_is_refused(gpu_daemon, cuda_graphs):
    model = build()
    optimizer = optimizer_of(model, gpu_daemon)
    train(model, optimizer, 4)
    for what in (model, functional(model)):
        with pytest.raises(superoffload.Error, match="synchronize.* before the capture"), capture(Graph()):
            loss_of(what, *data(4)).backward()
        model.zero_grad()
    optimizer.synchronize()
    with capture(Graph()):
        loss_of(model, *data(4))
    optimizer.close()


def test_another_model_may_be_captured_at_any_time(gpu_daemon, cuda_graphs):
    model, teacher = build(), build()
    optimizer = optimizer_of(model, gpu_daemon)
    train(model, optimizer, 1)
    with capture(Graph()):
        teacher(data(0)[0])
    optimizer.close()


def test_parameters_that_are_used_without_modules_are_there(late_copies, gpu_daemon, expected):
    model = build()
    optimizer = optimizer_of(model, gpu_daemon)
    train(functional(model), optimizer)
    assert same(weights(model, optimizer), expected[True])
    optimizer.close()


@pytest.mark.parametrize("overlap", ["auto", True, False])
def test_gradients_of_parameters_that_nobody_has_waited_for_are_refused(gpu_daemon, expected, overlap):
    model = build()
    optimizer = optimizer_of(model, gpu_daemon, overlap=overlap)
    train(model, optimizer, STEPS - 3)
    loss_of(functional(model), *data(STEPS - 3)).backward()
    for _ in range(2):
        with pytest.raises(superoffload.Error, match=r"zero_grad\(\) and compute the gradients"):
            optimizer.step()
    assert optimizer.last_result.committed_steps == STEPS - 3
    optimizer.zero_grad()
    train(model, optimizer, 1, STEPS - 3)
    train(functional(model), optimizer, 1, STEPS - 2)
    train(model, optimizer, 1, STEPS - 1)
    assert optimizer.last_result.committed_steps == STEPS
    optimizer.close()


def by_hand(model, step):
    torch.manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)


def recomputed(model, step):
    def called(tokens):
        return checkpoint(model, tokens, use_reentrant=False)

    loss_of(called, *data(step)).backward()


def by_a_hook(model, step):
    """The first block is called when the last one is."""
    handle = model.blocks[2].register_forward_hook(lambda module, inputs, output: model.blocks[0](output))
    loss_of(lambda tokens: model.head(model.blocks[2](model.embedding(tokens))), *data(step)).backward()
    handle.remove()


def after_synchronize(model, step):
    model.optimizer.synchronize()
    loss_of(functional(model), *data(step)).backward()


def after_state_dict(model, step):
    model.state_dict()
    loss_of(functional(model), *data(step)).backward()


def replaced(model, step):
    """Of other values there is nothing to wait for."""
    others = {name: torch.ones_like(p, requires_grad=True) for name, p in model.named_parameters()}
    loss_of(lambda tokens: torch.func.functional_call(model, others, tokens), *data(step)).backward()
    for name, parameter in model.named_parameters():
        parameter.grad = others[name].grad


@pytest.mark.parametrize("compute", [by_hand, recomputed, by_a_hook, after_synchronize, after_state_dict, replaced])
def test_gradients_of_parameters_that_are_there_are_taken(gpu_daemon, compute):
    seen = []
    for on_gpu in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not on_gpu:
                patch.setattr("superoffload.torch.cuda.is_on_gpu", lambda tensor: False)
            model = build()
            optimizer = optimizer_of(model, gpu_daemon)
            model.__dict__["optimizer"] = optimizer
            train(model, optimizer, 4)
            for step in range(4, STEPS):
                compute(model, step)
                optimizer.step()
                optimizer.zero_grad()
            seen.append(weights(model, optimizer))
            optimizer.close()
    assert same(*seen)
