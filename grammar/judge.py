"""Questions that a pattern of the user's may make endless, asked of a process that can be killed.

Python's ``re`` takes exponential time for some patterns, and holds the GIL all the while: in this
process nothing else would run, no round either.
"""

from __future__ import annotations

import atexit
import functools
import json
import math
import re
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from graft.cudagraph.errors import OptionError

from .compile_process import ChildLost, CompileProcess
from .errors import GrammarError

__all__ = ["CHECK_S", "Judge", "check_output", "found_in"]

#: Seconds that the check of an output may take, and one search.
CHECK_S, SEARCH_S = 5.0, 1.0
_MEMORY_BYTES = 1 << 30
_STEPS = 1e5  # of a search that is made in this process


class Judge:
    """Checks outputs and searches texts in a process of its own, one question after the other.

    The process is started when it is first needed, and a new one after one was killed. Any thread
    may ask.

    Parameters
    ----------
    limit_s, search_s
        Seconds that the check of an output, and a search, may take once it is taken up.
    """

    def __init__(self, limit_s: float = CHECK_S, search_s: float = SEARCH_S):
        for name, value in (("limit_s", limit_s), ("search_s", search_s)):
            if not value > 0:
                raise OptionError(f"judge: {name} is {value}, must be positive")
        self._limit_s, self._search_s = limit_s, search_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="graft-judge")
        self._lock = threading.Lock()  # guards the two below
        self._child: CompileProcess | None = None
        self._closed = False

    def satisfies(self, schema: str, text: str) -> Future[bool]:
        """Whether ``text`` is JSON that satisfies the JSON schema, formats included.

        The future raises ``GrammarError`` where there is no answer: ``jsonschema`` is not installed
        or cannot judge the schema, or the time is up.
        """
        return self._submit(_OUTPUT, "schema", schema, text)

    def search(self, pattern: str, text: str) -> Future[bool]:
        """Whether Python's ``re.search`` finds ``pattern`` in ``text``; raises as `satisfies`."""
        return self._submit(f"pattern {pattern[:60]!r}", "search", pattern, text)

    def close(self) -> None:
        """Kill the process; what has not been answered fails with ``GrammarError``."""
        with self._lock:
            self._closed = True
            if self._child is not None:
                self._child.stop()
        self._thread.shutdown()
        child, self._child = self._child, None
        if child is not None:
            child.wait()

    def _submit(self, what: str, *question: str) -> Future[bool]:
        try:
            return self._thread.submit(self._ask, what, question)
        except RuntimeError:
            raise GrammarError(f"{what} cannot be checked: it is too late") from None

    def _ask(self, what: str, question: tuple[str, ...]) -> bool:
        with self._lock:
            if self._child is None and not self._closed:
                self._child = CompileProcess(("judge", (), _MEMORY_BYTES), "check")
            child = self._child
        try:
            if self._closed or child is None:
                raise ChildLost("it is too late")
            limit_s = self._search_s if question[0] == "search" else self._limit_s
            outcome, said, _ = child.ask(question, limit_s)
        except ChildLost as error:
            if child is not None:
                child.stop()
                child.wait()
            with self._lock:
                self._child = None
            raise GrammarError(f"{what} cannot be checked: {error}") from error
        if outcome != "compiled":
            raise GrammarError(f"{what} cannot be checked: {said or 'its memory is used up'}")
        return said == "yes"


_OUTPUT = "JSON schema: an output"


@functools.cache
def _shared() -> Judge:
    """For questions asked outside an engine."""
    judge = Judge()
    atexit.register(judge.close)
    return judge


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
    return _shared().satisfies(json.dumps(schema), text).result()


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
    return _shared().search(pattern, text).result()
