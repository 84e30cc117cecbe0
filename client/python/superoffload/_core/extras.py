"""Frameworks that the package can use and does not require."""

import importlib.util


def need(module: str, extra: str) -> None:
    """Raises ModuleNotFoundError that says which extra of the package brings ``module``, where it is missing."""
    if importlib.util.find_spec(module) is None:
        raise ModuleNotFoundError(
            f"superoffload.{extra} needs {module}, which is not installed: pip install 'superoffload[{extra}]'",
            name=module,
        )
