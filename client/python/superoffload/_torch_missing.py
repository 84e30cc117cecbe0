"""Names parameters whose step has no gradient: the daemon takes it for zero, torch.optim leaves the parameter alone."""

from superoffload import _torch_warn
from superoffload._torch_parameters import HostedParameter

_NAMES_AT_MOST = 5


class MissingGradients:
    def __init__(self, hosted: list[HostedParameter]) -> None:
        self._hosted = hosted
        self._had = [False] * len(hosted)
        self._named = [False] * len(hosted)

    def before_step(self, decays: list[bool]) -> None:
        """Warns of each parameter once that would not move in torch; ``decays``: whether a group's weights decay."""
        names = []
        for index, parameter in enumerate(self._hosted):
            if parameter.tensor.grad is not None:
                self._had[index] = True
            elif not self._named[index] and (self._had[index] or decays[parameter.group]):
                self._named[index] = True
                names.append(parameter.name)
        if names:
            more = f" and {len(names) - _NAMES_AT_MOST} more" if len(names) > _NAMES_AT_MOST else ""
            _torch_warn.warn(
                f"a step without a gradient of {', '.join(names[:_NAMES_AT_MOST])}{more}: it counts as zero, so that "
                "moments and weight decay go on changing the parameter, which torch.optim leaves alone"
            )
