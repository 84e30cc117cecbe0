"""The GPU memory that a plan says is what the driver has given."""

import pytest
import torch
import transformers
from tests.support.fake_torch_gpu import driver_count, fake_gpu, gpu_daemon  # noqa: F401

import superoffload.torch
from superoffload import plan
from superoffload.torch import GpuOptions
from superoffload.v1 import plan_pb2

OURS = ("parameters", "device slots", "stream slots", "resident buckets")
PIECE = 8 << 20  # of what is mapped
SLOTS = 3


@pytest.fixture
def model():
    """Of blocks as large as a plan streams."""
    config = transformers.LlamaConfig(
        vocab_size=1024,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).bfloat16()


def planned(model, share, residents):
    request = plan_pb2.PlanRequest(
        machine_name="gh200-96-480",
        batch=1,
        sequence=16,
        quick=True,
        model=plan.describe(model, model.config),
        streamed_weights=share,
        stream_slots=SLOTS,
        resident_buckets=residents,
        gradient_slots=2,
        device_slots=8,
    )
    return sum(item.bytes for item in plan.ask(request).memory[0].gpu.items if item.purpose in OURS)


@pytest.mark.parametrize(("share", "residents"), [(0, 0), (0, 2), (0.5, 0), (1, 0)])
def test_the_driver_has_given_what_was_planned(gpu_daemon, model, share, residents):  # noqa: F811
    before = driver_count("fakeCudaUsedBytes")
    optimizer = superoffload.torch.AdamW(
        model.named_parameters(),
        endpoint=gpu_daemon.endpoint,
        weights=share if share else "resident",
        gpu=GpuOptions(stream_slots=SLOTS, resident_buckets=residents, gradient_slots=2, device_slots=8, cast="fused"),
    )
    tokens = torch.arange(16).view(1, -1)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    taken = driver_count("fakeCudaUsedBytes") - before
    optimizer.close()
    assert abs(taken - planned(model, share, residents)) <= PIECE, (taken, planned(model, share, residents))
