"""A model and data for the Hugging Face Trainer. It knows nothing of superoffload."""

from typing import Any

import torch
import transformers

SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}


class Tokens(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(SIZES["vocab_size"], (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def build(layers: int = 2) -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, num_hidden_layers=layers))


def arguments(output_dir: Any, **more: Any) -> transformers.TrainingArguments:
    """On the CPU, and quiet."""
    return transformers.TrainingArguments(output_dir=output_dir, use_cpu=True, report_to=[], disable_tqdm=True, **more)
