"""Code that reads parameters on a GPU between step() and the next forward pass sees the host's bits."""

import copy
import gc

import pytest
import torch
from tests.integration import test_torch_streams
from tests.integration.test_torch_gpu_graphs import STEPS, build, data, late_copies, loss_of, optimizer_of  # noqa: F401
from tests.support.fake_torch_gpu import fake_gpu, gpu_daemon  # noqa: F401
from tests.support.loops import recorded, told
from torch.utils import _python_dispatch
from torch.utils.flop_counter import FlopCounterMode

from superoffload.torch import GpuOptions

WAITS = "from now on step() waits"


def averages(model):
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))

    def read():
        average.update_parameters(model)
        return [p.clone() for p in average.module.parameters()]

    return read


def copies(model):
    return lambda: list(copy.deepcopy(model).parameters())


def norms(model):
    return lambda: [torch.stack(torch._foreach_norm([p.detach() for p in model.parameters()]))]


def views(model):
    flat = [p.data.view(-1) for p in model.parameters()]
    return lambda: [torch.cat(flat)]


def train(daemon, make_read, on_gpu=True, **options):
    """What a loop has read after each step."""
    model, seen = build(), []
    with pytest.MonkeyPatch.context() as patch:
        if not on_gpu:
            patch.setattr("superoffload.torch.cuda.is_on_gpu", lambda tensor: False)
        optimizer = optimizer_of(model, daemon, **options)
        read = make_read(model)
        for step in range(STEPS):
            loss_of(model, *data(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            seen += [tensor.detach().clone() for tensor in read()]
        optimizer.close()
    return seen


@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"overlap": False}], ids=["auto", "early", "off"])
@pytest.mark.parametrize("make_read", [averages, copies, norms, views])
def test_new_values_are_read(late_copies, gpu_daemon, make_read, options):
    expected = train(gpu_daemon, make_read, on_gpu=False)
    with recorded() as caught:
        seen = train(gpu_daemon, make_read, **options)
    assert all(map(torch.equal, seen, expected))
    assert told(caught, WAITS) == 1
    assert _python_dispatch._get_current_dispatch_mode() is None


def test_two_optimizers_are_watched(late_copies, gpu_daemon):
    def loop(make):
        models = build(), build()
        optimizers = [make(model) for model in models]
        seen = []
        for step in range(STEPS):
            for model in models:
                loss_of(model, *data(step)).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            seen += [p.detach().clone() for model in models for p in model.parameters()]
        for optimizer in optimizers:
            optimizer.close()
        return seen

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("superoffload.torch.cuda.is_on_gpu", lambda tensor: False)
        expected = loop(lambda model: optimizer_of(model, gpu_daemon))
    with recorded() as caught:
        seen = loop(lambda model: optimizer_of(model, gpu_daemon))
    assert all(map(torch.equal, seen, expected)) and told(caught, WAITS) == 2
    assert _python_dispatch._get_current_dispatch_mode() is None


class Waits:
    """Which calls have waited for parameters."""

    def __init__(self, optimizer):
        self.in_step, self.steps = False, []
        attachment, step = optimizer._hosting.attachment, optimizer.step
        await_parameters = attachment.await_parameters

        def awaits(*arguments):
            self.steps[-1] |= self.in_step and self.ended
            return await_parameters(*arguments)

        def wait_verdict(call=attachment.wait_verdict):
            result = call()
            self.ended = True
            return result

        def steps(*arguments):
            self.steps.append(False)
            self.in_step, self.ended = True, False
            step(*arguments)
            self.in_step = False

        attachment.await_parameters, attachment.wait_verdict, optimizer.step = awaits, wait_verdict, steps


def test_a_loop_that_waits_or_does_not_read_keeps_the_overlap(gpu_daemon):
    """Nor is anything left that slows torch's operations down."""
    model = build()
    optimizer = optimizer_of(model, gpu_daemon, gpu=GpuOptions(resident_buckets=0))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)
    waits = Waits(optimizer)
    with recorded() as caught:
        for step in range(STEPS):
            loss_of(model, *data(step)).backward()
            assert _python_dispatch._get_current_dispatch_mode() is None
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            total = sum(p.numel() * p.element_size() for p in model.parameters())
            if step % 2:
                optimizer.synchronize()
                copy.deepcopy(model)
            else:
                model.state_dict()
        model(data(0)[0])
    assert total and not told(caught, WAITS) and waits.steps == [False] * STEPS
    optimizer.close()


