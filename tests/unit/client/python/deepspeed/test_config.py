"""What a DeepSpeed configuration says, and what of it is refused."""

import json

import pytest
import torch

from superoffload.deepspeed import config

# The published examples of DeepSpeed-SuperOffload: GPUs, and elements of a bucket.
PUBLISHED = {
    "gpt-oss-20b": (1, 8e8),
    "qwen3-14b": (1, 4e8),
    "phi-4": (1, 4e8),
    "llama-8b": (1, 4e8),
    "seed-oss-36b": (2, 4e8),
    "qwen3-30b-a3b": (2, 4e8),
    "llama-70b": (4, 4e8),
}
RATIOS = {"llama-8b": 0.80}


def published(name, mode):
    """As its script writes it."""
    offload = {"device": "cpu", "pin_memory": True}
    if mode == "superoffload":
        offload |= {"ratio": RATIOS.get(name, 0.90), "super_offload": True, "cpuadam_cores_perc": 0.90}
    size = PUBLISHED[name][1]
    sizes = {"overlap_comm": False, "reduce_bucket_size": size, "sub_group_size": size}
    return {
        "train_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, **sizes, "offload_optimizer": offload},
        "wall_clock_breakdown": True,
    }


def read(ranks=1, **fields):
    return config.read({"train_batch_size": 4, **fields}, ranks)


def refused(match, ranks=1, **fields):
    with pytest.raises(ValueError, match=match):
        read(ranks, **fields)


@pytest.mark.parametrize("mode", ["superoffload", "zerooffload"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_configurations_are_read_as_they_are(name, mode, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(published(name, mode)))
    ranks = PUBLISHED[name][0]
    found = config.read(str(path), ranks)
    assert found.batches == config.Batches(total=4, micro=4 // ranks, passes=1)
    assert (found.dtype, found.stage, found.times_steps) == (torch.bfloat16, 3, True)
    superoffload = mode == "superoffload"
    assert found.offloaded_share == (RATIOS.get(name, 0.90) if superoffload else None)
    assert found.cores_share == (0.90 if superoffload else None)
    assert not found.streams_parameters
    assert (found.clipping, found.clipping_is_said) == (1.0, False)
    zero = "zero_optimization."
    assert set(found.ignored) == {f"{zero}overlap_comm", f"{zero}reduce_bucket_size", f"{zero}sub_group_size"}


TOTAL, MICRO, PASSES = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({TOTAL: 24, MICRO: 3, PASSES: 2}, (24, 3, 2)),
        ({TOTAL: 24, MICRO: 3}, (24, 3, 2)),
        ({TOTAL: 24, PASSES: 2}, (24, 3, 2)),
        ({MICRO: 3, PASSES: 2}, (24, 3, 2)),
        ({TOTAL: 24}, (24, 6, 1)),
        ({MICRO: 3}, (12, 3, 1)),
    ],
)
def test_batch_sizes_follow_from_each_other(given, found):
    assert config.read(given, 4).batches == config.Batches(*found)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({TOTAL: 24, MICRO: 5, PASSES: 2}, "24 but must be .* 5 \\* 2 \\* 4"),
        ({TOTAL: 22}, "22 but must be"),
        ({TOTAL: 4, MICRO: 3}, "none of them 0"),
        ({TOTAL: 0}, "none of them 0"),
        ({TOTAL: 8, MICRO: 0}, "none of them 0"),
        ({TOTAL: 8, PASSES: 0}, "none of them 0"),
        ({PASSES: 4}, "train_batch_size or train_micro_batch_size_per_gpu must be"),
        ({TOTAL: "auto"}, 'train_batch_size is "auto", for which the Hugging Face Trainer has a value'),
        ({TOTAL: 2.5}, "train_batch_size is 2.5 but must be a whole number"),
        ({TOTAL: True}, "train_batch_size is True but must be a whole number"),
    ],
)
def test_batch_sizes_that_do_not_fit_are_refused(given, match):
    with pytest.raises(ValueError, match=match):
        config.read(given, 4)


def test_ranks_that_share_a_sequence_have_one_batch():
    assert config.read({TOTAL: 8, "sequence_parallel_size": 2}, 4).batches == config.Batches(8, 4, 1)
    refused("sequence_parallel_size is 3 but must divide the number of ranks, 4", 4, sequence_parallel_size=3)


def test_halves():
    assert read().dtype is None
    assert read(bfloat16={"enabled": True}).dtype is torch.bfloat16  # its older name
    assert read(fp16={"enabled": False, "initial_scale_power": 8}).loss_scale is None
    found = read(fp16={"enabled": True, "initial_scale_power": 8, "hysteresis": 1, "auto_cast": True})
    assert (found.dtype, found.casts_inputs) == (torch.float16, True)
    assert found.loss_scale == config.LossScaleFields(0.0, 256.0, 1000, 1, False, 1.0)
    refused("both true", bf16={"enabled": True}, fp16={"enabled": True})
    refused("fp16.loss_scale is -1.0", fp16={"enabled": True, "loss_scale": -1})
    refused("loss_scale_window", fp16={"enabled": True, "loss_scale_window": 0})
    refused("fp16.enabled is 1 but must be true or false", fp16={"enabled": 1})
    refused("masters are kept in fp32 or bf16", fp16={"enabled": True, "fp16_master_weights_and_grads": True})


