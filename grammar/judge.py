"""Whether texts fit schemas and patterns, asked of a process that can be killed.

Python's ``re`` takes exponential time for some patterns, and holds the GIL all the while: in this
process nothing else would run, no round either.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from graft.cudagraph.errors import OptionError

from .compile.process import Child, Question, ask
from .errors import GrammarError

__all__ = ["CHECK_S", "Judge", "check_output", "found_in"]

#: Seconds that the check of an output may take, and one search.
CHECK_S, SEARCH_S = 5.0, 1.0
_MEMORY_BYTES = 1 << 30
_STEPS = 1e5  # of a search that is made in this process


class Judge:
    """Checks outputs in a process of its own, one after the other.

    The process is started when it is first needed, and a new one after one was killed. Any thread
    may ask.

    Parameters
    ----------
    limit_s
        Seconds that the check of an output may take once it is taken up.
    """

    def __init__(self, limit_s: float = CHECK_S):
        if not limit_s > 0:
            raise OptionError(f"judge: limit_s is {limit_s}, must be positive")
        self._limit_s = limit_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="graft-judge")
        self._child = Child(_MEMORY_BYTES, "check")

    def satisfies(self, schema: str, text: str) -> Future[bool]:
        """Whether ``text`` is JSON that satisfies the JSON schema, formats included.

        The future raises ``GrammarError`` where there is no answer: ``jsonschema`` is not installed
        or cannot judge the schema, or the time is up.
        """
        try:
            return self._thread.submit(self._ask, schema, text)
        except RuntimeError:
            raise GrammarError(f"{_OUTPUT} cannot be checked: it is too late") from None

    def close(self) -> None:
        """Kill the process; what has not been answered fails with ``GrammarError``."""
        self._child.close()
        self._thread.shutdown()

    def _ask(self, schema: str, text: str) -> bool:
        with _named(_OUTPUT):
            return bool(self._child.ask(_satisfies(schema, text), self._limit_s))


@contextlib.contextmanager
def _named(what: str) -> Iterator[None]:
    """Say of what there is no answer."""
    try:
        yield
    except GrammarError as error:
        raise GrammarError(f"{what} cannot be checked: {error}") from error


def _satisfies(schema: str, text: str) -> Question:
    # importing jsonschema takes a second that no question is charged with
    ready = ("judge", Question(f"{__name__}:learn", ()))
    return Question(f"{__name__}:satisfies", (schema, text), ready)


def learn() -> None:
    """In a checking process: have ready what every check needs.

    Raises
    ------
    GrammarError
        If ``jsonschema`` is not installed.
    """
    sys.set_int_max_str_digits(0)
    try:
        import jsonschema  # noqa: F401
    except ImportError as error:
        raise GrammarError(str(error)) from error


def satisfies(schema: str, text: str) -> bool:
    """In a checking process: whether a text is JSON that satisfies a schema; nothing is fetched.

    Raises
    ------
    GrammarError
        If the schema cannot be judged: an unresolvable reference, a bad pattern.
    """
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


def found(pattern: str, text: str) -> bool:
    """In a checking process: what `found_in` says."""
    return re.search(pattern, text) is not None


_OUTPUT = "JSON schema: an output"


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
    with _named(_OUTPUT):
        return bool(ask(_satisfies(json.dumps(schema), text), CHECK_S))


def found_in(pattern: str, text: str) -> bool:
    """``re.search`` of a user's pattern: in this process where it cannot take long.

    It cannot where no group is repeated or referred to: at each place of the text, each of the
    ``n`` signs of repetition or choice then stands for at most ``len(text) + 1`` ways to go on.

    Raises
    ------
    re.error
        If Python cannot read the pattern.
    GrammarError
        If it takes longer than `SEARCH_S` seconds.
    """
    signs = len(re.findall(r"[*+?{|]", pattern))
    nested = re.search(r"\)[*+{]|\\[1-9]|\(\?P=", pattern)
    if nested is None and (signs + 1) * math.log(len(text) + 2) <= math.log(_STEPS):
        return re.search(pattern, text) is not None
    re.compile(pattern)
    with _named(f"pattern {pattern[:60]!r}"):
        return bool(ask(Question(f"{__name__}:found", (pattern, text)), SEARCH_S))
