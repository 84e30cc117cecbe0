"""superoffload.torch with parameters on a GPU, which is a fake one: every bit is that of a trainer on the host."""

import ctypes
import functools
import json
import pathlib
import re
import time
import urllib.request

import grpc
import pytest
import torch
from tests.conftest import Daemon
from tests.integration.test_ctl import ctl
from tests.support.daemon_deaths import kill, train_through_a_death
from tests.support.fake_torch_gpu import DRIVER, fake_gpu, gpu_daemon, make_current  # noqa: F401
from torch.utils._python_dispatch import TorchDispatchMode

import superoffload.torch
from superoffload._core import optimizers
from superoffload._core.gpu_attachment import GpuAttachment
from superoffload.torch import GpuOptions, VerdictKind, cuda
from superoffload.torch.gpu.backend import GpuBackend
from superoffload.torch.submitter import Submitter
from superoffload.v1 import optimizer_pb2

STEPS = 8
aten = torch.ops.aten
DTYPE = torch.bfloat16


class Model(torch.nn.Module):
    """Has a layer that is never called, a parameter of its own, and one that is tied."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 32)
        self.attention = torch.nn.MultiheadAttention(32, 2, batch_first=True)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(3))
        self.gain = torch.nn.Parameter(torch.ones(32))
        self.head = torch.nn.Linear(32, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        for layer in self.layers:
            x = x + torch.nn.functional.gelu(layer(x))
        return self.head(x * self.gain)


def build(dtype=DTYPE):
    torch.manual_seed(5)
    return Model().to(dtype)


def loss_of(model, seed):
    tokens = torch.randint(50, (4, 9), generator=torch.Generator().manual_seed(seed))
    logits = model(tokens[:, :-1]).float()
    return torch.nn.functional.cross_entropy(logits.reshape(-1, 50), tokens[:, 1:].reshape(-1))


def train(model, optimizer, steps=STEPS, first=0, accumulation=2):
    for step in range(first, first + steps):
        for micro_batch in range(accumulation):
            loss_of(model, accumulation * step + micro_batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] *= 0.95


def optimizer_of(model, daemon, **options):
    options = {"lr": 1e-2, "max_grad_norm": 0.5, "bucket_bytes": 4096, "endpoint": daemon.endpoint} | options
    return superoffload.torch.AdamW(model.named_parameters(), **options)


def weights(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@functools.cache
def on_host(**options):
    """Weights after STEPS and after 2 * STEPS steps on the host, of an optimizer with these options."""
    daemon = Daemon("--metrics_address=off")
    model = build()
    result = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("superoffload.torch.cuda.is_on_gpu", lambda tensor: False)
        optimizer = optimizer_of(model, daemon, **options)
        for first in (0, STEPS):
            train(model, optimizer, first=first)
            result.append(weights(model))
        assert optimizer.gpu_report is None
        optimizer.close()
    daemon.stop()
    return result


@pytest.fixture(scope="module")
def expected():
    return on_host()


def test_a_bucket_waits_for_every_stream_that_its_gradients_came_from(gpu_daemon, expected, monkeypatch):
    model = build()
    optimizer = optimizer_of(model, gpu_daemon, gpu=GpuOptions(cast="fused"))
    stream = ctypes.c_void_p()
    driver = ctypes.CDLL(DRIVER)
    assert make_current(driver) and driver.cuStreamCreate(ctypes.byref(stream), 0) == 0
    beside = {id(model.layers[1].weight), id(model.layers[2].bias)}
    monkeypatch.setattr(cuda, "current_stream", lambda tensor: stream.value if id(tensor) in beside else 0)
    waited = []
    end_after = optimizer._hosting.attachment.end_after
    monkeypatch.setattr(
        optimizer._hosting.attachment, "end_after", lambda stream: (waited.append(stream), end_after(stream))
    )
    train(model, optimizer)
    assert waited and set(waited) <= {0, stream.value}
    optimizer.synchronize()
    assert same(weights(model), expected[0])


def test_parameters_stay_until_every_stream_that_reads_them_has_done_so(gpu_daemon, monkeypatch):
    """Evaluation beside training, on a stream that no gradient comes from, is still under way when step() is called."""
    model = build()
    optimizer = optimizer_of(model, gpu_daemon)
    train(model, optimizer, steps=1)
    optimizer.synchronize()
    before, seen = weights(model), []
    driver, beside = ctypes.CDLL(DRIVER), ctypes.c_void_p()
    assert make_current(driver) and driver.cuStreamCreate(ctypes.byref(beside), 0) == 0

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def evaluate(_):
        time.sleep(0.1)  # as a long kernel would; the copies up would have come by now
        seen.append(weights(model))

    loss_of(model, 8).backward()
    with monkeypatch.context() as context, torch.no_grad():
        context.setattr(cuda, "current_stream", lambda tensor: beside.value)
        loss_of(model, 9)
        assert driver.fakeCudaIssue(beside, evaluate, None) == 0
    optimizer.step()
    optimizer.synchronize()
    assert driver.cuStreamSynchronize(beside) == 0
    assert same(seen[0], before) and not same(weights(model), before)
    optimizer.close()


@pytest.mark.parametrize(
    ("residents", "resident_steps", "slots"), [(0, 1, 2), (5, 1, 2), (5, 4, "auto"), (2, 4, 1), (2, 4, "in_place")]
)
@pytest.mark.parametrize("mover", ["daemon", "trainer", "direct"])
def test_weights_are_those_of_the_host(gpu_daemon, fake_gpu, expected, mover, residents, resident_steps, slots):
    model = build()
    options = GpuOptions(mover=mover, resident_buckets=residents, resident_steps=resident_steps, gradient_slots=slots)
    optimizer = optimizer_of(model, gpu_daemon, gpu=options)
    assert optimizer.gpu_report.mover == mover and optimizer.gpu_report.gpu == "fake GPU"
    assert optimizer.gpu_report.gradient_slots == (1 if slots in (1, "in_place") else 2)
    assert optimizer.gpu_report.in_place == (slots == "in_place")
    assert ("the only gradient slot" in optimizer.gpu_report.notes) == (slots == "in_place")
    assert ("one gradient slot" in optimizer.gpu_report.notes) == (slots == 1)
    train(model, optimizer)
    assert fake_gpu and optimizer.last_result.kind == VerdictKind.CLIP
    assert all(parameter.grad is None for parameter in model.parameters())
    assert same(weights(model), expected[0])  # state_dict() waits for what is still on its way
    train(model, optimizer, first=STEPS)
    assert same(weights(model), expected[1])
    optimizer.close()
    assert same(weights(model), expected[1])


@pytest.mark.parametrize(
    ("cls", "state_dtype", "moved"),
    [
        (superoffload.torch.AdamW, torch.float32, "46 instead of 34"),
        (superoffload.torch.AdamW, torch.bfloat16, "34 instead of 26"),
        (superoffload.torch.Lion, torch.float32, "34 instead of 26"),
    ],
)
def test_what_one_gradient_slot_costs_depends_on_the_state(gpu_daemon, cls, state_dtype, moved):
    gpu = GpuOptions(gradient_slots=1, resident_buckets=0, cast="fused")
    optimizer = cls(build().named_parameters(), gpu=gpu, endpoint=gpu_daemon.endpoint, state_dtype=state_dtype)
    assert optimizer.gpu_report.notes.endswith(f"2 bytes of host memory per parameter less, but a step moves {moved}")
    optimizer.close()


@pytest.mark.parametrize("masters", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("resident_steps", "slots"), [(1, "auto"), (4, "auto"), (1, "in_place")])
def test_values_are_checked_where_what_is_published_stays_behind(gpu_daemon, resident_steps, slots, masters):
    model, expected = build(), on_host(master_dtype=masters)
    options = GpuOptions(resident_buckets=5, resident_steps=resident_steps, gradient_slots=slots)
    optimizer = optimizer_of(model, gpu_daemon, gpu=options, master_dtype=masters)
    train(model, optimizer)
    parameters = list(model.parameters())
    optimizer.synchronize()
    before = [parameter.detach().clone() for parameter in parameters]
    with torch.no_grad():  # away and back, as averaged weights are evaluated
        for parameter, value in zip(parameters, before, strict=True):
            parameter.mul_(2)
            parameter.copy_(value)
    train(model, optimizer, first=STEPS, steps=1)
    for parameter in parameters:
        optimizer.synchronize()
        kept = parameter.detach().clone()
        parameter.data.add_(1)  # behind torch's back
        with pytest.raises(superoffload.Error, match="changed by somebody else than the optimizer, and nothing was"):
            train(model, optimizer, first=STEPS + 1, steps=1)
        optimizer.zero_grad()
        parameter.data.copy_(kept)
    train(model, optimizer, first=STEPS + 1, steps=STEPS - 1)
    assert same(weights(model), expected[1])
    optimizer.close()


def test_residents_come_while_the_trainer_waits_and_go_where_the_loop_needs_the_memory(
    gpu_daemon, expected, monkeypatch
):
    model = build()
    optimizer = optimizer_of(model, gpu_daemon)
    attachment = optimizer._hosting.attachment
    assert all(bucket.log_slots == 5 for bucket in attachment.optimizer.layout.buckets)
    monkeypatch.setattr(type(attachment), "stall_seconds", lambda self: 1e9)
    train(model, optimizer)
    first = min(8, len(attachment.optimizer.layout.buckets))
    assert attachment.resident_buckets == first, "after three watched steps and the one behind them, three stalls"
    train(model, optimizer, first=STEPS, steps=1)
    loss_of(model, 0).backward()
    cuda.on_failed_allocation(0, 1 << 50, 0, 0)
    optimizer.zero_grad()  # as a loop does that goes on after an OutOfMemoryError
    assert attachment.resident_buckets == 0
    train(model, optimizer, first=STEPS + 1, steps=STEPS - 1)
    assert attachment.resident_buckets == 0, "it will never fit"
    assert same(weights(model), expected[1])
    optimizer.close()


@pytest.mark.parametrize("casts", [False, True])
@pytest.mark.parametrize("fitting", [2, 1, 0])
def test_what_takes_memory_is_given_up_where_the_daemon_has_none(gpu_daemon, expected, monkeypatch, fitting, casts):
    """``casts``: gradients would leave sooner as fp32."""
    asked = []
    monkeypatch.setattr(GpuBackend, "choose_cast", lambda self, hosted, bucket_bytes: casts)

    def create(connection, request, call=optimizers.create):
        wide = request.parameters[0].gradient_dtype == optimizer_pb2.DATA_TYPE_FLOAT32
        asked.append((wide, request.gradient_slots, request.log_slots, request.in_place))
        if wide or request.log_slots > 0 or request.gradient_slots - request.in_place > fitting:
            raise superoffload.Error(grpc.StatusCode.RESOURCE_EXHAUSTED, "the budget is used up")
        return call(connection, request)

    monkeypatch.setattr(optimizers, "create", create)
    model = build()
    optimizer = optimizer_of(model, gpu_daemon)
    ladder = [(casts, 2, 5, False), (casts, 2, 3, False), (casts, 2, 0, False)]
    ladder += [(False, 2, 0, False)] * casts + [(False, 1, 0, False), (False, 1, 0, True)]
    assert asked == ladder[: 5 + casts - fitting]
    assert optimizer.gpu_report.gradient_slots == max(1, fitting)
    assert optimizer.gpu_report.in_place == (fitting == 0)
    train(model, optimizer)
    assert same(weights(model), expected[0])
    optimizer.close()
    with pytest.raises(superoffload.Error, match="the budget is used up"):
        optimizer_of(build(), gpu_daemon, gpu=GpuOptions(gradient_slots=2, resident_buckets=2))


def compile_layers(model):
    for index, layer in enumerate(model.layers):
        model.layers[index] = torch.compile(layer, backend="aot_eager")
    return model


def compile_in_place(model, modules):
    for module in modules:
        module.compile(backend="aot_eager")
    return model


COMPILED = {
    "whole": lambda model: torch.compile(model, backend="aot_eager", fullgraph=True),
    "in place": lambda model: compile_in_place(model, [model]),
    "layers": compile_layers,
    "layers in place": lambda model: compile_in_place(model, model.layers),
    "called by a compiled function": lambda model: torch.compile(lambda tokens: model(tokens), backend="aot_eager"),
}


# Nothing that is compiled runs the hooks that wait for parameters.
@pytest.mark.parametrize("form", COMPILED)
def test_what_is_compiled_sees_its_parameters(gpu_daemon, expected, form):
    torch._dynamo.reset()
    model = build()
    optimizer = optimizer_of(model, gpu_daemon, gpu=GpuOptions(cast="fused"))
    train(model, optimizer, steps=3)
    train(COMPILED[form](model), optimizer, steps=STEPS - 3, first=3)
    saved = weights(model).values()  # names are those of compiled modules
    assert all(torch.equal(a, b) for a, b in zip(saved, expected[0].values(), strict=True))
    optimizer.close()


class Layer(torch.nn.Module):
    """Of torch's own layers only what is within them is compiled."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(32, 32)

    def forward(self, x):
        return self.linear(x)


