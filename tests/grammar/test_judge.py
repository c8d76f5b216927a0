"""Questions about outputs are answered by a process that can be killed, or not at all."""

from __future__ import annotations

import json

import pytest

from graft.grammar import GrammarError, GrammarSpec, check_output
from graft.grammar import judge as judge_module
from graft.grammar.judge import Judge, found_in

ENDLESS = "^(a+)+$"
HOPELESS = "a" * 400 + "!"


def test_a_verdict_that_takes_for_ever_is_no_verdict() -> None:
    """A pattern that keeps Python's re busy for ever costs its process; the next one answers."""
    judge = Judge(limit_s=600)
    try:
        schema = json.dumps({"pattern": ENDLESS})
        assert judge.satisfies(schema, '"aa"').result(600)
        judge._limit_s = 0.2
        with pytest.raises(GrammarError, match=r"output cannot be checked: took longer than 0.2 s"):
            judge.satisfies(schema, json.dumps(HOPELESS)).result(600)
        judge._limit_s = 600
        assert not judge.satisfies(schema, '"ab"').result(600)
        with pytest.raises(GrammarError, match=r"output cannot be checked: .*nowhere"):
            judge.satisfies('{"$ref": "https://example.com/nowhere"}', "1").result(600)
        running = judge.satisfies(schema, json.dumps(HOPELESS))
    finally:
        child = judge._child
        judge.close()
    assert child is not None and child._process.returncode is not None, "nothing is left behind"
    with pytest.raises(GrammarError, match="cannot be checked"):
        running.result(600)
    with pytest.raises(GrammarError, match="too late"):
        judge.satisfies(schema, "1")


def test_patterns_of_a_schema_never_keep_the_router_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pattern that could is tried in a process that can be killed, then refused by name."""
    judge = Judge(search_s=600)
    monkeypatch.setattr(judge_module, "_shared", lambda: judge)
    schema = {"type": "object", "properties": {HOPELESS: {"type": "integer"}},
              "patternProperties": {ENDLESS: {"minimum": 1}}}  # fmt: skip
    try:
        assert found_in("^(ab?)+$", "aab") and not found_in("^(ab?)+$", "b")  # starts the process
        judge._search_s = 0.2
        with pytest.raises(GrammarError, match=r"pattern '\^\(a\+\)\+\$' cannot be checked: took"):
            GrammarSpec.json_schema(schema, backend="auto")
    finally:
        judge.close()


def test_no_json_constants() -> None:
    """NaN and Infinity are Python's, not JSON's."""
    assert check_output({"type": "number"}, "1.5")
    assert not check_output({"type": "number"}, "NaN")
    assert not check_output({"type": "number"}, "-Infinity")
