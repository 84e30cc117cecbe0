"""AdamW and Lion with moments in bf16 or 8 bits, element by element in torch and NumPy.

Run as a module it is one rank of a run on gloo: python -m tests.support.narrow_moments STORE RANK RANKS OUT
SCENARIO...; each scenario is a JSON object of arguments of `train`, and OUT gets a list of what it returned.
"""

import math

import numpy as np
import torch
from tests.support import process_group, small_training
from tests.support.momentum import fma

import superoffload.torch

MASK = np.uint64(0xFFFFFFFF)


def philox(key: tuple[int, int], counters: list[np.ndarray]) -> list[np.ndarray]:
    """Philox4x32-7 (Salmon et al. 2011) of arrays of counters' words."""
    x = [np.asarray(word, np.uint64) for word in counters]
    k = [np.uint64(word) for word in key]
    for _ in range(7):
        product0, product1 = np.uint64(0xD2511F53) * x[0], np.uint64(0xCD9E8D57) * x[2]
        x = [
            (product1 >> np.uint64(32)) ^ x[1] ^ k[0],
            product1 & MASK,
            (product0 >> np.uint64(32)) ^ x[3] ^ k[1],
            product0 & MASK,
        ]
        k = [(k[0] + np.uint64(0x9E3779B9)) & MASK, (k[1] + np.uint64(0xBB67AE85)) & MASK]
    return x