@pytest.mark.parametrize("form", ["in place", "in place, and again later", "wrapped"])
def test_a_compiled_layer_waits_for_its_own_parameters(gpu_daemon, monkeypatch, form):
    """Also one that is compiled again, of which torch traces nothing because it has what it made before."""
    waits, waits_before_runs = set(), []
    wait = GpuAttachment.await_parameters

    def await_parameters(attachment, bucket, stream):
        waits.add(bucket)
        wait(attachment, bucket, stream)

    def backend(graph, _):
        def run(*arguments):
            waits_before_runs.append(set(waits))
            return graph(*arguments)

        return run

    def trained(compiled):
        model = build()
        torch.manual_seed(6)
        model.layers = torch.nn.ModuleList(Layer().to(DTYPE) for _ in range(4))
        model.head = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.Linear(128, 50)).to(DTYPE)
        optimizer = optimizer_of(model, gpu_daemon, gpu=GpuOptions(cast="fused"))
        for index, layer in enumerate(model.layers if compiled else ()):
            if form == "wrapped":
                model.layers[index] = torch.compile(layer, backend=backend)
            else:
                layer.compile(backend=backend)
        train(model, optimizer)
        for layer in model.layers if compiled and form == "in place, and again later" else ():
            layer.compile(backend=backend)
        waits.clear()
        waits_before_runs.clear()
        train(model, optimizer, steps=1, first=STEPS)
        of = {id(parameter.tensor): set(parameter.buckets) for parameter in optimizer._hosting.hosted}
        buckets = [set().union(*(of[id(p)] for p in part.parameters())) for part in (*model.layers, model.head)]
        optimizer.close()
        return list(model.parameters()), buckets

    torch._dynamo.reset()
    monkeypatch.setattr(GpuAttachment, "await_parameters", await_parameters)
    expected, _ = trained(compiled=False)
    found, (*layers, head) = trained(compiled=True)
    assert all(map(torch.equal, found, expected))
    assert len(waits_before_runs) == 2 * len(layers), "once per micro-batch"
    assert waits_before_runs[0] < waits_before_runs[len(layers) - 1]
    assert not head <= waits_before_runs[len(layers) - 1], "which is called after them"
    assert all(needs <= seen for needs, seen in zip(layers, waits_before_runs, strict=False))


