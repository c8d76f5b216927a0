"""Check whether an output satisfies its grammar, without the grammar backends."""

from __future__ import annotations

import json
import re

from graft.grammar.errors import GrammarError
from graft.grammar.grammar_spec import GrammarSpec
from graft.grammar.validate import check_output, search_pattern


def is_valid(spec: GrammarSpec | None, text: str) -> bool | None:
    """Return whether `text` satisfies a grammar; None if there is no independent check.

    JSON schemas are checked with ``jsonschema``, and regular expressions with ``re``, both with a
    time limit of a few seconds. A choice is compared with its texts. There is no check for other
    grammars, nor for regular expressions that ``re`` cannot parse.
    """
    if spec is None:
        return None
    try:
        if spec.kind == "json_schema":
            return check_output(spec.schema, text)
        if spec.kind == "choice":
            return text in json.loads(spec.text)
        if spec.kind == "regex":
            return search_pattern(rf"\A(?:{spec.text})\Z", text)
    except (re.error, GrammarError):  # `re` cannot parse it, or it took too long
        pass
    return None
