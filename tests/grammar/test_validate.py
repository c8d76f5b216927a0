"""Tests of the time limits of checks against JSON schemas and of searches for patterns."""

from __future__ import annotations

import contextlib
import json

import pytest

from graft.grammar import GrammarError, GrammarSpec, check_output, resolve_spec, validate
from graft.grammar.schema.router import route
from graft.grammar.validate import search_pattern

EXPONENTIAL = "^(a+)+$"
LONG_TEXT = "a" * 400 + "!"


def test_check_output_times_out_on_catastrophic_backtracking(monkeypatch: pytest.MonkeyPatch):
    """After the time limit, the child process is killed. The next check runs in another process."""
    schema = {"pattern": EXPONENTIAL}
    monkeypatch.setattr(validate, "CHECK_TIMEOUT_S", 600)
    assert check_output(schema, '"aa"')
    monkeypatch.setattr(validate, "CHECK_TIMEOUT_S", 0.1)
    with pytest.raises(GrammarError, match=r"output cannot be checked: took longer than 0.1 s"):
        check_output(schema, json.dumps(LONG_TEXT))
    monkeypatch.setattr(validate, "CHECK_TIMEOUT_S", 600)
    assert not check_output(schema, '"ab"')


def test_check_output_fetches_no_reference():
    with pytest.raises(GrammarError, match=r"output cannot be checked: .*nowhere"):
        check_output({"$ref": "https://example.com/nowhere"}, "1")


def test_router_refuses_pattern_with_catastrophic_backtracking(monkeypatch):
    """A search that could take unbounded time runs in a child process with a time limit."""
    schema = {
        "type": "object",
        "properties": {LONG_TEXT: {"type": "integer"}},
        "patternProperties": {EXPONENTIAL: {"minimum": 1}},
    }
    assert search_pattern("^(ab?)+$", "aab") and not search_pattern("^(ab?)+$", "b")
    monkeypatch.setattr(validate, "SEARCH_TIMEOUT_S", 0.1)
    with pytest.raises(GrammarError, match=r"pattern '\^\(a\+\)\+\$' cannot be checked: took"):
        resolve_spec(GrammarSpec.json_schema(schema, key_order="any"), "llguidance")


@pytest.mark.parametrize(
    ("pattern", "matching"),
    [
        ("[[a]", "[a"),
        ("[^[&-~]", ' !"#$%'),
        ("[+--]", "+,-"),
        ("[--/]", "-./"),
        ("[a&&b]", "ab&"),
        ("[a||b~~c]", "abc|~"),
        (r"[\[[]", "["),
        (r"[\d-x]", "0123456789-x"),
        (r"[x-\d]", "0123456789-x"),
        (r"[\--/]", "-./"),
        ("[a-]", "a-"),
        ("[-a]", "a-"),
    ],
)
def test_patterns_of_users_cause_no_warnings(pattern, matching, recwarn):
    """Python's ``re`` warns about classes that may get another meaning in future versions."""
    characters = [chr(code) for code in range(32, 127)]
    assert {c for c in characters if search_pattern(f"^{pattern}$", c)} == set(matching)
    options = [{"type": "string", "pattern": pattern, "maxLength": 3}, {"enum": ["1", "2"]}]
    with contextlib.suppress(GrammarError):
        route({"oneOf": options})
    assert not recwarn.list


def test_check_output_applies_formats_and_rejects_non_json_numbers():
    schema = {"type": "array", "uniqueItems": True, "items": {"format": "date"}}
    assert check_output(schema, '["2024-02-29"]') and check_output({"type": "number"}, "1.5")
    for text in ('["2024-02-29", "2024-02-29"]', '["2023-02-29"]', '["2024-02-29"'):
        assert not check_output(schema, text)
    for text in ("NaN", "-Infinity"):
        assert not check_output({"type": "number"}, text)


@pytest.mark.parametrize(
    "schema, valid, invalid",
    [
        ({"multipleOf": 0.1}, ["0.3", "1e2"], ["0.35"]),
        ({"minimum": 2**53 + 1}, [str(2**53 + 1)], [str(2**53), f"{2**53}.0"]),
        ({"type": "integer"}, ["1.0", "1e2"], ["1.5", "1e-1"]),
        ({"uniqueItems": True}, ["[0, false]"], ["[1, 1.0]", "[0.1, 0.10]"]),
        ({"properties": {"a": {"type": "null"}}}, ['{"a": 1, "a": null}'], ['{"a": null, "a": 1}']),
        ({}, ["1e400"], ["1e99999999999999999999"]),
    ],
    ids=str,
)
def test_check_output_calculates_exactly(schema: object, valid: list[str], invalid: list[str]):
    assert all(check_output(schema, text) for text in valid)
    assert not any(check_output(schema, text) for text in invalid)
