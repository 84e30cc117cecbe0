"""One object of a DeepSpeed configuration: what is read of it, what only tunes DeepSpeed, and what is refused."""

from collections.abc import Mapping, Sequence
from typing import Any

_WORDS: dict[type, str] = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


class Fields:
    """The fields of one object. Each is asked for once; `end` refuses those that nobody has asked for.

    All raise ValueError, which names the field.
    """

    def __init__(self, path: str, given: Any, ignored: list[str]) -> None:
        """``path``: the object's name, empty for the whole configuration; ``ignored``: where such fields are noted."""
        if not isinstance(given, Mapping):
            raise ValueError(f"{path or 'the configuration'} is {given!r} but must be an object")
        self._path, self._left, self._ignored = path, dict(given), ignored

    def name(self, field: str) -> str:
        """As messages name it."""
        return f"{self._path}.{field}" if self._path else field

    def has(self, field: str) -> bool:
        return self._left.get(field) is not None

    def take(self, field: str, kind: type, default: Any) -> Any:
        """Its value, of type bool, int, float or str; ``default`` where it is missing or null."""
        value = self._left.pop(field, None)
        if value is None:
            return default
        if value == "auto":
            raise ValueError(f'{self.name(field)} is "auto", for which the Hugging Face Trainer has a value; write one')
        whole = kind is int and isinstance(value, float) and value.is_integer()  # 5e8
        if isinstance(value, bool) != (kind is bool) or not (
            whole or isinstance(value, (int, float) if kind is float else kind)
        ):
            raise ValueError(f"{self.name(field)} is {value!r} but must be {_WORDS[kind]}")
        return kind(value)

    def one_of(self, field: str, default: Any, choices: Mapping[str, Any]) -> Any:
        """What the field's text, in any case, stands for."""
        value = self.take(field, str, None)
        if value is None:
            return default
        if value.lower() not in choices:
            raise ValueError(f"{self.name(field)} is {value!r} but must be one of {', '.join(choices)}")
        return choices[value.lower()]

    def any(self, field: str) -> Any:
        """Its value, whatever it is; None where it is missing."""
        return self._left.pop(field, None)

    def object(self, *names: str) -> "Fields":
        """The object under the first of these names that is there; an empty one where none is."""
        for field in names:
            value = self._left.pop(field, None)
            if value is not None:
                return Fields(self.name(field), value, self._ignored)
        return Fields(self.name(names[0]), {}, self._ignored)

    def tunes(self, *fields: str) -> None:
        """These change how fast DeepSpeed is, or what it prints, and no result."""
        self._ignored += [self.name(field) for field in fields if self._left.pop(field, None) is not None]

    def ignore(self, field: str, why: str) -> None:
        self._ignored.append(f"{self.name(field)} ({why})")

    def refuse(self, field: str, harmless: Sequence[Any], why: str) -> None:
        """It has no counterpart, unless it is ``harmless``."""
        value = self._left.pop(field, None)
        if value is not None and value not in harmless:
            raise ValueError(f"{self.name(field)} is {value!r}, {why}")

    def refuse_enabled(self, *fields: str) -> None:
        """These objects change results and have no counterpart, unless they say ``"enabled": false``."""
        for field in fields:
            value = self._left.pop(field, None)
            off = not value or (isinstance(value, Mapping) and value.get("enabled") is False)
            if not off:
                raise ValueError(f"{self.name(field)} has no counterpart here, and would change results; take it out")

    def end(self) -> None:
        """Refuses what is left."""
        for field in self._left:
            raise ValueError(
                f"{self.name(field)} is no field that is known here, and might change results; take it out if it does "
                "not, or correct its name"
            )
