"""AdamW and Adam: names of scalars and state, and defaults. What optimizers have in common: optimizer.py."""

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from superoffload.torch import groups
from superoffload.torch.algorithm import Algorithm
from superoffload.torch.keywords import Keywords
from superoffload.torch.optimizer import Optimizer

if TYPE_CHECKING:
    from typing_extensions import Unpack  # typing has it from Python 3.11 on


def _scalars(group: Mapping[str, Any]) -> dict[str, float]:
    beta1, beta2 = group["betas"]
    values = {"lr": group["lr"], "beta1": beta1, "beta2": beta2, "eps": group["eps"]}
    scalars = groups.numbers({**values, "weight_decay": group["weight_decay"]})
    if not math.isfinite(scalars["lr"]):
        raise ValueError(f"lr is {scalars['lr']} but must be finite")
    return scalars


def _group_values(scalars: Mapping[str, float]) -> dict[str, Any]:
    values = {name: scalars[name] for name in ("lr", "eps", "weight_decay")}
    return {**values, "betas": (scalars["beta1"], scalars["beta2"])}


def _algorithm(daemon_name: str, name: str, other: str, decoupled: bool, state_bits: int = 32) -> Algorithm:
    def objection(group: Mapping[str, Any]) -> str | None:
        if group.get("decoupled_weight_decay", decoupled) is decoupled or group["weight_decay"] == 0:
            return None
        return f"has the weight decay of {other}, but this is {name}; build {other}"

    return Algorithm(
        daemon_name=daemon_name,
        name=name,
        moments=("exp_avg", "exp_avg_sq"),
        scalars=_scalars,
        group_values=_group_values,
        refused={"amsgrad": (False, "the daemon has no such moment; build with amsgrad=False")},
        objection=objection,
        in_bfloat16=state_bits == 32,
        masters_in_bfloat16=True,
        state_bits=state_bits,
    )


class AdamW(Optimizer):
    """AdamW as torch.optim.AdamW defines it, in the daemon, on fp32 masters.

    Args:
        params: parameters, (name, parameter) pairs, or groups of either, as for torch.optim.AdamW. Parameters that do
            not require gradients are left alone; tied ones are updated once. Where the state is narrow, a group with
            ``optim_bits=32`` has it in fp32.
        lr, betas, eps, weight_decay: as for torch.optim.AdamW; schedulers and direct changes of ``param_groups`` work.
        maximize: as for torch.optim.AdamW, for all parameter groups alike.
        amsgrad, differentiable: only False, torch's default; True is refused.
        foreach, capturable, fused: taken as torch.optim takes them; they change nothing.
        state_dtype: torch.float32, or torch.bfloat16 for moments of half the memory, which results then depend on.
        master_dtype: torch.float32, or torch.bfloat16 for masters of parameters in bf16, rounded stochastically: 2
            bytes per parameter instead of 4, and results depend on it. Parameters of other dtypes, and groups with
            ``optim_bits=32``, keep their state in fp32.
        rounding: of bf16 moments: "stochastic", under ``seed``, or "nearest", with which an update that is small
            against a moment is lost.
        seed: of stochastic rounding; 0 unless the optimizer exists already or comes from a checkpoint, which have
            their own. The same on all ranks.
        max_grad_norm: clip the global 2-norm of the gradients to this; None does not clip.
        endpoint: the daemon, "unix:/path/control.sock". Default: $SUPEROFFLOAD_ENDPOINT, a daemon at its usual places
            ($XDG_RUNTIME_DIR/superoffloadd, /run/superoffloadd, /tmp/superoffloadd-UID), else a private one that ends
            with this process.
        name: the optimizer's name in the daemon. With a name it outlives this process, and building an optimizer of
            that name attaches to it again. Without one it is deleted in the end.
        sync: when attaching to an existing optimizer: "check" that the model's parameters are the published ones,
            "push_params" (the model wins) or "pull_params" (the daemon wins).
        speculation: "adaptive", "always" or "never"; never changes results.
        restore: directory of a checkpoint, or directories of all its ranks, that an optimizer which is created begins
            with: masters, moments, step and hyper-parameters. One that exists already is newer and goes on as it is,
            unless its trainer ended before it had been filled. Not with sync="push_params".
        checkpoint: have the daemon take checkpoints while training goes on; None leaves an existing schedule.
        state_directory: where the daemon writes the state of a ``state_dict()`` that is pickled or deeply copied; the
            Hugging Face Trainer's and accelerate's goes into their own directory. None: it goes into the pickle, and
            needs as much memory while that is loaded.
        lease_seconds: the daemon deletes an optimizer with a name when no trainer was attached to it for so long; None
            keeps it.
        bucket_bytes: gradient bytes per bucket; 0 is the daemon's default, 64 MiB. Blocks of a model whose parameters
            have names (``model.named_parameters()``) do not share buckets, unless they are small.
        overlap: submit gradients during backward. "auto" does where watching the loop has shown no harm in it; True
            does without watching; False submits all in step().
        gpu: for parameters on a GPU.
        weights: of a model on a GPU: "resident", all of them stay there; "streamed", those of its blocks (the list of
            modules that has most of the parameters) come from the daemon's memory just ahead of each use, through a few
            slots; or which part of the blocks does; "auto", those blocks do that have no room on the GPU beside what
            the loop needs. Never changes results.
        replicas: of whole parameters in several ranks: True where all ranks train the same ones, or the process group
            of those that do (DistributedDataParallel). Each rank's daemon then hosts a part of each parameter (ZeRO-1).
            False: each rank trains its own, which is the default without a name.

    Raises:
        Error: what the daemon or the adapter refuses, with a canonical code and a sentence.
    """

    algorithm = _algorithm("adamw", "AdamW", other="Adam", decoupled=True)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        **options: "Unpack[Keywords]",
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, {"amsgrad": amsgrad}, **options)


class Adam(Optimizer):
    """Adam as torch.optim.Adam defines it (weight decay as an L2 term); arguments as for AdamW."""

    algorithm = _algorithm("adam", "Adam", other="AdamW", decoupled=False)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        **options: "Unpack[Keywords]",
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, {"amsgrad": amsgrad}, **options)


class AdamW8bit(AdamW):
    """AdamW whose moments are kept in 8 bits, with an fp32 scale per 256, as bitsandbytes and torchao keep them.

    6 bytes of state per parameter instead of 12. Moments of parameters of one dimension, of fewer than 4096 elements,
    and of embeddings (by their names, where ``model.named_parameters()`` is passed: a part with "embed", "wte", "wpe")
    are kept in fp32, unless their group says ``optim_bits=8``. Arguments as for AdamW.

    ``optimizer.state``, ``state_tensors()`` and ``torch_state_dict()`` have moments as the fp32 numbers that the codes
    stand for; written back, these become the same codes.
    """

    algorithm = _algorithm("adamw_8bit", "AdamW8bit", other="Adam8bit", decoupled=True, state_bits=8)


class Adam8bit(Adam):
    """Adam whose moments are kept as those of AdamW8bit."""

    algorithm = _algorithm("adam_8bit", "Adam8bit", other="AdamW8bit", decoupled=False, state_bits=8)
