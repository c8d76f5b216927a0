"""Check finished texts against JSON schemas, and search texts for patterns.

Python's ``re`` takes exponential time for some patterns and holds the GIL during a search. A search
that could take unbounded time therefore runs in a child process that can be killed.
"""

from __future__ import annotations

import decimal
import json
import math
import re
import sys
from typing import Any

from graft.grammar.errors import GrammarError, GrammarUnavailableError, clean_message
from graft.grammar.processes import POOL
from graft.grammar.regular.regex import CHARACTER_CLASS
from graft.native.children.errors import ChildLost, ChildUnavailable
from graft.native.children.process import Call, Setup

__all__ = [
    "CHECK_TIMEOUT_S",
    "SEARCH_TIMEOUT_S",
    "check_output",
    "python_pattern",
    "search_pattern",
]

#: Time limits of one `check_output` and one `search_pattern`, in seconds.
CHECK_TIMEOUT_S = 5.0
SEARCH_TIMEOUT_S = 1.0
_MAX_STEPS = 1e5  # maximum number of steps of a search in this process
_MAX_DIGITS = 1000  # precision of calculations with decimal fractions
_EXACT = decimal.Context(prec=2 * _MAX_DIGITS, Emax=decimal.MAX_EMAX, Emin=decimal.MIN_EMIN)
_IN_CLASS = {r"\d": "0-9", r"\w": "A-Za-z0-9_"}
#: A range, or a single character, within a character class.
_CLASS_ITEM = re.compile(r"(?P<first>\\.|[^\\])-(?P<last>\\.|[^\\\]])|(?P<single>\\.|.)", re.DOTALL)
_OUTSIDE_CLASS = {
    "$": r"\Z",
    ".": r"[^\n\r\u2028\u2029]",
    r"\d": "[0-9]",
    r"\D": "[^0-9]",
    r"\w": "[A-Za-z0-9_]",
    r"\W": "[^A-Za-z0-9_]",
}
_MODULE = __name__ + ":"


def check_output(schema: Any, text: str) -> bool:
    """Return whether a finished text is JSON that satisfies the schema, including its formats.

    Numbers are compared exactly. If an object repeats a name, the last value counts.

    Call this function for outputs of partially enforced schemas: the engine does not check finished
    outputs. The function requires the package ``jsonschema``. References to other documents are
    never fetched.

    Raises
    ------
    GrammarError
        ``jsonschema`` is not installed, it raised an exception (for example because of a reference
        to another document), or the check took longer than `CHECK_TIMEOUT_S`.
    """
    # The import of jsonschema takes a second. It is a `Setup` of the call, because the time of a
    # `Setup` does not count towards the time limit.
    setup = Setup("jsonschema", _MODULE + "import_jsonschema", ())
    request = Call(_MODULE + "satisfies_schema", (json.dumps(schema), text), setup)
    return _call_bounded("JSON schema: an output", request, CHECK_TIMEOUT_S)


def search_pattern(pattern: str, text: str) -> bool:
    """Return whether ``re.search`` finds a match of a user's ECMA-262 pattern in the text.

    The search runs in this process if it provably takes at most `_MAX_STEPS` steps, and in a child
    process otherwise. The number of steps is bounded if the pattern repeats no group and
    has no back-reference. The search for a pattern with ``n`` repetition and alternation operators
    then takes at most ``(len(text) + 2) ** (n + 1)`` steps: it tries each position of the text, and
    each operator has at most ``len(text) + 1`` continuations.

    Raises
    ------
    GrammarError
        The search took longer than `SEARCH_TIMEOUT_S`.
    re.error
        The pattern is not valid for ``re``.
    """
    original = pattern
    pattern = python_pattern(pattern)
    operators = len(re.findall(r"[*+?{|]", pattern))
    nested = re.search(r"\)[*+{]|\\[1-9]|\(\?P=", pattern)
    log_steps = (operators + 1) * math.log(len(text) + 2)
    if nested is None and log_steps <= math.log(_MAX_STEPS):
        return re.search(pattern, text) is not None
    re.compile(pattern)
    request = Call(_MODULE + "search", (pattern, text))
    return _call_bounded(f"pattern {original[:60]!r}", request, SEARCH_TIMEOUT_S)