def test_without_overlap_and_with_fp32_gradients_the_weights_are_the_same(gpu_daemon, expected):
    for options in ({"overlap": False}, {"gpu": GpuOptions(cast="gpu_fp32")}, {"speculation": "never"}):
        model = build()
        optimizer = optimizer_of(model, gpu_daemon, **options)
        train(model, optimizer)
        assert same(weights(model), expected[0]), options
        optimizer.close()


def test_what_is_best_is_measured(gpu_daemon, expected):
    model = build()
    optimizer = optimizer_of(model, gpu_daemon)
    report = optimizer.gpu_report
    assert set(report.seconds) == {"daemon", "trainer"}, "direct is for GPUs that use the host's page tables"
    assert report.mover in report.seconds
    train(model, optimizer)
    assert same(weights(model), expected[0])
    described = ctl(gpu_daemon, "describe", optimizer.name)
    assert "fake GPU" in described and report.mover in described and "BUCKET ELEMENTS" in described
    use = json.loads(ctl(gpu_daemon, "describe", optimizer.name, "--json"))["gpu"]
    assert use["mover_seconds"].keys() == report.seconds.keys() and len(use["cast_timings"]) == 3
    optimizer.close()


@pytest.mark.parametrize(("machine", "slots"), [("h100-pcie", 16), ("mig", 8)])
def test_a_gpu_with_little_memory_has_fewer_slots(gpu_daemon, monkeypatch, machine, slots):
    monkeypatch.setenv("FAKE_CUDA_MACHINE", machine)
    layer = torch.nn.Linear(2048, 2048, bias=False, dtype=torch.bfloat16)
    parameter_bytes = layer.weight.nbytes
    gpu = GpuOptions(mover="trainer", cast="fused")
    optimizer = optimizer_of(layer, gpu_daemon, gpu=gpu, bucket_bytes=parameter_bytes)
    bucket_bytes = 2 * max(bucket.elements for bucket in optimizer._hosting.attachment.optimizer.layout.buckets)
    # Beside the slots there are sums of squares, and the memory is of whole pieces.
    assert (optimizer.gpu_report.gpu_bytes - parameter_bytes) // bucket_bytes == slots
    optimizer.close()