def test_a_loop_that_reads_waits_in_step(gpu_daemon):
    model = build()
    optimizer = optimizer_of(model, gpu_daemon, gpu=GpuOptions(resident_buckets=0))
    waits = Waits(optimizer)
    with recorded():
        for step in range(STEPS):
            loss_of(model, *data(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                copy.deepcopy(model)
    assert waits.steps == [False] * 2 + [True] * (STEPS - 2)
    optimizer.close()


@pytest.mark.parametrize("around", ["step", "forward"])
def test_modes_of_others_end_as_they_began(gpu_daemon, around):
    model = build()
    optimizer = optimizer_of(model, gpu_daemon)
    for step in range(STEPS):
        loss = loss_of(model, *data(step))
        with FlopCounterMode(display=False) as counter:
            if around == "step":
                loss.backward()
                optimizer.step()
            else:
                optimizer.zero_grad()
                loss_of(model, *data(step))
        if around == "forward":
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()
        assert counter.get_total_flops() > 0
        assert around == "forward" or _python_dispatch._get_current_dispatch_mode() is None
    optimizer.close()
    assert _python_dispatch._get_current_dispatch_mode() is None


def test_nothing_is_left_of_an_optimizer_that_is_dropped(gpu_daemon):
    model = build()
    optimizer = optimizer_of(model, gpu_daemon)
    loss_of(model, *data(0)).backward()
    optimizer.step()
    assert _python_dispatch._get_current_dispatch_mode() is not None
    del optimizer
    assert _python_dispatch._get_current_dispatch_mode() is None


def test_functions_are_compiled_meanwhile(gpu_daemon):
    compiled = []

    def backend(module, inputs):
        compiled.append(module)
        return module

    model = build()
    optimizer = optimizer_of(model, gpu_daemon)
    loss_of(model, *data(0)).backward()
    optimizer.step()
    torch._dynamo.reset()
    torch.compile(lambda x: x.sin().cos(), backend=backend)(torch.ones(3))
    assert len(compiled) == 1
    optimizer.close()


# Its end restores what torch keeps of the stack of modes beside it.
def test_an_evaluation_in_inference_mode_leaves_nothing(gpu_daemon):
    model = build()
    optimizer = optimizer_of(model, gpu_daemon)
    for step in range(3):
        loss_of(model, *data(step)).backward()
        optimizer.step()
        with torch.inference_mode():
            loss_of(model, *data(step))
        optimizer.zero_grad()  # asks torch's profiler, which would find a mode that is not there
    optimizer.close()
    assert _python_dispatch._get_current_dispatch_mode() is None


@pytest.mark.parametrize("first", [0, 1])
def test_what_looks_at_operations_goes_with_its_optimizer(gpu_daemon, first):  # noqa: F811
    """Whichever of two that nobody closes goes first: torch ends such modes in the reverse order of their beginning."""
    before = _python_dispatch._get_current_dispatch_mode_stack()
    kept = []
    for _ in range(2):
        model = test_torch_streams.build()
        kept.append((model, test_torch_streams.optimizer_of(model, gpu_daemon, 2)))
        test_torch_streams.train(*kept[-1], steps=1)
    assert len(_python_dispatch._get_current_dispatch_mode_stack()) > len(before)
    del model
    for index in (first, 0):  # then the one that is left
        del kept[index]
        gc.collect()
    assert _python_dispatch._get_current_dispatch_mode_stack() == before


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_modes_do_not_add_up(gpu_daemon, reentrant):  # noqa: F811
    """A backward pass restores the stack that it began with, also what was taken away inside of it."""
    before = _python_dispatch._get_current_dispatch_mode_stack()
    model = test_torch_streams.build(reentrant)
    optimizer = test_torch_streams.optimizer_of(model, gpu_daemon, 2)
    for _ in range(3):
        test_torch_streams.train(model, optimizer, steps=4)
        assert len(_python_dispatch._get_current_dispatch_mode_stack()) <= len(before) + 2
    optimizer.close()
    assert _python_dispatch._get_current_dispatch_mode_stack() == before
