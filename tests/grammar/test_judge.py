"""Questions about outputs are answered by a process that can be killed, or not at all."""

from __future__ import annotations

import json

import pytest

from graft.grammar import GrammarError, GrammarSpec, check_output
from graft.grammar import validate as judge
from graft.grammar.validate import found_in

ENDLESS = "^(a+)+$"
HOPELESS = "a" * 400 + "!"


def test_a_verdict_that_takes_for_ever_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pattern that keeps Python's re busy for ever costs its process; the next one answers."""
    schema = {"pattern": ENDLESS}
    monkeypatch.setattr(judge, "CHECK_S", 600)
    assert check_output(schema, '"aa"')
    monkeypatch.setattr(judge, "CHECK_S", 0.2)
    with pytest.raises(GrammarError, match=r"output cannot be checked: took longer than 0.2 s"):
        check_output(schema, json.dumps(HOPELESS))
    monkeypatch.setattr(judge, "CHECK_S", 600)
    assert not check_output(schema, '"ab"')
    with pytest.raises(GrammarError, match=r"output cannot be checked: .*nowhere"):
        check_output({"$ref": "https://example.com/nowhere"}, "1")


def test_patterns_of_a_schema_never_keep_the_router_busy() -> None:
    """A pattern that could is tried in a process that can be killed, then refused by name."""
    schema = {
        "type": "object",
        "properties": {HOPELESS: {"type": "integer"}},
        "patternProperties": {ENDLESS: {"minimum": 1}},
    }
    assert found_in("^(ab?)+$", "aab") and not found_in("^(ab?)+$", "b")
    with pytest.raises(GrammarError, match=r"pattern '\^\(a\+\)\+\$' cannot be checked: took"):
        GrammarSpec.json_schema(schema, key_order="any")


def test_texts_are_checked_against_the_whole_schema() -> None:
    """Satisfying texts are told from violating ones and from what is no JSON, such as NaN."""
    schema = {"type": "array", "uniqueItems": True, "items": {"format": "date"}}
    assert check_output(schema, '["2024-02-29"]') and check_output({"type": "number"}, "1.5")
    for text in ('["2024-02-29", "2024-02-29"]', '["2023-02-29"]', '["2024-02-29"'):
        assert not check_output(schema, text)
    for text in ("NaN", "-Infinity"):
        assert not check_output({"type": "number"}, text)
