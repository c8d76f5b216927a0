"""Tests of grammars with errors that only a backend can find.

The errors are reported by `GrammarSpec.check`, the compile service and the engine.
"""

from __future__ import annotations

import pytest
from engine_util import demo_engine

from graft.grammar import GrammarError, GrammarSpec, StructuralTag
from graft.models.request import Request

pytest.importorskip("llguidance")
BAD_PATTERN = {"type": "string", "pattern": "(a"}
INVALID = {
    "regex": GrammarSpec.regex("a(b"),
    "regex with look-ahead": GrammarSpec.regex("a(?=b)"),
    "ebnf": GrammarSpec.ebnf("root ::= x"),
    "lark": GrammarSpec.lark("start: x"),
    "schema": GrammarSpec.json_schema({"type": "string", "not": {"format": "email"}}),
    "pattern in a schema": GrammarSpec.json_schema(BAD_PATTERN, backend="auto"),
    "structural tag": GrammarSpec.structural_tag(
        [StructuralTag.of("<f>", BAD_PATTERN, "</f>")], ["<f"]
    ),
}


def error_of(spec: GrammarSpec) -> str:
    with pytest.raises(GrammarError) as caught:
        spec.check()
    return str(caught.value)


@pytest.mark.parametrize("spec", INVALID.values(), ids=INVALID)
def test_compile_service_reports_the_error_of_grammar_check(serve, spec):
    error = serve("auto").submit(spec).exception(timeout=300)
    assert isinstance(error, GrammarError) and str(error) == error_of(spec)


@pytest.mark.full
def test_engine_fails_request_with_ambiguous_grammar():
    """Each token takes twice as long as the last. The request fails; others are unaffected."""
    text = '"a"'
    for depth in range(60):
        text = f"({text})" + ("*" if depth % 2 == 0 else "{1,9}")
    ambiguous = GrammarSpec.ebnf(f'root ::= ({text} "b"{{1,3000}}){{1,60}} "c"')
    runaway = Request(prompt="a", grammar=ambiguous, max_tokens=500)
    other = Request(prompt="Count.", grammar=GrammarSpec.regex("[0-9]{60}"), temperature=0.0)
    with demo_engine(max_batch_size=2) as engine:
        [alone] = engine.generate([other])
        failed, served = engine.generate([runaway, other])
    assert failed.reason == "error" and "the grammar is too slow" in failed.error
    assert failed.error_type == "MatcherError"
    assert served.reason == "stop" and served.tokens == alone.tokens


def test_engine_refuses_invalid_grammars_at_submission():
    """submit() does not raise. Only the request with the invalid grammar ends with the error."""
    requests = [Request(prompt="?", grammar=spec, max_tokens=8) for spec in INVALID.values()]
    valid = Request(prompt="Code?", grammar=GrammarSpec.regex("[0-9]{3}"), max_tokens=24)
    with demo_engine(max_batch_size=4) as engine:
        *refused, served = engine.generate([*requests, valid])
    assert served.reason == "stop" and len(served.text) == 3
    for spec, output in zip(INVALID.values(), refused, strict=True):
        assert output.reason == "refused" and output.error_type == "GrammarError"
        assert output.error == error_of(spec) and not output.tokens