def python_pattern(pattern: str) -> str:
    """Convert an ECMA-262 pattern to an equivalent pattern for Python's ``re``.

    In ECMA-262, unlike in ``re``, ``$`` does not match before a final line feed, ``\\d`` and
    ``\\w`` match only ASCII characters, and ``.`` matches no line separators. ``re``
    warns about some classes, such as ``[[a]``, but not about the result of this function.
    """

    def replacement(match: re.Match[str]) -> str:
        if match[0].startswith("["):
            begin = 2 if match[0].startswith("[^") else 1
            return match[0][:begin] + _CLASS_ITEM.sub(_python_class_item, match[0][begin:])
        return _OUTSIDE_CLASS.get(match[0], match[0])

    return re.sub(rf"\\.|{CHARACTER_CLASS}|[.$]", replacement, pattern, flags=re.DOTALL)


def _python_class_item(match: re.Match[str]) -> str:
    """Convert a character, a range or a class such as ``\\d`` within a character class."""
    ends = [match["single"]] if match["single"] else [match["first"], match["last"]]
    hyphen = "-" if _IN_CLASS.keys().isdisjoint(ends) else r"\-"
    return hyphen.join(_IN_CLASS.get(end, rf"\{end}" if end in "-[&|~" else end) for end in ends)


def _call_bounded(subject: str, request: Call, timeout_s: float) -> bool:
    try:
        return bool(POOL.call(request, timeout_s))
    except ChildUnavailable as error:
        raise GrammarUnavailableError(f"{subject} cannot be checked: {error}") from error
    except (GrammarError, ChildLost) as error:
        raise GrammarError(f"{subject} cannot be checked: {clean_message(error)}") from error


# Functions that run in a child process.


def import_jsonschema() -> None:
    """Import ``jsonschema``, and allow integers of any length in its checks."""
    sys.set_int_max_str_digits(0)
    try:
        import jsonschema  # noqa: F401
    except ImportError as error:
        raise GrammarError(str(error)) from error


def satisfies_schema(schema: str, text: str) -> bool:
    """Return whether a text is JSON that satisfies a schema, given as JSON text."""
    import jsonschema
    from jsonschema_specifications import REGISTRY  # without it, jsonschema fetches references

    try:
        value = _parse(text)
    except (ValueError, ArithmeticError, RecursionError):
        return False
    try:
        document = _parse(schema)
        latest = jsonschema.validators.Draft202012Validator
        validator = jsonschema.validators.validator_for(document, default=latest)
        checker = validator(document, registry=REGISTRY, format_checker=validator.FORMAT_CHECKER)
        with decimal.localcontext(_EXACT):
            return bool(checker.is_valid(value))
    except MemoryError:
        raise
    except Exception as error:  # jsonschema raises exceptions of many types for a bad schema
        raise GrammarError(str(error)) from error


def _parse(text: str) -> Any:
    """Parse a JSON text. Numbers become integers or decimal fractions."""
    return json.loads(text, parse_float=_exact_number, parse_constant=_reject_constant)


def _exact_number(text: str) -> Any:
    """Parse a number with a fraction or exponent.

    The result is an int if the value is whole, because jsonschema does not recognize a ``Decimal``
    as an integer.
    """
    value = decimal.Decimal(text)
    if value.adjusted() < _MAX_DIGITS and value == value.to_integral_value():
        return int(value)
    return value


def _reject_constant(name: str) -> None:
    """Refuse NaN and Infinity, which Python's JSON reader accepts."""
    raise ValueError(name)


def search(pattern: str, text: str) -> bool:
    """Return whether ``re.search`` finds a match of the pattern in the text."""
    return re.search(pattern, text) is not None
