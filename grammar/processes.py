"""Pool of child processes for work on grammars that could take unbounded time or memory."""

from __future__ import annotations

from typing import Any

from graft.grammar.errors import GrammarError, GrammarUnavailableError, clean_message
from graft.native.children.errors import ChildLost, ChildUnavailable
from graft.native.children.process import Call, ProcessPool

__all__ = ["POOL", "call_error", "run_call"]

#: Each process of the pool imports the grammar package when it starts.
POOL = ProcessPool(preload=("graft.grammar",))


def run_call(kind: str, call: Call) -> Any:
    """Run a call in a child process of `POOL` and return its result.

    `kind` is the kind of the grammar that the call works on, as in `Spec`. Error messages begin
    with it. Raise `GrammarError` if the called function refused the grammar or exceeded the limit
    of time or memory, and `GrammarUnavailableError` if no child process could finish the call.
    """
    try:
        return POOL.call(call)
    except ChildLost as error:
        raise call_error(kind, error) from error


def call_error(kind: str, error: ChildLost) -> GrammarError:
    """Convert the error of a call that a child process did not finish to a `GrammarError`."""
    subject = "JSON schema" if kind == "json_schema" else kind
    if isinstance(error, ChildUnavailable):
        return GrammarUnavailableError(f"{subject}: could not be compiled: {error}")
    return GrammarError(f"{subject}: {clean_message(error)}")
