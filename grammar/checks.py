"""Checks of what a user states a grammar with: texts, JSON and keys."""

from __future__ import annotations

import json
from typing import Any

from .errors import GrammarError

__all__ = ["check_keys", "check_text", "parsed"]


def check_keys(value: Any) -> None:
    """Refuses what JSON would turn into other keys without a word."""
    pending, seen = [value], set[int]()
    while pending:
        part = pending.pop()
        if isinstance(part, (dict, list, tuple)) and id(part) not in seen:
            seen.add(id(part))
            pending.extend(part.values() if isinstance(part, dict) else part)
            for key in part if isinstance(part, dict) else ():
                if not isinstance(key, str):
                    raise GrammarError(
                        f"JSON schema: the key {key!r} is a {type(key).__name__}, not text"
                    )


def parsed(what: str, text: object) -> Any:
    """The value of a JSON text."""
    if not isinstance(text, str):
        raise GrammarError(f"{what}: must be JSON text, not {type(text).__name__}")
    try:
        return json.loads(text)
    except RecursionError:
        raise GrammarError(f"{what}: is nested too deeply") from None
    except ValueError as error:
        raise GrammarError(f"{what}: the text is not JSON: {error}") from error


def check_text(what: str, text: object) -> None:
    """Refuses what is no text, empty, or cannot be written as UTF-8."""
    if not isinstance(text, str):
        raise GrammarError(f"{what}: must be a string, not {type(text).__name__}")
    if not text:
        raise GrammarError(f"{what}: is empty")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise GrammarError(f"{what}: is not Unicode text: {error}") from error
