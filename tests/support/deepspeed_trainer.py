"""One rank of an engine on gloo: tests.support.deepspeed_trainer STORE RANK RANKS OUT SCENARIO..."""

import contextlib
import pathlib
from typing import Any

import torch
import torch.distributed
import transformers
from tests.support import process_group

from superoffload import deepspeed

STEPS, ROWS, TOKENS = 4, 4, 16


def llama(**more: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(use_cache=False, attn_implementation="eager", **(sizes | heads | more))
    return transformers.LlamaForCausalLM(config)


def rows(step: int) -> torch.Tensor:
    """Of all ranks, [ROWS, TOKENS]."""
    return torch.randint(64, (ROWS, TOKENS), generator=torch.Generator().manual_seed(step))


def train(rank: int, scenario: dict[str, Any]) -> dict[str, Any]:
    """``config``: fields of the configuration. Returns losses, norms, and weights that were gathered."""
    torch.manual_seed(rank)
    config = {"train_batch_size": ROWS, "gradient_clipping": 0.0, **scenario["config"]}
    config.setdefault("optimizer", {"type": "AdamW", "params": {"lr": 1e-2}})
    engine, _, _, _ = deepspeed.initialize(model=llama(**scenario.get("model", {})), config=config)
    size = config.get("sequence_parallel_size", 1)
    loaded = engine.load_checkpoint(scenario["load"]) if "load" in scenario else None
    begun, losses, norms = engine.global_steps, [], []
    for step in range(begun, scenario.get("steps", STEPS)):
        mine = rows(step).chunk(engine.dp_world_size)[rank // size]
        for number, some in enumerate(mine.chunk(engine.gradient_accumulation_steps())):
            alone = "no_sync" in scenario and number == 0
            with engine.no_sync() if alone else contextlib.nullcontext():
                loss = engine(input_ids=some, labels=some).loss
                engine.backward(loss)
            if not alone:
                engine.step()
        losses.append(float(loss))
        norms.append(engine.get_global_grad_norm())
    if "save" in scenario:
        engine.save_checkpoint(scenario["save"], tag="here", client_state={"saved_by": rank})
    weights = engine.module_state_dict()
    saved = engine.save_16bit_model(scenario["export"]) if "export" in scenario else None
    result = {"losses": losses, "norms": norms, "weights": weights, "begun": begun, "exported": saved, "loaded": loaded}
    if saved and rank == 0:
        result["file"] = torch.load(pathlib.Path(scenario["export"], "pytorch_model.bin"))
    engine.destroy()
    return result


if __name__ == "__main__":
    process_group.run_scenarios(train)
