"""Compares the mask rows of automata with those of other matchers, along random texts."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence

import numpy as np
from rule_matcher import RuleMatcher
from unescaped_matcher import FIRST_BYTE, UnescapedMatcher

from graft.grammar import CompiledGrammar, GrammarSpec, LLGuidanceBackend, Matcher, Vocabulary
from graft.grammar.automaton.lower import lower
from graft.grammar.resolve import resolve_for_backend

STOP = 1
_TEXTS = r"""
{" ": "," ", " } }} }] ], ": {" ": [" null true false .5 00 10 -1 e+ \u00 \" \n \\ é 日本 😀 name
type id "id" string "} "] {} [] }}} ]] }, "}} "}] 1, 1} :// 2024- 01 ab abc <a <a> </a> </b> <think>
</think> <f= [g] ok
"""


def _make_vocabulary() -> Vocabulary:
    """Return a vocabulary of all bytes, parts of JSON texts, and random texts."""
    generator = random.Random(0)
    texts = dict.fromkeys(text.encode() for text in [*_TEXTS.split(), '": "', ", ", "</b> "])
    for _ in range(200):
        length = generator.randint(2, 5)
        texts[bytes(generator.choice(b'abc019-.: ,"{}[]\xc3\xa9\n\\') for _ in range(length))] = (
            None
        )
    longer = [text for text in texts if len(text) > 1]
    tokens = [b"", b"", *(bytes([byte]) for byte in range(256)), *longer]
    return Vocabulary(tokens, len(tokens) + 5, [STOP])


VOCABULARY = _make_vocabulary()
BACKEND = LLGuidanceBackend(VOCABULARY)
WITHOUT_AUTOMATA = LLGuidanceBackend(VOCABULARY, automata=False)


def compile_both(spec: GrammarSpec) -> CompiledGrammar:
    """Compile a grammar, which must have an automaton, with `BACKEND`."""
    compiled = BACKEND.compile(spec)
    assert compiled.automaton is not None, spec.text[:200]
    return compiled


@functools.lru_cache(maxsize=64)
def _compile_without_automaton(spec: GrammarSpec) -> CompiledGrammar:
    return WITHOUT_AUTOMATA.compile(spec)


def llguidance_matcher(compiled: CompiledGrammar) -> Matcher:
    """Return a matcher of LLGuidance at the start of a grammar."""
    return _compile_without_automaton(compiled.spec).matcher()


def unescaped_matcher(compiled: CompiledGrammar) -> UnescapedMatcher:
    """Return an `UnescapedMatcher` at the start of a grammar."""
    return UnescapedMatcher(_compile_without_automaton(compiled.spec), VOCABULARY)


def legal_ids(matcher: Matcher) -> list[int]:
    """Return the legal token ids in a matcher's state."""
    row = np.zeros(VOCABULARY.words, np.int32)
    assert matcher.fill(row)
    return np.unpackbits(row.view(np.uint8), bitorder="little").nonzero()[0].tolist()


def require_equal_walks(
    spec: GrammarSpec, walks: int = 6, length: int = 40, pieces: Sequence[str] = ()
) -> int:
    """Require that an automaton and LLGuidance allow the same tokens along random texts.

    Tokens with escapes are compared as `UnescapedMatcher` does.

    With `pieces`, half of the walks consist of these texts where they are legal. Return the number
    of compared mask rows.
    """
    compiled = compile_both(spec)
    generator = random.Random(spec.text)
    rows = 0
    for walk in range(walks):
        automaton, expected = compiled.matcher(), unescaped_matcher(compiled)
        text = b""
        for _ in range(length):
            legal = legal_ids(automaton)
            expected.require_row(legal, text)
            expected.require_escapes(automaton, text)
            rows += 1
            steps = _piece(expected, pieces, generator) if walk % 2 else []
            if not steps:
                steps = [_token(legal, generator)]
                if steps == [STOP]:
                    break
                if not expected.accept(steps[0]):
                    assert not expected.allows_controls
                    break
            for token in steps:
                assert automaton.accept(token)
            text += b"".join(VOCABULARY.tokens[token] for token in steps)
    return rows


def require_oracle_walks(spec: GrammarSpec, walks: int = 4, length: int = 30) -> None:
    """Require that an automaton allows the tokens that `RuleMatcher` allows, along random texts."""
    compiled = compile_both(spec)
    oracle = RuleMatcher(lower(resolve_for_backend(spec, "llguidance")))
    generator = random.Random(spec.text)
    for _ in range(walks):
        automaton = compiled.matcher()
        node = oracle.start
        text = b""
        for _ in range(length):
            _, ends = oracle.legal(node)
            expected = [STOP] if ends else []
            for token, spelled in enumerate(VOCABULARY.tokens):
                if spelled and oracle.is_prefix(spelled, node):
                    expected.append(token)
            legal = legal_ids(automaton)
            _require_equal(legal, expected, text)
            token = _token(legal, generator)
            if token == STOP:
                break
            assert automaton.accept(token)
            node = oracle.after(VOCABULARY.tokens[token], node)
            text += VOCABULARY.tokens[token]


def _require_equal(legal: list[int], expected: list[int], text: bytes) -> None:
    if legal != expected:
        tokens = [*VOCABULARY.tokens]
        more = [tokens[token] for token in legal if token not in expected]
        fewer = [tokens[token] for token in expected if token not in legal]
        raise AssertionError(f"after {text!r}: also allows {more[:8]}, does not allow {fewer[:8]}")


def _token(legal: list[int], generator: random.Random) -> int:
    """Choose a legal token; tokens of JSON's syntax and of numbers are preferred."""
    tokens = VOCABULARY.tokens
    going_on = [token for token in legal if token != STOP]
    chance = generator.random()
    wanted = b'"}],:{[\\<' if chance < 0.4 else b"0123456789-+.eE" if chance < 0.5 else b""
    preferred = []
    if wanted:
        preferred = [token for token in going_on if tokens[token][0] in wanted]
    return generator.choice(preferred or going_on or [STOP])


def _piece(matcher: UnescapedMatcher, pieces: Sequence[str], generator: random.Random) -> list[int]:
    """Let a matcher accept the bytes of a legal piece, and return their tokens."""
    for piece in generator.sample(pieces, len(pieces)):
        accepted: list[int] = []
        for byte in piece.encode():
            if not matcher.accept(FIRST_BYTE + byte):
                break
            accepted.append(FIRST_BYTE + byte)
        if len(accepted) == len(piece.encode()):
            return accepted
        matcher.rollback(len(accepted))
    return []
