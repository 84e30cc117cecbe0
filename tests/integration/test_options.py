"""Options and names: what changes nothing is taken, what would have to change results is refused."""

import functools
import re
import warnings

import grpc
import pytest
import torch

import superoffload.torch
from superoffload._core import names


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


def test_eps_of_zero_is_torchs_also_where_gradients_are_tiny():
    model, twin = build(), build()
    ours = superoffload.torch.AdamW(model.parameters(), lr=1e-2, eps=0)
    theirs = torch.optim.AdamW(twin.parameters(), lr=1e-2, eps=0)
    for step in range(4):
        for net, optimizer in ((model, ours), (twin, theirs)):
            (net(torch.ones(2, 8)) * 10.0 ** -(6 * step)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("option", [{"amsgrad": True}, {"differentiable": True}, {"max_grad_norm": 1.0}], ids=str)
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


@pytest.mark.parametrize("norms", [[0.0], [0.1, 0.05], [0.05, 0.1], [0.2, 1e9], [float("inf")], [0.1, 0.0]], ids=str)
def test_clips_of_one_step_work_one_after_another_as_in_torch(norms):
    ours, theirs = build(), build()
    optimizers = (
        superoffload.torch.AdamW(ours.parameters(), lr=1e-2),
        torch.optim.AdamW(theirs.parameters(), lr=1e-2),
    )
    for step in range(3):
        found = []
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            model((1 + step) * torch.ones(2, 8)).square().mean().backward()
            found.append([torch.nn.utils.clip_grad_norm_(model.parameters(), norm).item() for norm in norms])
            optimizer.step()
            optimizer.zero_grad()
        assert found[0] == pytest.approx(found[1], rel=1e-5)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=0, atol=1e-6)


def test_groups_that_maximize_and_groups_that_do_not_are_refused_wherever_it_is_said():
    model = build()
    groups = [{"params": [model.weight]}, {"params": [model.bias], "maximize": True}]
    refused(lambda: superoffload.torch.AdamW(groups), grpc.StatusCode.UNIMPLEMENTED, "maximize", "negate the loss")
    groups[1]["maximize"] = False
    optimizer = superoffload.torch.AdamW(groups)
    optimizer.param_groups[1]["maximize"] = True
    refused(lambda: train(model, optimizer), grpc.StatusCode.UNIMPLEMENTED, "maximize")
    optimizer.param_groups[0]["maximize"] = True
    optimizer.step()
    state = torch.optim.AdamW(model.parameters(), maximize=True).state_dict()
    loaded = superoffload.torch.AdamW(build().parameters())
    loaded.load_state_dict(state)
    assert loaded.param_groups[0]["maximize"]


def test_a_negative_norm_is_refused():
    model = build()
    optimizer = superoffload.torch.AdamW(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    with pytest.raises(ValueError, match="at least 0"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), -1.0)
    optimizer.step()


def test_sharded_parameters_are_refused_in_a_sentence(tmp_path):
    import torch.distributed
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor import DeviceMesh, DTensor, Shard, init_device_mesh
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.distributed.tensor.placement_types import Partial, _StridedShard

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        meta = TensorMeta((4,), (1,), torch.float32)
        partial = DTensor.from_local(torch.ones(4), mesh, [Partial()])
        gpus = DeviceMesh("cuda", [0], _init_backend=False)
        offloaded = DTensor(torch.ones(4), DTensorSpec(gpus, (Shard(0),), meta), requires_grad=False)
        two = DeviceMesh("cpu", [[0], [1]], _init_backend=False)
        twice = DTensorSpec(two, (_StridedShard(0, split_factor=1), Shard(0)), TensorMeta((5,), (1,), torch.float32))
        unevenly_twice = DTensor(torch.ones(3), twice, requires_grad=False)
        flat = FullyShardedDataParallel(build(), device_id=torch.device("cpu"))
        original = FullyShardedDataParallel(build(), device_id=torch.device("cpu"), use_orig_params=True)
        for parameters, remedy in (
            (flat.parameters(), "fully_shard"),
            (original.parameters(), "fully_shard"),
            ([torch.nn.Parameter(partial)], "redistribute"),
            ([torch.nn.Parameter(offloaded)], "leave the policy out"),
            ([torch.nn.Parameter(unevenly_twice)], "not divisible by 2 ranks"),
        ):
            parameters = list(parameters)
            build_it = functools.partial(superoffload.torch.AdamW, parameters)
            refused(build_it, grpc.StatusCode.UNIMPLEMENTED, remedy)
    finally:
        torch.distributed.destroy_process_group()


