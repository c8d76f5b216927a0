"""Check an output against its grammar by means that share nothing with the grammar backends."""

from __future__ import annotations

import json
import re
from typing import Any

from graft.grammar.errors import GrammarError
from graft.grammar.judge import check_output, found_in
from graft.grammar.statement import GrammarSpec


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


def is_valid(spec: GrammarSpec | None, text: str) -> bool | None:
    """Whether `text` is what the grammar asks for; None when nothing independent can tell.

    JSON schemas are checked by ``jsonschema`` where it is installed, regular expressions by ``re``
    where it can read them, both within seconds; for EBNF there is no second reader.
    """
    if spec is None:
        return None
    try:
        if spec.kind == "json_schema":
            return check_output(spec.schema, text)
        if spec.kind == "regex":
            return found_in(rf"\A(?:{spec.text})\Z", text)
    except (re.error, GrammarError):  # of another dialect, or endless
        return None
    return None
