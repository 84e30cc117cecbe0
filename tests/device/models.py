"""Models that the benchmarks train, in bf16, with activations recomputed in backward."""

import torch
from tests.device import machine

VOCABULARY = 64 if machine.DRY_RUN else 32768
SEQUENCE = 16 if machine.DRY_RUN else 2048
HEAD = 16 if machine.DRY_RUN else 128
BILLION = machine.BILLION


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // HEAD)
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(2))
        self.qkv = torch.nn.Linear(width, 3 * width, bias=False)
        self.out = torch.nn.Linear(width, width, bias=False)
        self.up = torch.nn.Linear(width, 4 * width, bias=False)
        self.down = torch.nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(torch.nn.functional.gelu(self.up(self.norms[1](x))))


class Transformer(torch.nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, width)
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = torch.nn.LayerNorm(width)
        self.head = torch.nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        logits = self.head(self.norm(x)).flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits.float(), tokens[:, 1:].flatten())


def build(parameters: int) -> Transformer:
    """About that many; layers are about as many as their width is heads."""
    width = max(HEAD, round((parameters / 12 * HEAD) ** (1 / 3) / HEAD) * HEAD)
    layers = max(1, round((parameters - 2 * VOCABULARY * width) / (12 * width**2)))
    torch.manual_seed(0)
    with torch.device(machine.DEVICE):
        previous = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)  # a model in fp32 first would need twice the memory
        try:
            return Transformer(width, layers)
        finally:
            torch.set_default_dtype(previous)


class Llama(torch.nn.Module):
    """A transformers model of about a billion parameters, called as ours is."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        width = 32 if machine.DRY_RUN else 2048
        config = LlamaConfig(
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=2 if machine.DRY_RUN else 16,
            num_attention_heads=width // HEAD,
            num_key_value_heads=max(1, width // HEAD // 4),
            vocab_size=VOCABULARY,
            max_position_embeddings=SEQUENCE,
            use_cache=False,
        )
        torch.manual_seed(0)
        with torch.device(machine.DEVICE):
            self.model = LlamaForCausalLM(config).to(torch.bfloat16)
        self.model.gradient_checkpointing_enable()
        self.model.train()

    def layers(self) -> torch.nn.ModuleList:
        return self.model.model.layers

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=tokens[:, :-1], labels=tokens[:, :-1]).loss


def count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
