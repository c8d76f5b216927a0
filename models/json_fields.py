"""Typed reading of JSON objects: every refusal names the file, the field and the value."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graft.models.errors import ConfigError

_REQUIRED: Any = object()
#: Bytes of a JSON file beside a model; indexes of thousands of shards are well below.
_MOST_BYTES = 1 << 26


def read_json(path: Path) -> Any:
    """Decode a JSON file.

    Raises
    ------
    ConfigError
        When it is missing, no plain file, too long or nested too deeply, or no JSON.
    """
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path}: is no plain file")
        size = path.stat().st_size
        if size > _MOST_BYTES:
            raise ConfigError(f"{path}: has {size} bytes, more than {_MOST_BYTES}")
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: is not valid JSON ({error})") from error


class Fields:
    """A JSON object with checked access. A null value counts as absent.

    Parameters
    ----------
    data : the decoded object.
    where : what errors call it, e.g. the path of its file.
    """

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self.data = data
        self.where = where

    @staticmethod
    def from_file(path: Path) -> Fields:
        """Read a JSON file; ConfigError when `read_json` refuses it or it holds no object."""
        data = read_json(path)
        if not isinstance(data, dict):
            raise ConfigError(f"{path}: holds a {type(data).__name__}, not an object")
        return Fields(data, str(path))

    def get(self, name: str, default: Any = None) -> Any:
        value = self.data.get(name)
        return default if value is None else value

    def section(self, name: str) -> Fields | None:
        """A nested object, or None when absent."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise ConfigError(f"{self.where}: {name} is {value!r}, not an object")
        return Fields(value, f"{self.where}: {name}")

    def integer(self, name: str, *, low: int, high: int, default: Any = _REQUIRED) -> int:
        value = self._present(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{self.where}: {name} is {value!r}, not an integer")
        if not low <= value <= high:
            raise ConfigError(f"{self.where}: {name} is {value}, outside {low}..{high}")
        return value

    def number(
        self, name: str, *, low: float = 0.0, high: float = 1e12, default: Any = _REQUIRED
    ) -> float:
        value = self._present(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{self.where}: {name} is {value!r}, not a number")
        if not low <= value <= high:  # NaN neither
            raise ConfigError(f"{self.where}: {name} is {value}, outside {low}..{high}")
        return float(value)

    def boolean(self, name: str, *, default: Any = _REQUIRED) -> bool:
        value = self._present(name, default)
        if not isinstance(value, bool):
            raise ConfigError(f"{self.where}: {name} is {value!r}, not true or false")
        return value

    def integers(self, name: str) -> tuple[int, ...] | None:
        """A list of integers (one integer counts as a list of one), or None when absent."""
        value = self.get(name)
        if value is None:
            return None
        items = value if isinstance(value, list) else [value]
        for item in items:
            if isinstance(item, bool) or not isinstance(item, int):
                raise ConfigError(f"{self.where}: {name} holds {item!r}, not an integer")
        return tuple(items)

    def refuse(self, name: str, *allowed: Any) -> None:
        """Raise when `name` is present with a value that graft does not implement."""
        value = self.get(name)
        if value is None or any(value is a or value == a for a in allowed):
            return
        wanted = " or ".join(repr(a) for a in allowed) if allowed else "it must be absent"
        raise ConfigError(f"{self.where}: {name} = {value!r} is not implemented ({wanted})")

    def only(self, known: Mapping[str, tuple[Any, ...] | None]) -> None:
        """`refuse` every field but those of a name and a value in `known`; None: of any value."""
        for name in self.data:
            if (allowed := known.get(name, ())) is not None:
                self.refuse(name, *allowed)

    def _present(self, name: str, default: Any) -> Any:
        value = self.get(name)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise ConfigError(f"{self.where}: {name} is missing")
        return default
