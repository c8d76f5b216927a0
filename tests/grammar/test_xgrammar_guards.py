"""Tests of workarounds for defects of XGrammar."""

from __future__ import annotations

import pytest
from guide_util import accepts, byte_vocabulary

from graft.grammar import GrammarError, GrammarSpec, Vocabulary
from graft.grammar.backends.xgrammar import XGrammarBackend


@pytest.mark.parametrize(
    "pattern, text",
    [
        (r"\x41b", "Ab"),
        (r"\x{41}b", "Ab"),
        (r"[\x41-\x43]b", "Cb"),
        (r"\\x41b", r"\x41b"),
        ("^a$", "a"),
        ("[$^]", "^"),
    ],
)
def test_xgrammar_patterns_are_converted(xgrammar, pattern, text):
    assert accepts(xgrammar.compile(GrammarSpec("regex", pattern)), text)
    if "\\" not in text:
        schema = {"type": "string", "pattern": pattern}
        value = GrammarSpec.json_schema(schema, backend="xgrammar")
        assert accepts(xgrammar.compile(value), f'"{text}"')


@pytest.mark.parametrize("pattern", [r"a\Zb", r"\Aa", r"a\z", r"\Qa\E", r"\h", "a^", "a$b"])
def test_xgrammar_refuses_patterns_that_it_misreads(xgrammar, pattern):
    for spec in (
        GrammarSpec("regex", pattern),
        GrammarSpec.json_schema({"type": "string", "pattern": pattern}, backend="xgrammar"),
    ):
        with pytest.raises(GrammarError, match=r"support"):
            xgrammar.compile(spec)


@pytest.mark.parametrize(
    "spec",
    [
        GrammarSpec.json_schema({"type": "string"}, backend="xgrammar"),
        GrammarSpec("regex", '"[^a]+"'),
        GrammarSpec.ebnf('root ::= "\\"" [^"]* "\\""'),
    ],
    ids=lambda spec: spec.kind,
)
def test_xgrammar_refuses_encoded_surrogates(spec):
    """The bytes of a surrogate may be one token, or several tokens. Rollback is exact."""
    bytewise = byte_vocabulary()
    tokens = [*bytewise.tokens, b"x\xed", b"\xed\xa0\x80", b"\xa0\x80", b"\xed\x9f\xbf"]
    split, surrogate, rest, valid = range(len(bytewise.tokens), len(tokens))
    backend = XGrammarBackend(Vocabulary(tokens, len(tokens), bytewise.stop_ids))
    matcher = backend.compile(spec).matcher()
    assert matcher.accept(ord('"'))
    assert not matcher.accept(surrogate) and surrogate not in matcher.legal()
    for token in (0xED, split):
        assert matcher.accept(token)
        legal = matcher.legal().tolist()
        assert 0x9F in legal and not {0xA0, 0xBF, rest} & set(legal)
        assert not matcher.accept(0xA0) and not matcher.accept(rest)
        assert matcher.accept(0x9F) and matcher.accept(0xBF)
        matcher.rollback(2)
        assert not matcher.accept(0xA0)
        matcher.rollback(1)
    assert matcher.accept(valid) and matcher.accept(ord('"'))


def test_xgrammar_accepts_stop_id_beyond_the_tokens():
    vocabulary = Vocabulary([bytes([byte]) for byte in range(256)], 300, [280])
    matcher = XGrammarBackend(vocabulary).compile(GrammarSpec.regex("a")).matcher()
    assert matcher.accept(ord("a"))
    assert matcher.legal().tolist() == [280]
    assert matcher.accept(280) and matcher.is_terminated()