@pytest.mark.parametrize("mover", ["auto", "trainer", "daemon"])
def test_a_daemon_that_copies_nothing_lets_go_of_the_gpu(gpu_daemon, expected, mover):
    def daemon_maps_the_gpu():
        return "fake-gpu-memory" in pathlib.Path(f"/proc/{gpu_daemon.process.pid}/maps").read_text()

    model = build()
    optimizer = optimizer_of(model, gpu_daemon, gpu=GpuOptions(mover=mover))
    copies = optimizer.gpu_report.mover == "daemon"
    assert optimizer.gpu_report.sharing == ("descriptor" if copies else "")
    while daemon_maps_the_gpu() != copies:  # it lets go when it has read the message
        time.sleep(0.01)
    train(model, optimizer)
    assert same(weights(model), expected[0])
    optimizer.close()


def test_how_the_gpu_is_used_is_scraped(fake_gpu, metered_daemon):
    try:
        optimizer = optimizer_of(build(), metered_daemon, name="run", gpu=GpuOptions(mover="trainer"))
    except superoffload.Error as error:
        pytest.skip(error.message)
    url = f"http://{metered_daemon.info.metrics_address}/metrics"
    text = urllib.request.urlopen(url, timeout=30).read().decode()
    (info,) = [line for line in text.splitlines() if line.startswith("superoffload_gpu_info{")]
    assert re.search('optimizer="[0-9a-f]{16}"', info) and 'mover="trainer"' in info and 'gpu="fake GPU"' in info
    optimizer.close()
    assert "superoffload_gpu_info{" not in urllib.request.urlopen(url, timeout=30).read().decode()


