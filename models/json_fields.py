"""Typed access to JSON objects. Every error names the file, the field and the value."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graft.models.errors import ConfigError
from graft.native.errors import short_repr

_REQUIRED: Any = object()
#: Maximum size of a JSON file of a checkpoint in bytes. Even an index of thousands of shards is
#: much smaller.
_MAX_BYTES = 1 << 26


def read_json(path: Path) -> Any:
    """Return the decoded content of a JSON file.

    Raises
    ------
    ConfigError
        If the file is missing, not a regular file, too large, nested too deeply or not valid JSON.
    """
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path}: not a regular file")
        size = path.stat().st_size
        if size > _MAX_BYTES:
            raise ConfigError(f"{path}: the file has {size} bytes, more than {_MAX_BYTES}")
        text = path.read_text(encoding="utf-8")
        return json.loads(text)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON ({error})") from error


class Fields:
    """A JSON object with checked access. A null value counts as absent.

    The methods `integer`, `number` and `boolean` return `default` if the field is absent. Without a
    default, an absent field raises ConfigError.

    Parameters
    ----------
    data
        The decoded JSON object.
    where
        Location of the object for error messages, such as the path of its file.
    """

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self.data = data
        self.where = where

    @staticmethod
    def from_file(path: Path) -> Fields:
        """Read a JSON file that contains an object.

        Raises
        ------
        ConfigError
            If the file cannot be read, or contains something other than an object.
        """
        data = read_json(path)
        if not isinstance(data, dict):
            raise ConfigError(f"{path}: contains a {type(data).__name__}, must contain an object")
        return Fields(data, str(path))

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field without checking it, or `default` if it is absent."""
        value = self.data.get(name)
        return default if value is None else value

    def section(self, name: str) -> Fields | None:
        """Return a nested object, or None if it is absent."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._error(name, value, "an object")
        return Fields(value, f"{self.where}: {name}")

    def integer(self, name: str, *, low: int, high: int, default: Any = _REQUIRED) -> int:
        """Return the field `name`, which must be an integer from `low` to `high`."""
        value = self._value(name, default)
        if not _is_integer(value):
            raise self._error(name, value, "an integer")
        if not low <= value <= high:
            raise self._error(name, value, f"from {low} to {high}")
        return value

    def number(
        self, name: str, *, low: float = 0.0, high: float = 1e12, default: Any = _REQUIRED
    ) -> float:
        """Return the field `name`, which must be a number from `low` to `high`."""
        value = self._value(name, default)
        if not _is_integer(value) and not isinstance(value, float):
            raise self._error(name, value, "a number")
        if not low <= value <= high:  # also true for NaN
            raise self._error(name, value, f"from {low} to {high}")
        return float(value)

    def boolean(self, name: str, *, default: Any = _REQUIRED) -> bool:
        """Return the field `name`, which must be a boolean."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self._error(name, value, "true or false")
        return value

    def integers(self, name: str) -> tuple[int, ...] | None:
        """Return the field `name`, a list of integers, as a tuple; None if it is absent.

        A single integer counts as a list with one element.
        """
        value = self.get(name)
        if value is None:
            return None
        items = value if isinstance(value, list) else [value]
        for item in items:
            if not _is_integer(item):
                raise self._error(name, value, "an integer or a list of integers")
        return tuple(items)

    def numbers(self, name: str, *, low: float = 0.0, high: float = 1e12) -> tuple[float, ...]:
        """Return the field `name`, a list of numbers from `low` to `high`, as a tuple."""
        values = self._value(name, _REQUIRED)
        if not isinstance(values, list):
            raise self._error(name, values, "a list of numbers")
        fields = Fields({f"{name}[{i}]": value for i, value in enumerate(values)}, self.where)
        return tuple(fields.number(item, low=low, high=high) for item in fields.data)

    def require(self, name: str, *allowed: Any) -> None:
        """Raise ConfigError if a field is present and its value is not one of `allowed`."""
        value = self.get(name)
        if value is None:
            return
        for allowed_value in allowed:
            if value is allowed_value or value == allowed_value:
                return
        supported = "the field must be absent"
        if allowed:
            values = [repr(allowed_value) for allowed_value in allowed]
            supported = "supported: " + " or ".join(values)
        raise ConfigError(
            f"{self.where}: {name} = {short_repr(value)} is not implemented ({supported})"
        )

    def require_known(self, known: Mapping[str, tuple[Any, ...] | None]) -> None:
        """Raise ConfigError if a field is unknown or has a value that is not allowed.

        Parameters
        ----------
        known
            Allowed values of each known field; None allows any value.
        """
        for name in self.data:
            allowed = known.get(name, ())
            if allowed is not None:
                self.require(name, *allowed)

    def _error(self, name: str, value: object, expected: str) -> ConfigError:
        return ConfigError(f"{self.where}: {name} is {short_repr(value)}, must be {expected}")

    def _value(self, name: str, default: Any) -> Any:
        """Return a field, or `default` if it is absent; raise ConfigError if it is required."""
        value = self.get(name)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise ConfigError(f"{self.where}: {name} is missing")
        return default


def _is_integer(value: object) -> bool:
    """Return whether a value is an int but not a bool, which is a subclass of int."""
    return isinstance(value, int) and not isinstance(value, bool)
