"""Tests that compare the native matchers with the reference matchers on random tokens."""

from __future__ import annotations

import itertools
from dataclasses import replace

import guide_util
import numpy as np
import pytest
from guide_util import OTHER_STOP, STOP, byte_vocabulary
from reference_matchers import ReferenceLLGuidance, ReferenceXGrammar
from reference_round import bits

from graft.grammar import (
    CompiledGrammar,
    GrammarBackend,
    GrammarSpec,
    Matcher,
    StructuralTag,
    Vocabulary,
)
from graft.grammar.backends.llguidance import LLGuidanceBackend
from graft.grammar.backends.xgrammar import XGrammarBackend

SIZE = 270
BACKENDS = {"xgrammar": XGrammarBackend, "llguidance": LLGuidanceBackend}
REFERENCES = {"xgrammar": ReferenceXGrammar, "llguidance": ReferenceLLGuidance}
NODE = {
    "type": "object",
    "required": ["b"],
    "additionalProperties": False,
    "properties": {
        "a": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "integer"}]},
        "abc": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
        "b": {"type": "boolean"},
    },
}
TREE = {"$ref": "#/$defs/node", "$defs": {"node": NODE}}
SPECS = {
    "schema": guide_util.SPECS["schema"],
    "tree": GrammarSpec.json_schema(TREE),
    "spaced": replace(guide_util.SPECS["schema"], whitespace="any"),
    "object": GrammarSpec.json_object(),
    "regex": GrammarSpec.regex("(ab|c)+[0-9]*/?"),
    "ebnf": GrammarSpec.ebnf('root ::= "a" ("b" | x)*\nx ::= "c" [0-9]{1,2}'),
    "choice": GrammarSpec.choice(["abab", "abc", 'a"b\\', "x\n", "\u00e9t\u00e9"]),
    "lark": GrammarSpec.lark('start: "a" item*\nitem: "b" | "(" item ")" | /[0-9]+/'),
    "tags": GrammarSpec.structural_tag(
        [
            StructuralTag.of("<f=a>", {"type": "integer"}, "</f>"),
            StructuralTag.of("<f=b>", {"enum": ["abc", "ab"]}, "</f>"),
        ],
        ["<f"],
    ),
}
# The markers cover these cases: a marker that ends inside a token or with a token, a marker that is
# a token id or the name of a token, and a marker that can start again within a partial match.
FREE = {
    "text": SPECS["regex"].after('a":'),
    "required": SPECS["choice"].after('a":', required=True),
    "token": SPECS["schema"].after(265),
    "named": SPECS["lark"].after("<end>", required=True),
    "repetitive": SPECS["regex"].after("abac"),
}
#: Tokens that occur in markers.
LIKELY = {key: [*b'a":<end>', 259, 261, 265, 266] for key in FREE} | {
    "repetitive": [*b"abc", 259, 259]
}


