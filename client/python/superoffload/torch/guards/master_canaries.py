"""What canaries are expected to be where masters say it, not the published parameters."""

import dataclasses

import torch


@dataclasses.dataclass(frozen=True)
class KnownMasters:
    """Of parameters of one dtype; all tensors are on the GPU."""

    dtype: torch.dtype
    masters: torch.Tensor
    positions: torch.Tensor  # of canaries
    indices: torch.Tensor  # of their masters
    parts: torch.Tensor  # of the narrowed master that is the canary


@dataclasses.dataclass(frozen=True)
class MasterCanaries:
    known: list[KnownMasters]

    def write(self, expected: torch.Tensor, present: torch.Tensor) -> None:
        """Puts canaries into ``expected``. Where masters are not numbers, the ``present`` ones: a NaN has many bits."""
        for of in self.known:
            masters = of.masters[of.indices]
            parts = masters.to(of.dtype).view(torch.int16).view(len(masters), -1)
            canaries = parts.gather(1, of.parts[:, None]).flatten()
            expected[of.positions] = torch.where(masters.isnan(), present[of.positions], canaries)
