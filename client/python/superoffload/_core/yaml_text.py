"""YAML, which only users of such files need."""

from typing import Any


def parse(text: str) -> Any:
    """Raises ValueError with one line that says what is wrong."""
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise ValueError("to read YAML needs PyYAML (pip install pyyaml); a .json file does not") from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