def random_bits(seed: int, name: str, step: int, elements: int, array: int) -> np.ndarray:
    """16 for each element of a tensor: what state array ``array`` of parameter ``name`` is rounded with in ``step``."""
    digest = 0xCBF29CE484222325
    for byte in name.encode():
        digest = (digest ^ byte) * 0x100000001B3 % (1 << 64)
    zero = np.zeros(1, np.uint64)
    key = philox((seed & 0xFFFFFFFF, seed >> 32), [zero + (digest & 0xFFFFFFFF), zero + (digest >> 32), zero, zero])
    groups = -(-elements // 64)
    counters = np.arange(16 * groups, dtype=np.uint64)
    pair = (array + 1) // 2
    words = philox((int(key[0][0]), int(key[1][0])), [counters, counters * 0, counters * 0 + step, counters * 0 + pair])
    by_group = np.stack([word.reshape(groups, 16) for word in words], axis=1)  # group, word, counter
    drawn = by_group.reshape(-1)[:elements]
    return (drawn & np.uint64(0xFFFF) if array % 2 == 1 else drawn >> np.uint64(16)).astype(np.uint32)


def rounded(values: torch.Tensor, bits: np.ndarray | None) -> torch.Tensor:
    """In bf16: by ``bits``, or to nearest."""
    if bits is None:
        return values.bfloat16()
    number = values.numpy().view(np.uint32).reshape(-1) + bits
    halves = torch.from_numpy((number >> np.uint32(16)).astype(np.uint16).view(np.int16))
    return halves.view(torch.bfloat16).view(values.shape)


def code_values(signed: bool) -> np.ndarray:
    """What the codes of kernels/codes/dynamic_code.h stand for under scale 1, by code."""
    f, extra, one = np.float32, 0 if signed else 1, 128 if signed else 1
    powers = [f(10.0 ** (decade - 6)) for decade in range(7)]
    values = np.zeros(256, np.float32)
    for magnitude in range(1 << extra, 128 << extra):
        decade = magnitude.bit_length() - 1
        mantissa, half = f(magnitude / (1 << decade)), f(f(0.9) / f(1 << (decade + 1)))
        fused = f(np.float64(f(0.9)) * np.float64(mantissa) + np.float64(half - f(0.8)))
        values[magnitude] = fused * powers[decade - extra]
    if signed:
        values[129:] = -values[1:128]
    values[one] = 1
    return values


def in_8_bits(values: torch.Tensor, signed: bool) -> torch.Tensor:
    """What is left of ``values`` when they are kept as codes, in blocks of 256."""
    known = code_values(signed)
    order = np.argsort(known)
    flat = values.numpy().reshape(-1)
    blocks = np.pad(flat, (0, -flat.size % 256)).reshape(-1, 256)
    largest, least = blocks.max(1).clip(min=0), blocks.min(1).clip(max=0)
    scales = np.where(largest >= -least, largest, least)[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = np.where(scales == 0, 0, blocks * (np.float32(1) / scales))
    between = (known[order][1:].astype(np.float64) + known[order][:-1]) / 2  # as many are nearest to one as below
    if not signed:
        between[0] = 0  # what is not 0 becomes no 0
    places = np.searchsorted(between, relative.astype(np.float64), side="right" if signed else "left")
    found = known[order][places] * scales
    return torch.from_numpy(found.astype(np.float32).reshape(-1)[: flat.size]).view(values.shape)


class Formula(torch.optim.Optimizer):
    """kernels/adam/adam.h and kernels/lion/lion.h, with narrow moments; parameters are named.

    ``rounding``: of bf16; None: moments are in 8 bits, but those of parameters that ``in_float32`` names.
    """

    def __init__(
        self, named, kind: str, rounding: str | None, seed: int = 0, lr: float = 1e-2, in_float32: tuple[str, ...] = ()
    ) -> None:
        super().__init__(named, {"lr": lr})
        self._update = getattr(self, f"_{kind.lower()}")
        self._rounding, self._seed, self._in_float32 = rounding, seed, in_float32

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for name, p in zip(group["param_names"], group["params"], strict=True):
                if p.grad is None:
                    continue
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                moments = self._update(p, group["lr"], state["step"], lambda key, s=state, p=p: self._moment(s, key, p))
                for array, (key, value) in enumerate(moments.items(), start=1):
                    state[key] = self._kept(name, state["step"], array, value)

    def _kept(self, name: str, step: int, array: int, value: torch.Tensor) -> torch.Tensor:
        if self._rounding is None:
            return value if name in self._in_float32 else in_8_bits(value, signed=array == 1)
        stochastic = self._rounding == "stochastic"
        return rounded(value, random_bits(self._seed, name, step, value.numel(), array) if stochastic else None)

    @staticmethod
    def _moment(state: dict, key: str, p: torch.Tensor) -> torch.Tensor:
        return state[key].float() if key in state else torch.zeros_like(p)

    @staticmethod
    def _adamw(p: torch.Tensor, lr: float, step: int, moment) -> dict[str, torch.Tensor]:
        f = np.float32
        m = fma(f(0.9), moment("exp_avg"), f(1 - 0.9) * p.grad)
        v = fma(f(0.999), moment("exp_avg_sq"), f(1 - 0.999) * (p.grad * p.grad))
        root = torch.from_numpy(np.sqrt(v.numpy()))  # rounded once, which torch's is not
        denominator = fma(f(1 / math.sqrt(1 - 0.999**step)), root, torch.full_like(p, 1e-8))
        p.copy_(fma(-f(lr / (1 - 0.9**step)), m / denominator, p * f(1 - lr * 1e-2)))
        return {"exp_avg": m, "exp_avg_sq": v}

    @staticmethod
    def _lion(p: torch.Tensor, lr: float, step: int, moment) -> dict[str, torch.Tensor]:
        f = np.float32
        m = moment("exp_avg")
        direction = fma(f(0.9), m, f(1 - 0.9) * p.grad).sign()
        p.copy_(fma(-f(lr), direction, p))
        return {"exp_avg": fma(f(0.99), m, f(1 - 0.99) * p.grad)}


def model(hidden: int = 90) -> torch.nn.Sequential:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(40, hidden), torch.nn.Tanh(), torch.nn.Linear(hidden, 7))


def whole(optimizer, module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Weights by name, and the state of torch.optim's optimizer, of all ranks. All of them call it."""
    state = optimizer.torch_state_dict()["state"]
    moments = {f"{index}.{key}": value for index, arrays in state.items() for key, value in arrays.items()}
    tensors = {**{name: p.detach() for name, p in module.named_parameters()}, **moments}
    return {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in tensors.items()}


def train(
    rank: int,
    *,
    name: str,
    hidden: int = 90,
    eight_bits: bool = False,
    first: int = 0,
    steps: int,
    shards: bool = True,
    save: str | None = None,
    restore: str | None = None,
    seed: int | None = None,
    seeds_differ: bool = False,
) -> dict[str, torch.Tensor] | str:
    """Trains from step ``first`` to ``steps``; returns what `whole` does, or why not.

    ``shards``: by fully_shard; else all ranks have the model, and the same gradients.
    """
    module = model(hidden)
    options = {} if shards else {"replicas": True}
    if shards:
        torch.distributed.fsdp.fully_shard(module)
    try:
        common = {"lr": 1e-2, "name": name, "restore": restore, **options}
        if eight_bits:
            optimizer = superoffload.torch.AdamW8bit(module.named_parameters(), **common)
        else:
            options = {"state_dtype": torch.bfloat16, "seed": rank if seeds_differ else seed}
            optimizer = superoffload.torch.AdamW(module.named_parameters(), **common, **options)
    except superoffload.Error as error:
        return str(error)
    small_training.steps(module, optimizer, *range(first, steps))
    if save is not None:
        optimizer.save_checkpoint(save)
    found = whole(optimizer, module)
    optimizer.close()
    return found


if __name__ == "__main__":
    import torch.distributed.fsdp  # only here: it takes a second

    process_group.run_scenarios(lambda rank, scenario: train(rank, **scenario))
