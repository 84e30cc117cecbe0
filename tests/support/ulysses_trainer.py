"""One rank of sequence-parallel training on gloo: tests.support.ulysses_trainer STORE RANK RANKS OUT SCENARIO..."""

import torch
import torch.distributed
import transformers
from tests.support import process_group

import superoffload.torch
from superoffload.torch import ulysses

MODELS = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "lfm2": (transformers.Lfm2Config, transformers.Lfm2ForCausalLM),
    "phi3": (transformers.Phi3Config, transformers.Phi3ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
    "seed_oss": (transformers.SeedOssConfig, transformers.SeedOssForCausalLM),
    "gpt_oss": (transformers.GptOssConfig, transformers.GptOssForCausalLM),
}
SIZES = {"vocab_size": 61, "hidden_size": 48, "intermediate_size": 48, "num_hidden_layers": 2, "use_cache": False}
SIZES["pad_token_id"] = 0  # Phi-3's own is beyond the vocabulary


def build(kind: str, heads: int, keys: int, **options) -> torch.nn.Module:
    torch.manual_seed(0)
    config, model = MODELS[kind]
    shape = {"num_attention_heads": heads, "num_key_value_heads": keys, "head_dim": 8}
    return model(config(**SIZES, **shape, attn_implementation="eager", **options))


