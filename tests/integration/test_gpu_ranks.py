"""Several ranks with parameters on GPUs, which are fake ones: every bit is that of trainers on the host."""

import re

import pytest
import torch
from tests.conftest import Daemon
from tests.support.fake_torch_gpu import DRIVER, fake_gpu  # noqa: F401
from tests.support.rank_processes import Run, equal
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

import superoffload.torch
from superoffload.torch import GpuOptions
from superoffload.torch.ranks import fsdp, host_mesh

FP32 = {"dtype": "float32", "clip": "call"}


@pytest.fixture(scope="module")
def daemons():
    """Of two Superchips, each with its GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LD_LIBRARY_PATH", str(DRIVER.parent))
        started = [Daemon("--keeper", "--metrics_address=off") for _ in range(2)]
    yield started
    for each in started:
        each.stop()


@pytest.fixture(scope="module")
def trained(daemons, tmp_path_factory):
    """Of each scenario, what both ranks had at the end."""
    trainer, daemon, direct = ({"gpu": {"mover": mover}} for mover in ("trainer", "daemon", "direct"))
    in_place = {"gpu": {"mover": "trainer", "gradient_slots": "in_place"}}
    streams = {"gpu": {"mover": "trainer", "stream_slots": 2}, "weights": "streamed"}
    mixed = {"dtype": "float32", "casts": ["bfloat16", "float32"]}
    policies = {**mixed, "accumulate": 2, "blocks": "compiled, recomputed"}
    added = {"accumulate": 2, "syncs": True, "edits": True, "dtype": "float32"}
    summed = {"accumulate": 2, "grad_dtype": "float32", "layout": "whole", "same": True, "replicas": True}
    placed = {"gpu": {"mover": "trainer", "device": "cuda"}}
    divided = {"layout": "ddp", "replicas": True}
    killed = {"bucket_bytes": 4096, "die_at": [1, 3, "daemon"], "keepers": [each.process.pid for each in daemons]}
    run = {**trainer, "name": "run", "sync": "pull_params"}
    Run(daemons, tmp_path_factory.mktemp("runs") / "killed", {**run, "die_at": [1, 4, "gathered"]}).kill_rest(1)
    scenarios = {
        "host": {},
        "again": run,
        "fsdp2": {**trainer},
        "fsdp2, copied by the daemon": {**daemon, "speculation": "always"},
        "fsdp2, without overlap": {**direct, "reshard": False, "overlap": False},
        "fsdp2, residents": {"gpu": {"mover": "trainer", "resident_buckets": 2}, "bucket_bytes": 4096},
        "fsdp2, in place": {**in_place, "nan_at": 2, "clip": "call"},
        "fsdp2, NaN on one rank": {**trainer, "nan_at": 2, "clip": "call"},
        "policies, host": {**policies, "overlap": True},
        "policies": {**daemon, **policies, "overlap": True},
        "fsdp2, released": {**trainer, "releases": True},
        "fsdp2, filled by torch": {**trainer, "meta": "torch", "reloads_at": 3},
        "from meta, first half": {**placed, "meta": "weights", "name": "halves", "steps": 3},
        "from meta": {**placed, "meta": "frozen", "name": "halves", "sync": "pull_params"},
        "tensors, host": {"layout": "tensors", "same": True, **FP32},
        "tensors": {**placed, "meta": "weights", "layout": "tensors", "same": True, **FP32},
        "added, host": {**added},
        "added": {**trainer, **added},
        "fp32 gradients, host": {**summed},
        "fp32 gradients": {**placed, **summed, "meta": "weights"},
        "alone, host": {"layout": "whole", "same": True},
        "alone, hsdp": {**trainer, "layout": "hsdp", "alone": True},
        "alone, hsdp from meta": {**placed, "meta": "weights", "layout": "hsdp", "alone": True},
        "alone, ignored": {**daemon, "layout": "ignored", "alone": True},
        "alone, ddp": {**trainer, **divided, "alone": True},
        "unreduced": {**trainer, "layout": "ignored", "reduces": False},
        "different": {**trainer, "layout": "whole", "replicas": True, "spread": 0.1},
        "written": {**trainer, **divided, "writes": True},
        "alone, ddp, released": {**trainer, **divided, "alone": True, "releases": True},
        "alone, ddp, early": {**placed, "meta": "weights", **divided, "alone": True, "hooked": True},
        "edited, host": {**divided, "edits": True},
        "edited, early, daemon killed": {**daemon, **divided, "edits": True, "hooked": True, **killed, "name": "early"},
        "daemon killed": {**in_place, **killed, "name": "kept", "die_at": [1, 5, "daemon"]},
        "valueless": {**placed, "meta": "none"},
        "loaded, host": {"halves_at": 3},
        "streams": {**streams},
        "streams through one slot": {"gpu": {"mover": "direct", "stream_slots": 1}, "weights": "streamed"},
        "streams, copied by the daemon": {**daemon, "weights": 0.5},
        "streams, gathered once": {**streams, "reshard": False, "overlap": False},
        "streams, from meta": {**placed, "weights": "auto", "meta": "weights", "reloads_at": 3},
        "streams, policies": {**streams, **policies, "overlap": True},
        "streams, added": {**streams, **added},
        "streams, daemon killed": {**streams, **killed, "name": "streams"},
        "streams, released": {**streams, "releases": True},
        "streams, loaded": {**streams, "halves_at": 3},
        "streams, looked at": {**streams, "looks": True},
        "streams, not gathered": {**streams, "layout": "tensors", "same": True, **FP32},
        "streams, gathered at once": {**streams, "layout": "ignored"},
    }
    of_ranks = Run(daemons, tmp_path_factory.mktemp("runs") / "run", *scenarios.values()).results()
    return {name: [of_rank[index] for of_rank in of_ranks] for index, name in enumerate(scenarios)}


@pytest.mark.parametrize(
    ("host", "scenarios"),
    [
        ("host", ["fsdp2", "fsdp2, copied by the daemon", "fsdp2, without overlap", "fsdp2, residents"]),
        ("host", ["fsdp2, filled by torch", "from meta", "fsdp2, released"]),
        ("host", ["again", "fsdp2, in place", "fsdp2, NaN on one rank", "daemon killed"]),
        ("host", ["streams", "streams through one slot", "streams, copied by the daemon", "streams, gathered once"]),
        ("host", ["streams, from meta", "streams, daemon killed", "streams, released"]),
        ("loaded, host", ["streams, loaded"]),
        ("policies, host", ["policies", "streams, policies"]),
        ("tensors, host", ["tensors"]),
        ("alone, host", ["alone, hsdp", "alone, hsdp from meta", "alone, ignored"]),
        ("alone, host", ["alone, ddp", "alone, ddp, early", "alone, ddp, released"]),
        ("added, host", ["added", "streams, added"]),
        ("fp32 gradients, host", ["fp32 gradients"]),
        ("edited, host", ["edited, early, daemon killed"]),
    ],
)
def test_bits_are_those_of_the_host(trained, host, scenarios):
    for name in scenarios:
        for ours, theirs in zip(trained[name], trained[host], strict=True):
            assert "error" not in ours, f"{name}: {ours}"
            assert ours["gpu"] == "fake GPU"
            equal(ours, theirs)


def test_gradients_that_are_reduced_and_added_leave_until_the_loop_edits_them(trained):
    """FSDP adds to views of one tensor, which share a version."""
    assert [result["early"] for result in trained["added"]] == [2, 2]


def test_averaged_buckets_leave_during_backward_until_the_loop_edits_them(trained):
    for name, early in (("alone, ddp, early", 3), ("edited, early, daemon killed", 2), ("alone, ddp", 0)):
        assert [result["early"] for result in trained[name]] == [early, early], name


def test_ranks_reach_one_verdict(trained):
    first, second = trained["fsdp2, NaN on one rank"]
    assert first["skips"] == second["skips"] == 1
    assert first["norms"] == pytest.approx(second["norms"], nan_ok=True)
    for here, there in zip(*(trained[name] for name in ("tensors", "tensors, host")), strict=True):
        assert here["norms"] == there["norms"]


def test_gradients_of_shards_leave_during_backward(trained):
    for name in ("fsdp2", "policies", "alone, hsdp"):
        assert all(result["early"] > 0 for result in trained[name]), name


@pytest.mark.parametrize(
    ("scenario", "words"),
    [
        ("unreduced", "nobody has averaged them over the ranks"),
        ("different", "its values there differ; broadcast it"),
        ("written", "changed by somebody else than the optimizer"),
        ("valueless", "is on meta and has no value"),
        ("streams, looked at", "is used outside of its block's forward"),
        ("streams, not gathered", "call fully_shard() for each block"),
        ("streams, gathered at once", "call fully_shard() for each block"),
    ],
)
def test_what_cannot_be_is_refused_on_all_ranks(trained, scenario, words):
    for result in trained[scenario]:
        assert words in result["error"]


def test_a_rank_that_is_killed_goes_on_at_its_step(trained):
    first, second = trained["again"]
    assert first["begun"] == second["begun"] in (4, 5)


@pytest.fixture
def alone(tmp_path):
    """This process is a process group."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def sharded(daemons, fake_gpu, alone):  # noqa: F811
    """A model and its optimizer, with several buckets of each layer."""
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    options = {"endpoint": daemons[0].endpoint, "bucket_bytes": 4096, "gpu": GpuOptions(mover="trainer")}
    optimizer = superoffload.torch.AdamW(model.named_parameters(), **options)
    yield model, optimizer
    optimizer.close()


