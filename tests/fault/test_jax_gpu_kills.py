"""A daemon that dies while a JAX trainer on a GPU, a fake one, trains: a step is lost at most, and is told to be."""

import grpc
import jax
import pytest
from tests.conftest import Daemon
from tests.fault.test_keeper import OFF
from tests.fault.test_recovered_optimizer import kill_daemon
from tests.support import fake_jax_gpu, jax_model
from tests.support.jax_model import same_bits

import superoffload.jax
from superoffload import Error
from superoffload.jax import GpuOptions

STEPS = 6


@pytest.fixture(scope="module")
def kept():
    with pytest.MonkeyPatch.context() as patch:
        fake_jax_gpu.install(patch)
        started = Daemon("--keeper", OFF)
        yield started
    assert started.stop() == 0, started.log


@pytest.fixture
def build(kept):
    built = []

    def build(**options):
        options = {"endpoint": kept.endpoint, "max_norm": 0.3, "bucket_bytes": 4096} | options
        optimizer = superoffload.jax.adamw(1e-2, **options)
        built.append(optimizer)
        try:
            return optimizer, optimizer.init(jax_model.init_params())
        except Error as error:
            if error.code == grpc.StatusCode.UNIMPLEMENTED:
                pytest.skip(f"built without nvcc or jaxlib: {error}")
            raise

    yield build
    for optimizer in built:
        optimizer.close()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weights": "streamed"},
        {"gpu": GpuOptions(resident_buckets=3)},
        {"gpu": GpuOptions(gradient_slots="in_place")},
    ],
    ids=repr,
)
def test_a_step_that_the_daemons_death_cuts_off_is_computed_again_with_the_same_bits(build, kept, options):
    undisturbed, params = build()
    jax_model.train_plain(undisturbed, params, STEPS)
    optimizer, params = build(**options)
    backward = jax_model.offloaded_backward(optimizer)
    kills = {(1, "before backward"), (3, "after backward"), (4, "after the step")}
    lost = []

    def kill(*when):
        if when in kills:
            kills.remove(when)
            kill_daemon(kept)

    for step, batch in enumerate(jax_model.batches(STEPS)):
        while optimizer.committed_steps == step:
            kill(step, "before backward")
            _, rest = jax.block_until_ready(backward(params, batch))
            kill(step, "after backward")
            try:
                params, _ = optimizer.finish(rest)
            except Error as error:
                assert error.code == grpc.StatusCode.ABORTED
                assert "compute the gradients of this step again" in str(error)
                lost.append(step)
            kill(step, "after the step")
    assert not kills and set(lost) <= {1, 3, 5} and len(lost) <= 3
    assert same_bits(optimizer.state_tensors(), undisturbed.state_tensors())


@pytest.mark.parametrize("residents", [0, 3])
def test_a_step_inside_of_jit_fails_and_the_parameters_can_be_pulled(build, kept, residents):
    optimizer, params = build(gpu=GpuOptions(resident_buckets=residents))
    jax_model.lose_a_step_inside_of_jit(optimizer, params, lambda: kill_daemon(kept))
    assert optimizer._attachment.resident_buckets == residents