def test_state_and_checkpoints_are_those_of_the_host(gpu_daemon, expected, tmp_path):
    model = build()
    optimizer = optimizer_of(model, gpu_daemon, gpu=GpuOptions(resident_buckets=3))
    train(model, optimizer)
    lr = optimizer.param_groups[0]["lr"]
    optimizer.save_checkpoint(tmp_path / "after")
    masters = optimizer.state_tensors()
    for name, tensor in model.named_parameters():
        assert torch.equal(masters[name]["master"].to(DTYPE), tensor), name
    train(model, optimizer, first=STEPS)
    assert same(weights(model), expected[1])
    optimizer.restore_checkpoint(tmp_path / "after")
    assert same(weights(model), expected[0])
    assert optimizer.param_groups[0]["lr"] == pytest.approx(lr / 0.95)  # that of the step
    optimizer.pull_params()
    optimizer.push_params()
    optimizer.close()


@pytest.mark.parametrize("resident_steps", [1, 4])
def test_pushed_parameters_become_the_masters_of_residents(gpu_daemon, resident_steps):
    def run(**options):
        model = build()
        optimizer = optimizer_of(model, gpu_daemon, **options)
        train(model, optimizer, steps=3)
        optimizer.synchronize()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        optimizer.push_params()
        train(model, optimizer, steps=3, first=3)
        after = weights(model)
        optimizer.close()
        return after

    on_gpu = run(gpu=GpuOptions(resident_buckets=5, resident_steps=resident_steps))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("superoffload.torch.cuda.is_on_gpu", lambda tensor: False)
        assert same(on_gpu, run())


