"""What LLGuidance's own ways must not do: keep wrong masks, and end texts in the middle.

LLGuidance keeps its last mask past a rollback. The grammars of the first tests have places that the
library numbers alike, in texts that may go on differently: the strings of an object and of an
array, so many pieces behind the same beginning. What is right says a stock matcher that is fed each
text from the start and never goes back.
"""

from __future__ import annotations

import functools
import itertools
import json

import numpy as np
import pytest
from engine_util import TARGET
from guide_util import BYTES
from stock import StockLLGuidance

from graft.grammar import CompiledGrammar, GrammarSpec, LLGuidanceBackend, Matcher, Vocabulary

STRING = {"type": "string"}
OBJECT = {
    "type": "object",
    "properties": {"a": STRING},
    "required": ["a"],
    "additionalProperties": False,
}
EITHER = {"anyOf": [OBJECT, {"type": "array", "items": {"anyOf": [STRING, OBJECT]}}]}
SPECS = {
    "forced start": GrammarSpec.json_schema(
        {**OBJECT, "properties": {"v": EITHER}, "required": ["v"]}
    ),
    "open start": GrammarSpec.json_schema(EITHER),
}
VALUES = ['{"a": "xy', '["k", "xy', '["k", "k", "xy"', '["k", "', '["k', '[{"a": "xy', '["xy"]']


@functools.cache
def vocabulary() -> Vocabulary:
    return Vocabulary.from_tokenizer(TARGET / "tokenizer.json", 2050, [0, 3])


class PromptLookup:
    """The values as tokens a grammar takes, and the stock matcher's mask after each of them."""

    def __init__(self, spec: GrammarSpec):
        self.native = LLGuidanceBackend(vocabulary())
        stock = StockLLGuidance(vocabulary())
        self.grammar = self.native.compile(spec)
        oracle = stock.compile(spec)
        begin = '{"v": ' if "v" in spec.text.partition("anyOf")[0] else ""
        self.paths = [self._spell(oracle, begin + value) for value in VALUES]
        self.masks: dict[tuple[int, ...], np.ndarray] = {}
        for path in self.paths:
            matcher = oracle.matcher()
            for done in range(len(path) + 1):
                if done:
                    assert matcher.accept(path[done - 1])
                row = np.zeros(vocabulary().words, np.int32)
                matcher.fill(row)
                self.masks[path[:done]] = row

    def _spell(self, oracle: CompiledGrammar, text: str) -> tuple[int, ...]:
        """The longest legal token each time."""
        matcher = oracle.matcher()
        left = text.encode()
        path = []
        tokens = vocabulary().tokens
        while left:
            fitting = [t for t in matcher.legal().tolist() if tokens[t]]
            path.append(
                max(
                    (t for t in fitting if left.startswith(tokens[t])), key=lambda t: len(tokens[t])
                )
            )
            left = left[len(tokens[path[-1]]) :]
            assert matcher.accept(path[-1])
        return tuple(path)

    def check(self, matcher: Matcher, done: tuple[int, ...]) -> None:
        """The matcher's mask is the stock matcher's."""
        row = np.full(vocabulary().words, -1, np.int32)
        matcher.fill(row)
        np.testing.assert_array_equal(row, self.masks[done])


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_masks_are_of_the_text_alone_and_not_of_another(spec):
    """Random walks: on along a text, back by some tokens, on along another with that beginning,
    with masks filled at every step, at some, or hardly ever. A matcher that ends anywhere hands on
    its lexer's states to the next, and no mask of its own text."""
    texts = PromptLookup(spec)
    rng = np.random.default_rng(2)
    for walk in range(120):
        matcher = texts.grammar.matcher()
        done = ()
        share = (1.0, 0.5, 0.1)[walk % 3]
        for _ in range(40):
            nexts = {p[: len(done) + 1] for p in texts.paths if p[: len(done)] == done} - {done}
            if nexts and rng.random() < 0.8:
                done = sorted(nexts)[rng.integers(len(nexts))]
                assert matcher.accept(done[-1])
            elif done:
                back = int(rng.integers(1, len(done) + 1))
                matcher.rollback(back)
                done = done[: len(done) - back]
            if rng.random() < share:
                texts.check(matcher, done)
    for path in (path for pair in itertools.product(texts.paths, repeat=2) for path in pair):
        del matcher
        matcher = texts.grammar.matcher()
        assert all(matcher.accept(token) for token in path)
        texts.check(matcher, path)


#: A pattern under a long length bound: LLGuidance's own limits end in the middle of its texts.
BOUNDED = {
    "type": "string",
    "minLength": 1,
    "maxLength": 2000,
    "pattern": "^$|(^(?:\\S+\\s+){0,60}\\S+$)",
}
OPTIONS = {
    "anyOf": [
        {
            "type": "object",
            "properties": {f"p{i}": {"const": i}},
            "required": [f"p{i}"],
            "additionalProperties": False,
        }
        for i in range(2100)
    ]
}
OPTIONAL = {
    "type": "object",
    "properties": {f"p{i}": {"type": "integer"} for i in range(900)},
    "additionalProperties": False,
}


def choice(count: int) -> GrammarSpec:
    return GrammarSpec.choice([f"{i * 7919 % 100_003} of {count}" for i in range(count)])


def schema(value: object) -> GrammarSpec:
    return GrammarSpec.json_schema(json.dumps(value), backend="llguidance", key_order="schema")


@pytest.mark.parametrize(
    "spec, value",
    [
        (schema(BOUNDED), "what is it"),
        (schema(OPTIONS), {"p2050": 2050}),
        (schema(OPTIONAL), {"p3": 1, "p800": 2, "p899": 3}),
        (2_000, None),  # so many, stated by the test: collecting waits for none
        (100_000, None),
    ],
    ids=["long bound", "options", "optional properties", "choice", "large choice"],
)
def test_a_text_goes_through_to_its_end(spec, value):
    """It is accepted to its end, with a mask before each token, after rollbacks too."""
    spec = choice(spec) if isinstance(spec, int) else spec
    text = json.dumps(value) if value is not None else json.loads(spec.text)[1234]
    matcher = LLGuidanceBackend(BYTES).compile(spec).matcher()
    row = np.zeros(BYTES.words, np.int32)
    for byte in text.encode():
        for again in (True, False):
            matcher.fill(row)
            assert row[byte >> 5] >> (byte & 31) & 1
            assert matcher.accept(byte)
            if again:
                matcher.rollback(1)
    assert matcher.accept(256) and matcher.is_terminated()