def compare_streams(
    native, reference, rng: np.random.Generator, length: int, kind: str
) -> tuple[int, int]:
    """Compare two matchers while they accept random tokens, some illegal, and roll back.

    Return the number of times that the matchers terminated, and the number of compared mask rows.
    """
    rows = [np.full((SIZE + 31) // 32, seed, np.int32) for seed in (-1, 0)]
    ends = 0
    taken = 0
    started = 0
    for _ in range(length):
        assert native.is_terminated() == reference.is_terminated()
        if native.is_terminated():
            ends += 1
            assert not native.accept(97) and not reference.accept(97)
            back = int(rng.integers(1, taken + 1))
            native.rollback(back)
            reference.rollback(back)
            taken -= back
            continue
        constrained = reference.fill(rows[1])
        if rng.random() < 0.7:  # sometimes no mask is filled that the library could cache
            assert native.fill(rows[0]) == constrained
            if constrained:
                np.testing.assert_array_equal(rows[0], rows[1])
            started += constrained
        legal = bits(rows[1]) if constrained else np.arange(SIZE)
        assert (legal < SIZE).all()
        if rng.random() < 0.1 or not len(legal):
            illegal = np.setdiff1d(np.arange(-3, SIZE + 3), legal)
            token = int(rng.choice([-(2**31), 2**31 - 1, *rng.choice(illegal, 5)]))
            assert not native.accept(token) and not reference.accept(token)
        else:
            likely = [t for t in LIKELY.get(kind, ()) if t in legal]
            token = int(rng.choice(likely if likely and rng.random() < 0.8 else legal))
            assert native.accept(token) and reference.accept(token), (token, legal, kind)
            taken += 1
        if taken and rng.random() < 0.15:
            back = int(rng.integers(1, taken + 1)) if rng.random() < 0.3 else 1
            native.rollback(back)
            reference.rollback(back)
            taken -= back
    return ends, started


def compile_native(backend: GrammarBackend, spec: GrammarSpec) -> CompiledGrammar:
    """Compile a grammar, without an automaton if automata allow escapes that LLGuidance refuses."""
    has_strings = any(spec is SPECS[name] for name in ("schema", "spaced", "object"))
    if has_strings and isinstance(backend, LLGuidanceBackend):
        backend = LLGuidanceBackend(vocabulary(), automata=False)
    return backend.compile(spec)


def vocabulary() -> Vocabulary:
    return byte_vocabulary(SIZE, {"<end>": 266})


@pytest.mark.parametrize(
    "specs, streams, seed, least",
    [
        pytest.param(SPECS, 150, 11, (15, 600), id="grammars"),
        pytest.param(FREE, 75, 5, (1, 180), id="markers"),
        pytest.param(SPECS, 1000, 11, (100, 4000), id="more grammars", marks=pytest.mark.full),
        pytest.param(FREE, 400, 5, (10, 1000), id="more markers", marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.full("xgrammar-grammars")
def test_native_matcher_equals_reference_matcher(name, specs, streams, seed, least, capfd):
    """Native and reference matchers have equal masks and results.

    The native matcher's mask is filled before most tokens but not before all, because the libraries
    may cache masks. For specifications with a marker, the reference matcher searches the whole text
    for the marker.
    """
    native = BACKENDS[name](vocabulary())
    reference = REFERENCES[name](vocabulary())
    rng = np.random.default_rng(seed)
    ends = 0
    rows = 0
    for kind, spec in specs.items():
        grammars = [compile_native(native, spec), reference.compile(replace(spec, marker=None))]
        for _ in range(streams // len(specs)):
            stops = [(STOP,), (OTHER_STOP,), None][rng.integers(3)]
            pair = [g.matcher(stops) for g in grammars]
            if spec.marker is not None:
                pair[1] = SearchingMatcher(pair[1], spec.marker)
            more = compare_streams(pair[0].native, pair[1], rng, int(rng.integers(5, 30)), kind)
            ends = ends + more[0]
            rows = rows + more[1]
    assert ends > least[0] and rows > least[1]
    assert capfd.readouterr().err == ""


def random_run(matcher: Matcher, rng: np.random.Generator) -> list[int]:
    """Return up to six tokens: legal ones one after the other, and perhaps others."""
    tokens: list[int] = []
    accepted = 0
    while len(tokens) < 6 and not matcher.is_terminated():
        legal = matcher.legal()
        if len(legal) and rng.random() < 0.9:
            tokens.append(int(rng.choice(legal)))
        else:
            tokens.append(int(rng.choice([STOP, -1, SIZE, 266, *range(48, 123)])))
        accepted += matcher.accept(tokens[-1])
    if matcher.is_terminated():
        tokens.append(97)
    matcher.rollback(accepted)
    return tokens


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.full("xgrammar")
def test_native_matcher_accepts_runs_of_tokens(name):
    """``accept_all`` accepts the same tokens as ``accept``, up to the first illegal one."""
    native = BACKENDS[name](vocabulary())
    reference = REFERENCES[name](vocabulary())
    rng = np.random.default_rng(3)
    counts = np.zeros(7, int)
    for spec in [*SPECS.values(), FREE["text"]]:
        grammars = [compile_native(native, spec), reference.compile(replace(spec, marker=None))]
        for _ in range(12):
            pair = [grammar.matcher() for grammar in grammars]
            if spec.marker is not None:
                pair[1] = SearchingMatcher(pair[1], spec.marker)
            for _ in range(5):
                tokens = random_run(pair[1], rng)
                size = 0
                while size < len(tokens) and pair[1].accept(tokens[size]):
                    size += 1
                assert pair[0].native.accept_all(tokens) == size, (spec, tokens)
                counts[min(size, 6)] += 1
                if pair[1].is_terminated():
                    break
                if rng.random() < 0.5:
                    np.testing.assert_array_equal(pair[0].legal(), pair[1].legal())
                if size and rng.random() < 0.5:
                    back = int(rng.integers(1, size + 1))
                    for matcher in pair:
                        matcher.rollback(back)
    assert (counts > 10).all()


def test_llguidance_matcher_accepts_runs_under_limits_of_tokens():
    """LLGuidance may ignore limits on numbers of tokens if it validates several tokens together."""
    spec = GrammarSpec.lark('start: "a" word "d"*\nword[max_tokens=2]: /[a-c]+/')
    grammar = LLGuidanceBackend(vocabulary()).compile(spec)
    for text in itertools.product(b"abd", repeat=5):
        tokens = [97, *text]
        matcher = grammar.matcher()
        size = 0
        while size < len(tokens) and matcher.accept(tokens[size]):
            size += 1
        other = grammar.matcher()
        assert other.native.accept_all(tokens) == size, text
        np.testing.assert_array_equal(other.legal(), matcher.legal())


@pytest.mark.parametrize(
    "word", ["word[max_tokens=5]: /[a-c]+/", 'word[stop="x"]: /[a-c]*/'], ids=["max_tokens", "stop"]
)
def test_llguidance_matcher_rolls_back_lexemes_with_limits(word):
    """LLGuidance cannot roll back lexemes with limits; the matcher accepts the tokens again."""
    spec = GrammarSpec.lark(f'start: "a" word "d"*\n{word}')
    grammar = LLGuidanceBackend(vocabulary()).compile(spec)
    matcher = grammar.matcher()
    for back in (1, 2, 3):
        assert matcher.native.accept_all(list(b"abc")) == 3
        matcher.rollback(back)
        expected = grammar.matcher(tokens=b"abc"[: 3 - back])
        np.testing.assert_array_equal(matcher.legal(), expected.legal())
        matcher.rollback(3 - back)


class SearchingMatcher(Matcher):
    """A reference matcher of free text, a marker and the grammar of another matcher.

    It searches the whole text for the marker at every step.
    """

    def __init__(self, inner, marker):
        super().__init__(inner.compiled, inner.stop_ids)
        self.inner = inner
        self.marker = marker
        self.text = marker.text.encode()
        self.pieces = inner.compiled.backend.vocabulary.tokens
        self.ids = marker.ids(inner.compiled.backend.vocabulary)
        self.free = []
        self.inside = 0
        self.started = False
        self.stopped = False

    def tail(self):
        """Return the text so far. A token without text never follows a part of the marker."""
        return b"".join(self.pieces[t] if t < len(self.pieces) else b"" for t in self.free)

    def found(self, token, tail):
        """Return whether the marker ends at the end of a token.

        Return None if the marker ends inside the token, or if the token has no text and follows a
        part of the marker.
        """
        if token in self.ids:
            return True
        piece = self.pieces[token] if token < len(self.pieces) else b""
        if not piece and any(tail.endswith(self.text[:n]) for n in range(1, len(self.text))):
            return None
        at = (tail + piece).find(self.text) if piece and self.text else -1
        return at >= 0 and (True if at + len(self.text) == len(tail + piece) else None)

    def accept(self, token):
        if self.started:
            accepted = self.inner.accept(token)
            self.inside += accepted
            return accepted
        if self.stopped or not 0 <= token < self.size:
            return False
        self.stopped = token in self.stop_ids
        found = False if self.stopped else self.found(token, self.tail())
        if found is None or (self.stopped and self.marker.required):
            self.stopped = False
            return False
        self.free.append(token)
        self.started = found
        return True

    def fill(self, row):
        if self.started:
            return self.inner.fill(row)
        legal = np.zeros(len(row) * 32, bool)
        tail = self.tail()
        legal[: self.size] = [self.found(token, tail) is not None for token in range(self.size)]
        if legal[: self.size].all() and not self.marker.required:
            return False
        legal[list(self.stop_ids)] = not self.marker.required
        row[:] = np.packbits(legal, bitorder="little").view(np.int32)
        return True

    def rollback(self, tokens):
        inside = min(tokens, self.inside)
        if inside:
            self.inner.rollback(inside)
            self.inside -= inside
        if tokens > inside:
            del self.free[inside - tokens :]
            self.started = self.stopped = False

    def is_terminated(self):
        return self.inner.is_terminated() if self.started else self.stopped