def test_gradients_of_tiles_leave_with_the_last_tile():
    model = build()
    optimizer = superoffload.torch.AdamW(model.parameters(), overlap=True)
    train(model, optimizer, 2)
    for ready in (False, True):
        for parameter in model.parameters():
            parameter.ds_grad_is_ready = ready
        model(torch.ones(2, 8)).square().mean().backward()
        assert bool(optimizer._hosting.attachment.look().begun) == ready
    optimizer.step()
    assert optimizer.last_result.committed_steps == 3


def test_an_empty_parameter_with_a_gradient_is_nobodys_business():
    model = build()
    model.register_parameter("empty", torch.nn.Parameter(torch.ones(0)))
    optimizer = superoffload.torch.AdamW(model.parameters())
    before = model.weight.detach().clone()
    (model(torch.ones(2, 8)).sum() + model.empty.sum()).backward()
    assert model.empty.grad is not None
    optimizer.step()
    assert not torch.equal(model.weight, before)


def test_memory_formats_stay():
    def convolution():
        torch.manual_seed(2)
        return torch.nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)

    ours, theirs = convolution(), convolution()
    strides = ours.weight.stride()
    optimizers = superoffload.torch.AdamW(ours.parameters()), torch.optim.AdamW(theirs.parameters())
    for step in range(4):
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            x = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(step))
            model(x.to(memory_format=torch.channels_last)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert ours.weight.stride() == strides != ours.weight.contiguous().stride()
    assert torch.allclose(ours.weight, theirs.weight, rtol=0, atol=1e-6)


def test_weights_swapped_and_swapped_back_are_accepted():
    model = build()
    optimizer = superoffload.torch.AdamW(model.parameters())
    train(model, optimizer)
    kept = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():  # evaluation with averaged weights
        for parameter in model.parameters():
            parameter.mul_(0.5)
        for parameter, value in zip(model.parameters(), kept, strict=True):
            parameter.copy_(value)
    train(model, optimizer)
    assert optimizer.last_result.committed_steps == 2


def test_pushing_keeps_the_masters_of_parameters_that_are_the_published_ones():
    model = build().to(torch.bfloat16)
    optimizer = superoffload.torch.AdamW(model.named_parameters())
    for _ in range(3):
        model(torch.ones(2, 8, dtype=torch.bfloat16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    before = optimizer.state_tensors()["weight"]["master"]
    assert not torch.equal(before, before.to(torch.bfloat16).float())
    with torch.no_grad():
        model.weight[3, 5] = 0.75
    optimizer.push_params()
    before[3, 5] = 0.75
    assert torch.equal(optimizer.state_tensors()["weight"]["master"], before)


@pytest.mark.parametrize("program", ["-c", "-m", "", "/home/me/train.py", "a script"])
def test_the_name_that_is_made_for_an_anonymous_optimizer_is_no_option(monkeypatch, program):
    monkeypatch.setattr("sys.argv", [program])
    assert re.fullmatch(r"[A-Za-z0-9._][A-Za-z0-9._-]*-\d+-[0-9a-f]{8}", names.make_name())


def test_the_threshold_of_clipping_is_checked_whenever_it_is_set():
    optimizer = superoffload.torch.AdamW(build().parameters(), max_grad_norm=1.0)
    for wrong in (0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="None means no clipping"):
            optimizer.max_grad_norm = wrong
    assert optimizer.max_grad_norm == 1.0
    optimizer.max_grad_norm = None


def test_gradients_of_another_dtype_than_at_first():
    model = build().to(torch.bfloat16)
    optimizer = superoffload.torch.AdamW(model.parameters())
    model.weight.grad_dtype = torch.float32

    def step():
        model(torch.ones(2, 8, dtype=torch.bfloat16)).square().mean().backward()
        optimizer.step()

    refused(step, grpc.StatusCode.FAILED_PRECONDITION, "is torch.float32", "set grad_dtype before")
    assert optimizer.committed_steps == 0


def test_a_lazy_module_before_its_first_call():
    model = torch.nn.LazyLinear(8)
    build_optimizer = functools.partial(superoffload.torch.AdamW, list(model.parameters()))
    refused(build_optimizer, grpc.StatusCode.INVALID_ARGUMENT, "call the model once")
    model(torch.ones(2, 8))
    train(model, build_optimizer())


def test_the_first_skipped_step_is_told():
    model = build()
    optimizer = superoffload.torch.AdamW(model.parameters())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model.weight.grad = torch.full_like(model.weight, float("nan"))
            optimizer.step()
    assert [str(w.message).partition(":")[0] for w in caught] == ["a step was skipped"]
    assert caught[0].filename == __file__


def test_a_grad_scaler_skips_without_a_warning():
    model = build()
    optimizer = superoffload.torch.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaler.scale(model(torch.full((2, 8), 1e3)).square().mean()).backward()
        scaler.step(optimizer)
    assert sum(optimizer.skipped_steps.values()) == 1


def test_only_a_grad_scaler_hears_that_step_unscales():
    """Lightning would refuse to clip."""
    optimizer = superoffload.torch.AdamW(build().parameters())
    assert not optimizer._step_supports_amp_scaling


@pytest.mark.parametrize("group", [0, 1])
def test_a_groups_list_that_has_grown(group):
    model, other = build(), build()
    optimizer = superoffload.torch.AdamW([{"params": [model.weight]}, {"params": [model.bias]}])
    optimizer.param_groups[group]["params"].append(other.weight)
    model(other(torch.ones(2, 8))).square().mean().backward()
    refused(
        optimizer.step, grpc.StatusCode.FAILED_PRECONDITION, "put into the list of a parameter group", "add_param_group"
    )


def test_one_clip_over_two_optimizers_names_the_remedy_first():
    models = build(), build()
    for model in models:
        model.optimizer = superoffload.torch.AdamW(model.parameters())
    sum(model(torch.ones(2, 8)).square().mean() for model in models).backward()
    clip = functools.partial(torch.nn.utils.clip_grad_norm_, [p for model in models for p in model.parameters()], 1.0)
    with pytest.raises(superoffload.Error, match="build it with overlap=False to clip so. Else"):
        clip()


def test_an_optimizer_that_only_a_cycle_has_is_no_owner():
    model = build()

    class Holder:
        def __init__(self):
            self.optimizer = superoffload.torch.AdamW(model.parameters())
            self.itself = self

    Holder()
    optimizer = superoffload.torch.AdamW(model.parameters())
    with pytest.raises(superoffload.Error, match=r"close\(\) that one first \(Lightning has it"):
        superoffload.torch.AdamW(model.parameters())
    train(model, optimizer)


@pytest.mark.parametrize("name", ["AdamW", "Adam", "Lion"])
def test_text_is_no_learning_rate(name):
    with pytest.raises(TypeError, match="lr is '1e-3', which is text and no number"):
        getattr(superoffload.torch, name)(build().parameters(), lr="1e-3")


def test_a_fresh_state_of_torch_after_steps_says_how_to_begin_anew():
    model = build()
    optimizer = superoffload.torch.AdamW(model.parameters())
    train(model, optimizer)
    load = functools.partial(optimizer.load_state_dict, torch.optim.AdamW(model.parameters()).state_dict())
    refused(load, grpc.StatusCode.INVALID_ARGUMENT, "To begin anew, optimizer.state.clear()")