def test_weights_are_whole_or_distributed_as_parameters_are(daemons, fake_gpu, alone):  # noqa: F811
    with torch.device("meta"):
        model = torch.nn.Linear(64, 64)
    fully_shard(model)
    weights = {name: torch.randn(parameter.shape) for name, parameter in model.named_parameters()}

    def build(placement):
        bias = distribute_tensor(weights["bias"], model.weight.device_mesh, [placement])
        gpu = GpuOptions(mover="trainer", device="cuda", weights={**weights, "bias": bias})
        return superoffload.torch.AdamW(model.named_parameters(), endpoint=daemons[0].endpoint, gpu=gpu)

    with pytest.raises(superoffload.Error, match="distributed otherwise"):
        build(Replicate())
    optimizer = build(Shard(0))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.full_tensor(), weights[name])
    optimizer.close()


def test_state_that_torch_saves_stays_in_the_memory_of_the_cpu(alone):
    mesh = init_device_mesh("cuda", (1, 1), mesh_dim_names=("replicate", "shard"))
    value = torch.ones(4, 2)
    spec = DTensorSpec(mesh, (Replicate(), Shard(0)), TensorMeta(value.shape, value.stride(), value.dtype))
    parameter = DTensor(torch.zeros(4, 2), spec, requires_grad=False)
    state = host_mesh.like_on_host(parameter, value)
    assert (state.device.type, state.device_mesh.device_type) == ("cpu", "cpu")
    assert state.placements == parameter.placements and torch.equal(state.full_tensor(), value)
    assert host_mesh.like_on_host(parameter, value).device_mesh is state.device_mesh