def test_state_in_bf16():
    masters, moments = "bf16_master_weights_and_grads", "bf16_optimizer_states"
    assert read(bf16={"enabled": True}).state_dtypes == {}
    assert read(bf16={"enabled": True, masters: True}).state_dtypes == {"master_dtype": torch.bfloat16}
    both = {"master_dtype": torch.bfloat16, "state_dtype": torch.bfloat16}
    assert read(bf16={"enabled": True, masters: True, moments: True}).state_dtypes == both
    refused("bf16_optimizer_states needs bf16.bf16_master_weights_and_grads", bf16={"enabled": True, moments: True})
    refused("bf16_master_weights_and_grads needs bf16.enabled", bf16={masters: True})


def test_autocast():
    assert read(torch_autocast={"enabled": True, "dtype": "bfloat16"}).autocast is torch.bfloat16
    assert read(torch_autocast={"enabled": False, "dtype": "fp16"}).autocast is None
    refused("must be bfloat16 here", torch_autocast={"enabled": True, "dtype": "fp16"})
    refused("leave one", torch_autocast={"enabled": True}, bf16={"enabled": True})


def test_clipping():
    assert (read().clipping, read(gradient_clipping=0.0).clipping) == (1.0, 0.0)
    assert read(gradient_clipping=0.5).clipping_is_said
    refused("gradient_clipping is -1.0", gradient_clipping=-1)


def test_zero():
    assert read(zero_optimization=True).stage == 1  # DeepSpeed's first format
    stage3 = {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": True}}
    assert read(zero_optimization=stage3).streams_parameters
    assert not read(zero_optimization={"stage": 3, "offload_param": {"device": "none"}}).streams_parameters
    refused("offload_param needs stage 3", zero_optimization=stage3 | {"stage": 2})
    refused("stage is 4 but must be", zero_optimization={"stage": 4})
    refused("device is 'nvme', but the daemon", zero_optimization={"stage": 3, "offload_optimizer": {"device": "nvme"}})
    refused("ratio is 1.5 but", zero_optimization={"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 1.5}})
    refused("with stage 3 only", zero_optimization={"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}})
    refused("zero_quantized_weights is True", zero_optimization={"stage": 3, "zero_quantized_weights": True})
    refused("zenflow has no counterpart", zero_optimization={"stage": 2, "zenflow": {"topk_ratio": 0.1}})
    refused("zero_optimization.stge is no field", zero_optimization={"stge": 3})
    not_pinned = {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": False}}
    (remark,) = read(zero_optimization=not_pinned).ignored
    assert remark.startswith("zero_optimization.offload_optimizer.pin_memory (")


def test_what_only_tunes_is_listed_and_what_would_change_results_is_refused():
    found = read(tensorboard={"enabled": True}, prescale_gradients=True, aio={"block_size": 1}, flops_profiler=None)
    assert set(found.ignored) == {"tensorboard", "prescale_gradients", "aio"}
    assert read(curriculum_learning={"enabled": False}, amp={"enabled": False}, sparse_gradients=False).ignored == ()
    refused("curriculum_learning has no counterpart", curriculum_learning={"enabled": True})
    refused("compression_training has no counterpart", compression_training={"weight_quantization": {}})
    refused("autotp_size is 2", tensor_parallel={"autotp_size": 2})
    refused("train_batchsize is no field that is known here", train_batchsize=4)
    refused("use_node_local_storage is True", checkpoint={"use_node_local_storage": True})
    refused("which DeepSpeed refuses with ZeRO stage 3", zero_optimization={"stage": 3}, gradient_allreduce_op="sum")


def test_data_types():
    halves = {"bf16": {"enabled": True}, "gradient_accumulation_steps": 2}
    assert read(**halves, data_types={"grad_accum_dtype": "bf16"}).dtype is torch.bfloat16
    assert read(bf16={"enabled": True}, data_types={"grad_accum_dtype": "fp32"}).batches.passes == 1
    assert read(data_types={"buffer_dtype": "bf16"}).buffer_dtype is torch.bfloat16
    assert read(communication_data_type="fp32").reduce_dtype is torch.float32
    in_fp32 = {"data_types": {"grad_accum_dtype": "fp32"}}
    assert read(**halves, **in_fp32).sums_dtype is torch.float32
    assert read(ranks=2, gradient_accumulation_steps=2, **in_fp32).sums_dtype is torch.float32  # as parameters are
    refused("FSDP2, which divides parameters among ranks", ranks=2, **halves, **in_fp32)
    refused("must be fp32 or the dtype of parameters", **halves, data_types={"grad_accum_dtype": "fp16"})
    refused("param_dtype is not that of", **halves, data_types={"param_dtype": "fp16"})
    refused("keep_in_fp32_modules", data_types={"keep_in_fp32_modules": ["gate"]})
    refused("'int8' but must be one of", communication_data_type="int8")


def test_sections_of_optimizer_and_scheduler():
    found = read(optimizer={"type": "Adam", "params": {"lr": 1}}, scheduler={"type": "WarmupLR"})
    assert found.optimizer == config.Named("Adam", {"lr": 1})
    assert found.scheduler == config.Named("WarmupLR", {})
    refused('optimizer.params.lr is "auto"', optimizer={"type": "AdamW", "params": {"lr": "auto"}})
    refused("optimizer.param is no field", optimizer={"type": "AdamW", "param": {"lr": 1}})


def test_what_is_no_configuration(tmp_path):
    for text, match in [
        ('{"a": 1, "a": 2}', "a is there twice"),
        ("{// comment\n}", "is no JSON"),
        ("[]", "must be an object"),
    ]:
        path = tmp_path / "config.json"
        path.write_text(text)
        with pytest.raises(ValueError, match=match):
            config.read(path, 1)
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        config.read(tmp_path / "none.json", 1)
    with pytest.raises(ValueError, match="must be a dict, or the path"):
        config.read(None, 1)
