"""Sequence parallelism: two ranks that share each sequence compute what two do that have sequences of their own."""

import importlib.util

import pytest
import torch
import torch.testing._internal.distributed.fake_pg
from tests.conftest import Daemon
from tests.support.rank_processes import Run, equal

from superoffload.torch.ulysses import SequenceParallel

DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
REFUSED = {
    "heads": ({"ranks": 2, "heads": 3, "keys": 3}, "cannot be divided among 2 ranks"),
    "ranks": ({"ranks": 3}, "not divisible by 3"),
    "convolutions": (
        {"ranks": 2, "model": "lfm2", "layer_types": ["full_attention", "conv"]},
        "in Lfm2ForCausalLM, model.layers.1 (Lfm2DecoderLayer, conv) did not call the attention",
    ),
}
SINKS = {"model": "gpt_oss", "num_local_experts": 2, "num_experts_per_tok": 1}
NTK = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0], "rope_theta": 10000.0}
ROPES = {  # 16 tokens are more than a rank's part of a sequence, and fewer than the whole
    "dynamic rope": {"max_position_embeddings": 16, "rope_parameters": NTK, "length": 23},
    "long rope": {
        "model": "phi3",
        "heads": 6,
        "max_position_embeddings": 64,
        "original_max_position_embeddings": 16,
        "rope_parameters": LONG,
    },
}
TRAINED = {
    **ROPES,
    "grouped heads": {},
    "activations that are computed again": {"recompute": True},
    "Qwen3": {"model": "qwen3"},
    "Qwen3-MoE": {"model": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "Seed-OSS": {"model": "seed_oss", "attention_dropout": 0.0, "residual_dropout": 0.0},
    "Phi-4": {"model": "phi3", "heads": 6},
    "one key": {"keys": 1},
    "a window": {"model": "mistral", "sliding_window": 5},
    "a length that does not divide": {"length": 23},
    "sinks": {**SINKS, "keys": 1, "sliding_window": 128},
    "sinks and windows": {**SINKS, "sliding_window": 5},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    daemons = [Daemon("--metrics_address=off") for _ in range(2)]
    scenarios = {name: options for name, (options, _) in REFUSED.items()}
    for name, options in TRAINED.items():
        scenarios |= {f"{name} {ranks}": {**options, "ranks": ranks} for ranks in (1, 2)}
    if DEEPSPEED:  # it serves one model of a process
        scenarios["deepspeed 2"] = {"attention": "deepspeed", "ranks": 2}
    scenarios["refused arguments"] = {"kind": "refused"}
    scenarios |= {f"packed {ranks}": {"kind": "packed", "ranks": ranks} for ranks in (1, 2)}
    run = Run(daemons, tmp_path_factory.mktemp("runs") / "run", *scenarios.values(), trainer="ulysses_trainer")
    results = run.results()
    for daemon in daemons:
        assert daemon.stop() == 0, daemon.log
    return {name: [of_rank[i] for of_rank in results] for i, name in enumerate(scenarios)}


def assert_like_whole_sequences(first, second, alone):
    equal(first, second)
    assert first["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    for step, (gradient, expected) in enumerate(zip(first["gradients"], alone["gradients"], strict=True)):
        tolerance = 1e-6 if step == 0 else 1e-4  # Adam makes more of what rounding did to gradients near zero
        for parameter, values in gradient.items():
            torch.testing.assert_close(values, expected[parameter], atol=tolerance, rtol=1e-3, msg=parameter)


@pytest.mark.parametrize("name", [*TRAINED, "packed"])
def test_losses_gradients_and_weights_are_those_of_whole_sequences(trained, name):
    assert_like_whole_sequences(*trained[f"{name} 2"], trained[f"{name} 1"][0])


@pytest.mark.skipif(not DEEPSPEED, reason="DeepSpeed is not installed")
def test_deepspeed_s_attention_computes_the_same_and_what_it_would_get_wrong_is_refused(trained):
    assert_like_whole_sequences(*trained["deepspeed 2"], trained["grouped heads 1"][0])
    for result in trained["deepspeed 2"]:
        packed, rows = result["refusals"]
        assert "DeepSpeed drops the masks of packed rows" in packed
        assert "a batch has 4 rows, but rows=2 was given" in rows


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_divided_is_refused_by_name(trained, name):
    for result in trained[name]:
        assert REFUSED[name][1] in result["error"]


@pytest.mark.parametrize("name", ROPES)
def test_rope_that_depends_on_the_length_has_the_bits_of_whole_sequences(trained, name):
    alone = trained[f"{name} 1"][0]["ropes"]
    of_ranks = [result["ropes"] for result in trained[f"{name} 2"]]
    for step, whole in enumerate(alone):
        parts = torch.cat([ropes[step] for ropes in of_ranks], dim=2)
        assert torch.equal(parts[:, :1, : whole.shape[2]], whole[:, :1]), step


@pytest.mark.parametrize(
    ("name", "said"),
    {
        "mask": "an attention_mask, cu_seq_lens_q",
        "positional mask": "an attention_mask, cu_seq_lens_q",
        "documents": "an attention_mask, cu_seq_lens_q",
        "no positions": "position_ids are missing",
        "axes of positions": "position_ids have 3 axes but must be [batch, sequence / ranks]",
        "more than a causal mask": "the model adds to its causal mask",
        "less than a causal mask": "the model adds to its causal mask",
        "blocks in a causal mask": "the model adds to its causal mask",
        "blocks in packed rows": "the model adds to its causal mask",
        "mask of a layer": "LlamaAttention makes a mask of its own",
        "bias": "attention with position_bias is not supported",
        "both sides of padding": "sees padding; give batches a length that 2 ranks divide",
        "window to both sides": "attention with a window to both sides is not supported",
        "batch's mask": "a batch has an attention_mask with padding",
        "jump": "neither go on by 1 nor begin again at 0",
        "batch's documents": "a batch has cu_seq_lens_q",
        "batch's embeddings": "a batch has inputs_embeds",
        "implementation": "model.layers.0 (LlamaDecoderLayer) did not call the attention of SequenceParallel",
    }.items(),
)
def test_all_ranks_refuse_what_would_be_ignored_on_one(trained, name, said):
    for result in trained["refused arguments"]:
        assert said in result[name]
        allowed = ("whole", "causal mask", "causal mask of packed rows", "both sides")
        assert [result[name] for name in allowed] == [None] * 4


def others_positions(everybody: list[torch.Tensor], own: torch.Tensor, group: object = None) -> None:
    """What the ranks of one long sequence send to the first of them."""
    for rank, theirs in enumerate(everybody):
        theirs.copy_(own + rank * own.shape[1])


def saved_bytes(ranks: int, length: int) -> int:
    """What backward needs, on the first of so many ranks of a sequence of so many tokens; nobody else is there."""
    from tests.support import ulysses_trainer  # imports transformers

    store = torch.testing._internal.distributed.fake_pg.FakeStore()
    torch.distributed.init_process_group("fake", store=store, rank=0, world_size=ranks)
    try:
        model = ulysses_trainer.build("llama", 16, 16)
        parallel = SequenceParallel(model, ranks)
        batch = parallel.part(ulysses_trainer.batches("whole", 1, length)[0])
        weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        saved = {}

        def keep(tensor):
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = parallel.loss(model(**batch.inputs).logits, batch.targets)
        assert loss.requires_grad
        return sum(storage.nbytes() for address, storage in saved.items() if address not in weights)
    finally:
        torch.distributed.destroy_process_group()


def test_a_sequence_on_sixteen_ranks_is_sixteen_times_as_long_in_the_memory_of_one(monkeypatch):
    monkeypatch.setattr(torch.distributed, "all_gather", others_positions)
    limit = saved_bytes(1, 128)
    assert saved_bytes(16, 16 * 128) <= 1.05 * limit
    assert saved_bytes(1, 16 * 128) > 15 * limit
