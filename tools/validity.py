"""Check an output against its grammar by means that share nothing with the grammar backends."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

from graft.grammar.spec import GrammarSpec


def check_schema(schema: Any, text: str) -> str | None:
    """What is wrong with `text` as an instance of a JSON schema; None if nothing.

    The judge is the ``jsonschema`` package. Formats are checked where ``jsonschema`` knows them.
    """
    import jsonschema

    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        return f"no JSON: {error}"
    kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    errors = kind(schema, format_checker=kind.FORMAT_CHECKER).iter_errors(value)
    return next((f"{e.json_path}: {e.message}" for e in errors), None)


@cache
def has_jsonschema() -> bool:
    """Whether the ``jsonschema`` package (the ``dev`` extra) is installed."""
    try:
        import jsonschema  # noqa: F401
    except ImportError:
        return False
    return True


def is_valid(spec: GrammarSpec | None, text: str) -> bool | None:
    """Whether `text` is what the grammar asks for; None when nothing independent can tell.

    JSON schemas are checked by ``jsonschema`` where it is installed, regular expressions by ``re``
    where it can read them; for EBNF there is no second reader.
    """
    if spec is None:
        return None
    if spec.kind == "json_schema":
        return check_schema(spec.schema, text) is None if has_jsonschema() else None
    if spec.kind == "regex":
        try:
            return re.fullmatch(spec.text, text) is not None
        except re.error:  # an expression of another dialect
            return None
    return None