def batches(kind: str, rows: int, length: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    made = []
    for _ in range(3):
        batch = {"input_ids": torch.randint(61, (rows, length), generator=generator)}
        if kind == "packed":
            batch["position_ids"] = torch.cat([torch.arange(length // 3), torch.arange(length - length // 3)])[None]
        made.append(batch)
    return made


def train(
    *,
    ranks: int,
    model: str = "llama",
    heads: int = 4,
    keys: int = 2,
    kind: str = "whole",
    length: int = 24,
    recompute: bool = False,
    **options,
) -> dict:
    """Gradients, losses and, after three steps, weights; ``ranks``: of a sequence; with 1, transformers' attention."""
    world = torch.distributed.get_world_size()
    theirs = {"attention": options.pop("attention"), "rows": 2 * ranks // world} if "attention" in options else {}
    trained = build(model, heads, keys, **options)
    if theirs:
        import deepspeed.ops  # where it is installed

        deepspeed.ops.__compatible_ops__.clear()  # else it compiles one that nobody needs, for minutes
        trained.set_attn_implementation("sdpa")
    parallel = ulysses.SequenceParallel(trained, ranks, **theirs)
    if ranks == 1:
        trained.set_attn_implementation("eager")
    if recompute:
        trained.gradient_checkpointing_enable({"use_reentrant": False})
    called = torch.nn.parallel.DistributedDataParallel(trained)
    optimizer = superoffload.torch.AdamW(trained.parameters(), lr=1e-2, max_grad_norm=1.0, replicas=True)
    losses, gradients, ropes = [], [], []
    trained.model.rotary_emb.register_forward_hook(lambda *call: ropes.append(torch.stack(call[2])))
    mine = torch.distributed.get_rank() // ranks
    loader = [{name: tensor[mine :: world // ranks] for name, tensor in b.items()} for b in batches(kind, 2, length)]
    if kind == "packed":
        loader = [{**b, "position_ids": b["position_ids"][:1].expand(1, -1)} for b in batches(kind, 1, length)]
    for batch in parallel.batches(loader):
        loss = parallel.loss(called(**batch.inputs).logits, batch.targets)
        loss.backward()
        mean = loss.detach().clone()
        torch.distributed.all_reduce(mean)
        losses.append(float(mean) / world)
        gradients.append({name: p.grad.clone() for name, p in trained.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: p.detach().clone() for name, p in trained.named_parameters()}
    optimizer.close()
    bad = [batches("packed", 1, 24)[0], batches("whole", 4, 24)[0]] if theirs else []
    refusals = [_refusal(parallel.part, batch) for batch in bad]
    return {"losses": losses, "gradients": gradients, "weights": weights, "refusals": refusals, "ropes": ropes}


def refuse() -> dict:
    """What two ranks of a sequence say to arguments that only one of them gets wrong, or both."""
    model = build("llama", 4, 2)
    parallel = ulysses.SequenceParallel(model, 2)
    batch = batches("whole", 1, 24)[0]
    inputs = parallel.part(batch).inputs
    rank = torch.distributed.get_rank()
    padded = torch.ones_like(inputs["input_ids"])
    padded[:, -1] = rank  # only the first rank's has padding
    said = {"whole": _refusal(lambda: model(**inputs, attention_mask=torch.ones_like(padded)))}
    said["mask"] = _refusal(lambda: model(**inputs, attention_mask=padded))
    said["positional mask"] = _refusal(lambda: model(inputs["input_ids"], padded, inputs["position_ids"]))
    documents = torch.tensor([0, 5, 12], dtype=torch.int32)
    said["documents"] = _refusal(lambda: model(**inputs, cu_seq_lens_q=documents, cu_seq_lens_k=documents))
    said["jump"] = _refusal(lambda: model(inputs["input_ids"], position_ids=inputs["position_ids"] + 3 * rank))
    said["no positions"] = _refusal(lambda: model(inputs["input_ids"]))
    axes = inputs["position_ids"].expand(3, 1, -1)
    said["axes of positions"] = _refusal(lambda: model(inputs["input_ids"], position_ids=axes))
    said["batch's mask"] = _refusal(parallel.part, {**batch, "attention_mask": torch.tensor([[1] * 20 + [0] * 4])})
    said["batch's documents"] = _refusal(parallel.part, {**batch, "cu_seq_lens_q": documents})
    said["batch's embeddings"] = _refusal(parallel.part, {**batch, "inputs_embeds": torch.zeros(1, 24, 48)})
    said |= _refused_layers(model, parallel)
    model.set_attn_implementation("eager")
    said["implementation"] = _refusal(lambda: model(**inputs))
    return said


def _refused_layers(model: torch.nn.Module, parallel: ulysses.SequenceParallel) -> dict:
    """What ranks say to layers that have more to tell of who sees whom than positions do."""
    from transformers.masking_utils import create_causal_mask

    inputs, padded = (parallel.part(batches("whole", 1, length)[0]).inputs for length in (24, 23))
    layer = model.model.layers[0].self_attn
    said = {}

    def mask(positions=inputs["position_ids"], **more) -> None:
        embeds = torch.zeros(*positions.shape, 48)
        create_causal_mask(model.config, embeds, None, None, position_ids=positions, **more)

    said["causal mask"] = _refusal(mask)
    said["more than a causal mask"] = _refusal(lambda: mask(or_mask_function=lambda *_: torch.tensor(True)))
    said["less than a causal mask"] = _refusal(lambda: mask(and_mask_function=lambda *_: torch.tensor(True)))
    blocks = torch.zeros_like(inputs["input_ids"])
    said["blocks in a causal mask"] = _refusal(lambda: mask(block_sequence_ids=blocks))
    packed = torch.arange(12)[None] % 6
    said["causal mask of packed rows"] = _refusal(lambda: mask(packed))
    said["blocks in packed rows"] = _refusal(lambda: mask(packed, block_sequence_ids=blocks))

    def run(arguments: dict, given: dict) -> str | None:
        hook = layer.register_forward_pre_hook(lambda _, args, kwargs: (args, kwargs | given), with_kwargs=True)
        refusal = _refusal(lambda: model(**arguments))
        hook.remove()
        return refusal

    said["mask of a layer"] = run(inputs, {"attention_mask": torch.zeros(1, 1, 12, 12)})
    said["bias"] = run(inputs, {"position_bias": torch.zeros(1, 4, 12, 12)})
    layer.is_causal = False
    said["both sides"] = run(inputs, {})
    said["both sides of padding"] = run(padded, {})
    said["window to both sides"] = run(inputs, {"sliding_window": 5})
    layer.is_causal = True
    return said


def _refusal(call, *arguments) -> str | None:
    try:
        call(*arguments)
    except superoffload.Error as error:
        return str(error)
    return None


def _try(_: int, scenario: dict) -> dict:
    try:
        return refuse() if scenario.get("kind") == "refused" else train(**scenario)
    except superoffload.Error as error:
        return {"error": str(error)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    process_group.run_scenarios(_try, seconds=120)
