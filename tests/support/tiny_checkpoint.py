"""A Hugging Face directory with a small Llama and a tokenizer of bytes, as from the Hub."""

import pathlib
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SPECIAL = {"<|im_start|>": 256, "<|im_end|>": 257}


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    of_bytes = Tokenizer(models.BPE(vocab=letters | _SPECIAL, merges=[]))
    of_bytes.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    of_bytes.decoder = decoders.ByteLevel()
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=of_bytes, eos_token="<|im_end|>", additional_special_tokens=["<|im_start|>"]
    )
    made.chat_template = _TEMPLATE
    return made


def save(directory: pathlib.Path, **more: Any) -> None:
    """``more``: of the configuration."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=260,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        **more,
    )
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    tokenizer().save_pretrained(directory)
