"""A Hugging Face model goes from its files into the daemon, and is whole nowhere else."""

import multiprocessing
from collections.abc import Mapping

import accelerate
import pytest
import torch
import transformers
from tests.support import fake_torch_gpu
from tests.support.fake_torch_gpu import fake_gpu, gpu_daemon  # noqa: F401

import superoffload.torch
from superoffload.torch import GpuOptions

LAYERS = 8


def config_of(**changed):
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
    return transformers.AutoConfig.for_model(**{"num_hidden_layers": LAYERS} | sizes | changed)


CONFIGS = {
    "tied": config_of(model_type="llama", tie_word_embeddings=True),
    "experts": config_of(model_type="qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
}


def save(config, directory):
    torch.manual_seed(2)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory, max_shard_size=sum(p.nbytes for p in model.parameters()) // 5)


def empty(config):
    with accelerate.init_empty_weights():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.tie_weights()
    return model


def train(model, optimizer, steps=3):
    losses = []
    for step in range(steps):
        tokens = torch.randint(2, 60, (2, 16), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


def adamw(model, daemon, **options):
    return superoffload.torch.AdamW(model.named_parameters(), lr=1e-2, endpoint=daemon.endpoint, **options)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_on_meta_trains_the_bits_of_one_that_was_loaded(gpu_daemon, tmp_path, name):  # noqa: F811
    save(CONFIGS[name], tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    optimizer = adamw(loaded, gpu_daemon)
    expected, weights = train(loaded, optimizer)
    optimizer.close()
    for where in ("auto", "resident"):
        model = empty(CONFIGS[name])
        gpu = GpuOptions(device="cuda:0", weights=superoffload.torch.pretrained_weights(model, tmp_path))
        optimizer = adamw(model, gpu_daemon, weights=where, gpu=gpu)
        losses, trained = train(model, optimizer)
        assert losses == expected
        assert trained.keys() == weights.keys()
        assert all(torch.equal(trained[name], weights[name]) for name in weights)
        optimizer.close()


def anonymous_bytes():
    """Memory of this process that is neither a file's nor shared."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))


class Measured(Mapping):
    def __init__(self, weights):
        self.weights, self.most = weights, 0

    def __getitem__(self, name):
        self.most = max(self.most, anonymous_bytes())
        return self.weights[name]

    def __iter__(self):
        return iter(self.weights)

    def __len__(self):
        return len(self.weights)


def attach_measured(endpoint, directory):
    """Bytes of the model, and by how much this process has grown at most."""
    patch = pytest.MonkeyPatch()
    fake_torch_gpu.install(patch)
    model = empty(transformers.AutoConfig.from_pretrained(directory))
    weights = Measured(superoffload.torch.pretrained_weights(model, directory))
    gpu = GpuOptions(device="cuda:0", weights=weights)
    before = anonymous_bytes()
    optimizer = superoffload.torch.AdamW(model.named_parameters(), weights="streamed", gpu=gpu, endpoint=endpoint)
    grown = max(weights.most, anonymous_bytes()) - before
    total = sum(parameter.nbytes for parameter in model.parameters())
    optimizer.close()
    patch.undo()
    return total, grown


def test_the_model_is_never_whole_in_this_process(gpu_daemon, tmp_path):  # noqa: F811
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "head_dim": 64, "num_attention_heads": 8}
    save(config_of(model_type="llama", **sizes), tmp_path)
    with multiprocessing.get_context("spawn").Pool(1) as alone:  # nothing else allocates there
        total, grown = alone.apply(attach_measured, (gpu_daemon.endpoint, str(tmp_path)))
    assert total > 50 << 20
    assert grown < total / 2
