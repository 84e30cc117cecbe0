"""AdamW and Lion with moments in bf16 or 8 bits, or masters in bf16, element by element in torch and NumPy.

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


def _code_between(relative: np.ndarray, signed: bool) -> np.ndarray:
    """The code of numbers under scale 1, by the arithmetic of kernels/codes/dynamic_code.h."""
    f, extra = np.float32, 0 if signed else 1
    powers = [float(f(10.0 ** (decade - 6))) for decade in range(7)]

    def value(decade: int, step: float) -> float:
        return powers[decade] * (0.1 + 0.9 * (step + 0.5) / (1 << (decade + extra)))

    def last(decade: int) -> float:
        return value(decade, (1 << (decade + extra)) - 1)

    least = [f(value(0, 0) / 2) if signed else np.finfo(f).smallest_subnormal]
    least += [f((last(decade - 1) + value(decade, 0)) / 2) for decade in range(1, 7)]
    number = np.abs(relative) if signed else relative
    decade = np.clip(np.searchsorted(np.array(least, f), number, side="right") - 1, 0, 6)
    codes = (1 << (decade + extra)).astype(np.int32)
    inverse = np.array([f(10.0 ** (6 - each)) for each in range(7)], f)[decade]
    steps = (number * inverse - f(0.1)) * (codes.astype(f) * f(1 / 0.9))
    code = codes + np.clip(steps.astype(np.int32), 0, codes - 1)
    negative = signed & np.signbit(relative)
    code = np.where(number >= f((last(6) + 1) / 2), np.where(negative, 127, 128 if signed else 1), code)
    return np.where(number >= least[0], np.where(negative, code | 128, code), 0)


def in_8_bits(values: torch.Tensor, signed: bool) -> torch.Tensor:
    """What is left of ``values`` when they are kept as codes, in blocks of 256."""
    known = code_values(signed)
    flat = values.numpy().reshape(-1)
    blocks = np.pad(flat, (0, -flat.size % 256)).reshape(-1, 256)
    largest, least = blocks.max(1).clip(min=0), blocks.min(1).clip(max=0)
    scales = np.where(largest >= -least, largest, least)[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = np.where(scales == 0, np.float32(0), blocks * (np.float32(1) / scales))
    codes = _code_between(relative, signed)
    # It is the nearest, to rounding; of numbers without signs, what is not 0 becomes no 0.
    away = np.abs(np.sort(known)[:, None, None] - relative).min(0)
    nearest = np.abs(known[codes] - relative) <= away * (1 + 1e-3) + 1e-9
    assert (nearest | ((relative > 0) & (relative < 1e-6) & (not signed))).all()
    found = known[codes] * scales
    return torch.from_numpy(found.astype(np.float32).reshape(-1)[: flat.size]).view(values.shape)


class Formula(torch.optim.Optimizer):
    """kernels/adam/adam.h and kernels/lion/lion.h, with narrow state; parameters are named.

    ``moments``: in "stochastic" or "nearest" bf16, in "8bit" or "float32"; and whether the masters are in bf16. All of
    the state of parameters that ``in_float32`` names is in fp32.
    """

    def __init__(
        self,
        named,
        kind: str,
        moments: str,
        *,
        narrow_masters: bool = False,
        seed: int = 0,
        lr: float = 1e-2,
        in_float32: tuple[str, ...] = (),
    ) -> None:
        super().__init__(named, {"lr": lr})
        self._update = getattr(self, f"_{kind.lower()}")
        self._moments, self._narrow_masters = moments, narrow_masters
        self._seed, self._in_float32 = seed, in_float32

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for name, p in zip(group["param_names"], group["params"], strict=True):
                if p.grad is None:
                    continue
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                master = state.get("master", p.detach()).float().clone()
                master.grad = p.grad.float()
                moments = self._update(
                    master, group["lr"], state["step"], lambda key, s=state, p=master: self._moment(s, key, p)
                )
                for array, (key, value) in enumerate({"master": master, **moments}.items()):
                    state[key] = self._kept(name, state["step"], array, value)
                p.copy_(state["master"])

    def _kept(self, name: str, step: int, array: int, value: torch.Tensor) -> torch.Tensor:
        kept_as = self._moments if array > 0 else "stochastic" if self._narrow_masters else "float32"
        if kept_as == "float32" or name in self._in_float32:
            return value
        if kept_as == "8bit":
            return in_8_bits(value, signed=array == 1)
        bits = random_bits(self._seed, name, step, value.numel(), array) if kept_as == "stochastic" else None
        return rounded(value, bits)

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


def model(hidden: int = 90, dtype: torch.dtype = torch.float32) -> torch.nn.Sequential:
    torch.manual_seed(3)
    layers = torch.nn.Linear(40, hidden), torch.nn.Tanh(), torch.nn.Linear(hidden, 7)
    return torch.nn.Sequential(*layers).to(dtype)


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
    narrow_masters: bool = False,
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
    module = model(hidden, torch.bfloat16 if narrow_masters else torch.float32)
    options = {} if shards else {"replicas": True}
    if narrow_masters:
        options["master_dtype"] = torch.bfloat16
    if shards:
        torch.distributed.fsdp.fully_shard(module)
    try:
        common = {"lr": 1e-2, "name": name, "restore": restore, **options}
        if eight_bits:
            optimizer = superoffload.torch.AdamW8bit(module.named_parameters(), **common, seed=seed)
        else:
            own = {"state_dtype": torch.bfloat16, "seed": rank if seeds_differ else seed}
            optimizer = superoffload.torch.AdamW(module.named_parameters(), **common, **own)
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