@pytest.mark.parametrize("masters", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("narrow", ["float32", "bfloat16", "8bit"])
def test_narrow_state_is_that_of_the_host(gpu_daemon, daemon, narrow, masters):
    def run(residents=0, resident_steps=4, slots="auto"):
        model = build()
        half = [{"params": list(model.layers.named_parameters(prefix="layers")), "optim_bits": 32}]
        half += [{"params": [(n, p) for n, p in model.named_parameters() if not n.startswith("layers")]}]
        options = {"lr": 1e-2, "max_grad_norm": 0.5, "bucket_bytes": 4096, "endpoint": daemon.endpoint}
        kind = superoffload.torch.AdamW
        if narrow == "8bit":
            kind, half[1]["optim_bits"] = superoffload.torch.AdamW8bit, 8
        elif narrow == "bfloat16":
            options["state_dtype"] = torch.bfloat16
        elif masters == torch.float32:
            del half[0]["optim_bits"]
        gpu = GpuOptions(resident_buckets=residents, resident_steps=resident_steps, gradient_slots=slots)
        optimizer = kind(half, gpu=gpu, seed=3, master_dtype=masters, **options)
        try:
            train(model, optimizer)
            return weights(model), optimizer.state_tensors()
        finally:
            optimizer.close()

    on_gpu = [run(), run(residents=5, resident_steps=1), run(residents=3), run(slots="in_place")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("superoffload.torch.cuda.is_on_gpu", lambda tensor: False)
        on_host = run()
    for weights_there, state_there in on_gpu:
        assert same(weights_there, on_host[0])
        for name, arrays in on_host[1].items():
            assert same(state_there[name], arrays)


def test_a_grad_scaler_finds_what_overflows(gpu_daemon, daemon):
    def run(**options):
        model = build(torch.float16)
        optimizer = optimizer_of(model, daemon, **options)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=3)
        kinds = []
        for step in range(10):
            scaler.scale(loss_of(model, step)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            kinds.append(optimizer.last_result.kind)
        result = weights(model), kinds, scaler.get_scale()
        optimizer.close()
        return result

    on_gpu = run(overlap=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("superoffload.torch.cuda.is_on_gpu", lambda tensor: False)
        on_host = run()
    assert on_gpu[1:] == on_host[1:] and VerdictKind.SKIP_NON_FINITE in on_gpu[1]
    assert same(on_gpu[0], on_host[0])


class Blocking(TorchDispatchMode):
    """Notes operations after which a GPU's host knows a value, and so has waited for it."""

    def __init__(self, log):
        super().__init__()
        self._log = log

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket in (aten._local_scalar_dense, aten.nonzero, aten.equal, aten.is_nonzero):
            self._log.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("overlap", ["auto", False])
def test_step_goes_through_its_lists_while_the_gpu_compares(gpu_daemon, monkeypatch, overlap):
    model = build()
    # Residents that come in between have the canaries looked at anew.
    optimizer = optimizer_of(model, gpu_daemon, overlap=overlap, gpu=GpuOptions(resident_buckets=0))
    train(model, optimizer)  # it is watched no longer
    log = []

    def note(owner, name, event):
        call = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *arguments: (call(*arguments), log.append(event))[0])

    def begin_read(flag, call=cuda.begin_read):
        log.append("asked")
        read = call(flag)
        return lambda: (log.append("answered"), read())[1]

    note(Submitter, "finish", "submitted the rest")
    note(optimizer._hosting.stepping, "_send_groups", "sent groups")
    note(optimizer._hosting.attachment, "end_step", "ended")
    monkeypatch.setattr(cuda, "begin_read", begin_read)
    loss_of(model, 0).backward()
    loss_of(model, 1).backward()
    log.clear()
    with Blocking(log):
        optimizer.step()
    asked = ["asked"] * (2 if overlap else 1)  # the tombstones, too
    answered = ["answered"] * len(asked)
    first = log.index("submitted the rest")
    assert log[: len(asked)] == asked and first >= len(asked)
    assert log[first:] == ["submitted the rest", "sent groups", *answered, "ended"]
    assert not [event for event in log if event.startswith("aten")]
    optimizer.close()


def test_a_gradient_that_is_set_after_it_left_is_refused(gpu_daemon):
    model = build()
    optimizer = optimizer_of(model, gpu_daemon, overlap=True)
    train(model, optimizer, steps=2)
    loss_of(model, 9).backward()
    loss_of(model, 10).backward()
    model.gain.grad = torch.ones(32, dtype=DTYPE)
    with pytest.raises(superoffload.Error, match="overlap=False"):
        optimizer.step()
    optimizer.zero_grad()
    train(model, optimizer, steps=1)
    optimizer.close()


def leave_free(monkeypatch, model, gradients):
    """The GPU's memory holds that many times the model's gradients, and the tenth that backward needs."""
    needed = sum(parameter.nbytes for parameter in model.parameters())
    monkeypatch.setattr(cuda, "total_bytes", lambda device: 10 * needed)
    monkeypatch.setattr(cuda, "free_bytes", lambda device: int((gradients + 1) * needed))


def most_gradients(model):
    """A list whose last element is the most bytes of gradients that backward had at once."""
    most = [0]

    def look(_):
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        most[0] = max(most[0], sum(grad.nbytes for grad in grads if any(grad.stride())))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(look)
    return most


@pytest.mark.parametrize("overlap", ["auto", True])
@pytest.mark.parametrize(("gradients", "forced"), [(1.01, False), (0.99, True)])
def test_gradients_that_the_gpu_cannot_hold_leave_in_the_first_step(
    gpu_daemon, daemon, monkeypatch, overlap, gradients, forced
):
    on_host = build()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "is_on_gpu", lambda tensor: False)
        optimizer = optimizer_of(on_host, daemon)
        train(on_host, optimizer, accumulation=1)
        optimizer.close()
    model = build()
    leave_free(monkeypatch, model, gradients)
    optimizer = optimizer_of(model, gpu_daemon, overlap=overlap)
    most = most_gradients(model)
    total = sum(parameter.nbytes for parameter in model.parameters())
    train(model, optimizer, steps=1, accumulation=1)
    assert most[0] < total / 2 if forced else most[0] == total
    train(model, optimizer, steps=STEPS - 1, first=1, accumulation=1)
    optimizer.close()
    assert same(weights(model), weights(on_host))


def test_memory_that_activations_will_leave_counts_as_free(gpu_daemon, monkeypatch):
    model = build()
    total = sum(parameter.nbytes for parameter in model.parameters())
    leave_free(monkeypatch, model, 0.5)
    optimizer = optimizer_of(model, gpu_daemon)
    most = most_gradients(model)
    loss = loss_of(model, 0)
    monkeypatch.setattr(cuda, "allocated_bytes", lambda device: total)
    loss.backward()
    assert most[0] == total
    optimizer.step()
    optimizer.close()


def test_two_backward_passes_whose_gradients_the_gpu_cannot_hold_are_refused(gpu_daemon, monkeypatch):
    model = build()
    leave_free(monkeypatch, model, 0.5)
    optimizer = optimizer_of(model, gpu_daemon)
    with pytest.raises(superoffload.Error, match="one backward pass per step, or shard"):
        train(model, optimizer, steps=1, accumulation=2)
    optimizer.zero_grad()
    train(model, optimizer, steps=2, accumulation=1)
    assert optimizer.last_result.committed_steps == 2
    optimizer.close()


@pytest.mark.parametrize("residents", [0, 5])
@pytest.mark.parametrize(("dies_in", "micro_batch"), [(5, 0), (5, 1), (6, 1)])  # what is published stays behind in one
def test_a_daemon_that_dies_costs_at_most_one_step(gpu_daemon, expected, residents, dies_in, micro_batch):
    kept = Daemon("--keeper", "--metrics_address=off")
    model = build()
    optimizer = optimizer_of(model, kept, name="kept", gpu=GpuOptions(resident_buckets=residents))
    train(model, optimizer, steps=3)
    batch = functools.partial(loss_of, model)
    for _ in train_through_a_death(kept, optimizer, batch, range(3, STEPS), (dies_in, micro_batch)):
        optimizer.param_groups[0]["lr"] *= 0.95
    assert same(weights(model), expected[0])
    optimizer.close()
    kept.stop()


def test_residents_are_set_again_with_a_daemon_that_took_over(gpu_daemon):
    kept = Daemon("--keeper", "--metrics_address=off")
    model = build()
    optimizer = optimizer_of(model, kept, name="kept", gpu=GpuOptions(resident_buckets=2))
    train(model, optimizer, steps=2)
    kill(kept)
    try:
        train(model, optimizer, steps=1)
    except superoffload.Error as error:
        assert error.code == grpc.StatusCode.ABORTED, error
        optimizer.zero_grad()
    train(model, optimizer, steps=2)
    assert json.loads(ctl(kept, "describe", "kept", "--json"))["gpu"]["resident_buckets"] == 2
    optimizer.close()
    kept.stop()
