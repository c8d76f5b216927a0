"""Native and stock matchers of every backend, step by step on random token streams."""

from __future__ import annotations

import numpy as np
import pytest
from guide_util import OTHER_STOP, STOP, byte_vocabulary

from graft.grammar import GrammarSpec, LLGuidanceBackend, StructuralTag, XGrammarBackend

SIZE = 270
STREAMS = 1000
BACKENDS = {"xgrammar": XGrammarBackend, "llguidance": LLGuidanceBackend}
SCHEMA = {
    "type": "object",
    "properties": {
        "abc": {"type": "string", "maxLength": 6},
        "n": {"type": "array", "items": {"type": "number"}, "maxItems": 3},
        "b": {"enum": [1, "true"]},
    },
    "required": ["abc", "n"],
}
SPECS = {
    "schema": GrammarSpec.json_schema(SCHEMA),
    "spaced": GrammarSpec.json_schema(SCHEMA, any_whitespace=True),
    "object": GrammarSpec.json_object(),
    "regex": GrammarSpec.regex("(ab|c)+[0-9]*/?"),
    "ebnf": GrammarSpec.ebnf('root ::= "a" ("b" | x)*\nx ::= "c" [0-9]{1,2}'),
    "choice": GrammarSpec.choice(["abab", "abc", 'a"b\\', "x\n", "\u00e9t\u00e9"]),
    "lark": GrammarSpec.lark(
        'start: "a" item*\nitem: "b" | "(" item ")" | NUMBER\nNUMBER: /[0-9]+/'
    ),
    "tags": GrammarSpec.structural_tag(
        [
            StructuralTag.of("<f=a>", {"type": "integer"}, "</f>"),
            StructuralTag.of("<f=b>", {"enum": ["abc", "ab"]}, "</f>"),
        ],
        ["<f"],
    ),
}


def stream(native, stock, rng: np.random.Generator, length: int, kind: str) -> int:
    """Feed both the same tokens, a tenth of them illegal, with rollbacks; returns the endings."""
    rows = [np.full((SIZE + 31) // 32, seed, np.int32) for seed in (-1, 0)]
    ends, taken = 0, 0
    for _ in range(length):
        assert native.is_terminated() == stock.is_terminated()
        if native.is_terminated():
            ends += 1
            assert not native.accept(97) and not stock.accept(97)
            back = int(rng.integers(1, taken + 1))
            native.rollback(back)
            stock.rollback(back)
            taken -= back
            continue
        assert [native.fill(rows[0]), stock.fill(rows[1])] == [True, True]
        np.testing.assert_array_equal(rows[0], rows[1])
        bits = np.unpackbits(rows[0].view(np.uint8), bitorder="little")
        assert not bits[SIZE:].any()
        legal = np.flatnonzero(bits)
        if rng.random() < 0.1 or not len(legal):
            illegal = np.setdiff1d(np.arange(-3, SIZE + 3), legal)
            token = int(rng.choice([-(2**31), 2**31 - 1, *rng.choice(illegal, 5)]))
            assert not native.accept(token) and not stock.accept(token)
        else:
            token = int(rng.choice(legal))
            assert native.accept(token) and stock.accept(token), (token, legal, kind)
            taken += 1
        if taken and rng.random() < 0.15:
            back = int(rng.integers(1, taken + 1)) if rng.random() < 0.3 else 1
            native.rollback(back)
            stock.rollback(back)
            taken -= back
    return ends


@pytest.mark.parametrize("name", BACKENDS)
def test_native_and_stock_masks_are_equal_at_every_step(name, capfd):
    """Of 1,000 streams with illegal ids, rollbacks and endings, every mask and answer is equal."""
    vocabulary = byte_vocabulary(SIZE)
    native = BACKENDS[name](vocabulary)
    stock = BACKENDS[name](vocabulary, native=False)
    rng = np.random.default_rng(11)
    ends = 0
    for kind, spec in SPECS.items():
        grammars = [backend.compile(spec) for backend in (native, stock)]
        for _ in range(STREAMS // len(SPECS)):
            stops = [(STOP,), (OTHER_STOP,), None][rng.integers(3)]
            pair = [g.backend.matcher(g, stops) for g in grammars]
            assert pair[0].native is not None and pair[1].native is None
            ends += stream(NativeSide(pair[0]), pair[1], rng, int(rng.integers(5, 30)), kind)
    assert ends > STREAMS // 10
    printed = capfd.readouterr()
    assert printed.err == ""


class NativeSide:
    """A matcher's native methods, called as the worker calls them."""

    def __init__(self, matcher):
        self._matcher = matcher
        self.accept, self.rollback = matcher.native.accept, matcher.native.rollback
        self.fill, self.is_terminated = matcher.native.fill, matcher.native.is_terminated
