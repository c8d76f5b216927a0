"""Check an output against its grammar by means that share nothing with the grammar backends."""

from __future__ import annotations

import json
import re

from graft.grammar.errors import GrammarError
from graft.grammar.grammar_spec import GrammarSpec
from graft.grammar.validate import check_output, search_pattern


def is_valid(spec: GrammarSpec | None, text: str) -> bool | None:
    """Whether `text` is what the grammar asks for; None when nothing independent can tell.

    JSON schemas are checked by ``jsonschema``, regular expressions by ``re`` where it can read
    them, both within seconds, choices by comparison; for EBNF there is no second reader.
    """
    try:
        if spec is not None and spec.kind == "json_schema":
            return check_output(spec.schema, text)
        if spec is not None and spec.kind == "choice":
            return text in json.loads(spec.text)
        if spec is not None and spec.kind == "regex":
            return search_pattern(rf"\A(?:{spec.text})\Z", text)
    except (re.error, GrammarError):  # of another dialect, or endless
        pass
    return None
