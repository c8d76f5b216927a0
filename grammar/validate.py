"""Whether texts fit schemas and patterns, asked of a process that can be killed.

Python's ``re`` takes exponential time for some patterns, and holds the GIL all the while: in this
process nothing else would run, no round either.
"""

from __future__ import annotations

import json
import math
import re
import sys
from typing import Any

from graft.grammar.errors import GrammarError
from graft.native.children.process import Question, ask

__all__ = ["CHECK_S", "SEARCH_S", "check_output", "found_in"]

#: Seconds that the check of an output may take, and one search.
CHECK_S = 5.0
SEARCH_S = 1.0
_STEPS = 1e5  # of a search that is made in this process
_HERE = __name__ + ":"


def check_output(schema: Any, text: str) -> bool:
    """Whether a finished text is JSON that satisfies the schema, formats included.

    Used to mark the outputs of inexact routes. Nothing is fetched for it: a schema that refers to
    elsewhere cannot be judged. Needs the package ``jsonschema``.

    Raises
    ------
    GrammarError
        If ``jsonschema`` is not installed, it cannot judge the schema, or it takes longer than
        `CHECK_S` seconds.
    """
    # importing jsonschema takes a second that no question is charged with
    ready = ("jsonschema", Question(_HERE + "learn", ()))
    question = Question(_HERE + "satisfies", (json.dumps(schema), text), ready)
    return _asked("JSON schema: an output", question, CHECK_S)


def found_in(pattern: str, text: str) -> bool:
    """``re.search`` of a user's pattern: in this process where it cannot take long.

    It cannot where no group is repeated or referred to: at each place of the text, each of the
    ``n`` signs of repetition or choice then stands for at most ``len(text) + 1`` ways to go on.
    Elsewhere a ``GrammarError`` says that it takes longer than `SEARCH_S` seconds.
    """
    signs = len(re.findall(r"[*+?{|]", pattern))
    nested = re.search(r"\)[*+{]|\\[1-9]|\(\?P=", pattern)
    if nested is None and (signs + 1) * math.log(len(text) + 2) <= math.log(_STEPS):
        return re.search(pattern, text) is not None
    re.compile(pattern)
    question = Question(_HERE + "searched", (pattern, text))
    return _asked(f"pattern {pattern[:60]!r}", question, SEARCH_S)


def _asked(what: str, question: Question, limit_s: float) -> bool:
    try:
        return bool(ask(question, limit_s))
    except GrammarError as error:
        raise GrammarError(f"{what} cannot be checked: {error}") from error


def learn() -> None:
    """In a checking process: have ready what every check needs."""
    sys.set_int_max_str_digits(0)
    try:
        import jsonschema  # noqa: F401
    except ImportError as error:
        raise GrammarError(str(error)) from error


def satisfies(schema: str, text: str) -> bool:
    """In a checking process: whether a text is JSON that satisfies a schema; nothing is fetched."""
    import jsonschema
    from jsonschema_specifications import REGISTRY  # without it, a $ref is fetched by network

    try:
        value = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return False
    try:
        document = json.loads(schema)
        latest = jsonschema.validators.Draft202012Validator
        judge = jsonschema.validators.validator_for(document, default=latest)
        checker = judge(document, registry=REGISTRY, format_checker=judge.FORMAT_CHECKER)
        return bool(checker.is_valid(value))
    except MemoryError:
        raise
    except Exception as error:  # whatever comes is not the output's fault
        raise GrammarError(str(error)) from error


def _no_number(name: str) -> None:
    """Python's reader takes NaN and Infinity, which JSON does not know."""
    raise ValueError(name)


def searched(pattern: str, text: str) -> bool:
    """In a checking process: what `found_in` says."""
    return re.search(pattern, text) is not None