def test_an_all_gather_waits_for_the_parameters_of_its_own_unit(sharded, monkeypatch):
    model, optimizer = sharded
    waits = []

    def await_parameters(bucket, stream, call=optimizer._hosting.attachment.await_parameters):
        waits.append(bucket)
        call(bucket, stream)

    monkeypatch.setattr(optimizer._hosting.attachment, "await_parameters", await_parameters)
    for _ in range(2):
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        waits.clear()
        seen = set()  # a bucket may end in the next layer
        for layer in model:
            layer.unshard()  # before anything that our own hooks see
            layer.reshard()
            parameters = {id(parameter) for parameter in layer.parameters()}
            own = {bucket for p in optimizer._hosting.hosted if id(p.tensor) in parameters for bucket in p.buckets}
            assert own and set(waits) == own - seen
            seen |= own
            waits.clear()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    "name", ["FSDPParam", "FSDPParam._sharded_param_data", "FSDPParamGroup.unshard", "FSDPParamGroup.device_handle"]
)
def test_an_fsdp_without_a_name_that_is_needed_is_refused(daemons, fake_gpu, alone, monkeypatch, name):  # noqa: F811
    model = torch.nn.Linear(64, 64)
    fully_shard(model)
    group = model._get_fsdp_state()._fsdp_param_group
    fsdp._classes.cache_clear()
    places = {
        "FSDPParam": (_fsdp_param, "FSDPParam"),
        "FSDPParam._sharded_param_data": (group.fsdp_params[0], "_sharded_param_data"),
        "FSDPParamGroup.unshard": (_fsdp_param_group.FSDPParamGroup, "unshard"),
        "FSDPParamGroup.device_handle": (group, "device_handle"),
    }
    monkeypatch.delattr(*places[name])
    with pytest.raises(superoffload.Error, match=f"torch {re.escape(torch.__version__)} is not as it was") as refused:
        superoffload.torch.AdamW(model.named_parameters(), endpoint=daemons[0].endpoint)
    assert name.split(".")[-1] in str(refused.value)


def test_what_is_written_to_one_element_of_a_dtensor_is_found(sharded):
    model, optimizer = sharded
    weight, change = model[0].weight, torch.zeros(64, 64)
    change[5, 7] = 1
    with torch.no_grad():
        weight += distribute_tensor(change, weight.device_mesh, weight.placements)
    model(torch.ones(1, 64)).sum().backward()
    with pytest.raises(superoffload.Error, match="changed by somebody else"):
        optimizer.step()


def test_a_shard_that_is_given_other_memory_is_refused(sharded):
    model, optimizer = sharded
    for parameter in model.parameters():
        parameter._local_tensor.data = parameter._local_tensor.clone()
    model(torch.ones(1, 64)).sum().backward()
    with pytest.raises(superoffload.Error, match="changed by somebody else"):
        optimizer.step()
    for call in (optimizer.push_params, optimizer.pull_params):
        with pytest.raises(superoffload.Error, match="lies elsewhere"):
            call()
