"""Tests of workarounds for defects of LLGuidance.

Stale masks: LLGuidance caches its last mask under the number of a parser state, and keeps the
cached mask after a rollback, although the number may then refer to another state. The grammars of
the first tests have states with equal numbers but different continuations, for example in strings
of an object and of an array. The expected masks come from a reference matcher that accepts each
text from the start and never rolls back.

Limits: With LLGuidance's default limits, a matcher can fail in the middle of a text.
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
import threading
import time

import numpy as np
import pytest
from engine_util import TARGET
from guide_util import BYTES, OTHER_STOP, STOP, byte_vocabulary
from reference_matchers import ReferenceLLGuidance

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


class ExpectedMasks:
    """Tokenized sample texts, with the reference matcher's mask after each token."""

    def __init__(self, spec: GrammarSpec):
        self.native = LLGuidanceBackend(vocabulary())
        reference = ReferenceLLGuidance(vocabulary())
        self.grammar = self.native.compile(spec)
        oracle = reference.compile(spec)
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
        """Tokenize a text with the longest legal token at each position."""
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
        """Compare the mask of a matcher that has accepted `done` with the expected mask."""
        row = np.full(vocabulary().words, -1, np.int32)
        matcher.fill(row)
        np.testing.assert_array_equal(row, self.masks[done])


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_llguidance_masks_do_not_depend_on_history(spec):
    """Matchers accept a text, roll back, and accept another text, in random order.

    Masks are filled at every step, at some steps, or rarely.
    """
    expected = ExpectedMasks(spec)
    rng = np.random.default_rng(2)
    for walk in range(120):
        matcher = expected.grammar.matcher()
        done = ()
        share = (1.0, 0.5, 0.1)[walk % 3]
        for _ in range(40):
            nexts = {p[: len(done) + 1] for p in expected.paths if p[: len(done)] == done} - {done}
            if nexts and rng.random() < 0.8:
                done = sorted(nexts)[rng.integers(len(nexts))]
                assert matcher.accept(done[-1])
            elif done:
                back = int(rng.integers(1, len(done) + 1))
                matcher.rollback(back)
                done = done[: len(done) - back]
            if rng.random() < share:
                expected.check(matcher, done)
    for path in (path for pair in itertools.product(expected.paths, repeat=2) for path in pair):
        del matcher
        matcher = expected.grammar.matcher()
        assert all(matcher.accept(token) for token in path)
        expected.check(matcher, path)


#: A pattern with a large bound on the length. LLGuidance's default limits are exceeded in the
#: middle of its texts.
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
        pytest.param(schema(OPTIONS), {"p2050": 2050}, marks=pytest.mark.full),
        pytest.param(schema(OPTIONAL), {"p3": 1, "p800": 2, "p899": 3}, marks=pytest.mark.full),
        # The number of choices; the test creates the grammar.
        (2_000, None),
        pytest.param(100_000, None, marks=pytest.mark.full),
    ],
    ids=["long bound", "options", "optional properties", "choice", "large choice"],
)
def test_llguidance_accepts_long_grammars_to_the_end(spec, value):
    """A matcher accepts the whole text, with a mask before each token and with rollbacks.

    With LLGuidance's default limits, the matcher would fail within the text.
    """
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


STOP_TERMINALS = {
    'start: "a" <|eom|>': {OTHER_STOP},
    'start: "a" (<|eom|> | "b" <|eom|>)': {OTHER_STOP, ord("b")},
    'start: "a" <|eom|>?': {STOP, OTHER_STOP},
    'start: "a" <|eom|> "b"': set(),
}


@pytest.mark.parametrize("text", STOP_TERMINALS)
def test_terminal_that_is_a_stop_id_is_the_last_token(text):
    """A stop id ends the request, so it is legal only where the grammar can end after it."""
    backend = LLGuidanceBackend(byte_vocabulary(names={"<|eom|>": OTHER_STOP}))
    matcher = backend.compile(GrammarSpec.lark(text)).matcher()
    assert not matcher.accept(OTHER_STOP) and matcher.accept(ord("a"))
    for _ in range(2):
        assert set(matcher.legal().tolist()) == STOP_TERMINALS[text]
        assert matcher.accept(OTHER_STOP) is (OTHER_STOP in STOP_TERMINALS[text])
        if OTHER_STOP in STOP_TERMINALS[text]:
            assert matcher.is_terminated()
            matcher.rollback(1)


def test_terminal_that_is_a_stop_id_of_other_requests_is_an_ordinary_token():
    backend = LLGuidanceBackend(byte_vocabulary(names={"<|eom|>": OTHER_STOP}))
    compiled = backend.compile(GrammarSpec.lark('start: "a" <|eom|> "b"'))
    matcher = compiled.matcher([STOP])
    assert matcher.accept_all([ord("a"), OTHER_STOP, ord("b"), STOP]) == 4
    assert matcher.is_terminated()


def test_tag_ends_with_a_stop_id():
    form = {
        "type": "tag",
        "begin": "x",
        "content": {"type": "any_text"},
        "end": {"type": "token", "token": "<|eom|>"},
    }
    backend = LLGuidanceBackend(byte_vocabulary(names={"<|eom|>": OTHER_STOP}))
    matcher = backend.compile(GrammarSpec.structural_format(form)).matcher()
    assert matcher.accept_all(list(b"xyz")) == 3
    assert OTHER_STOP in matcher.legal() and STOP not in matcher.legal()
    assert matcher.accept(OTHER_STOP) and matcher.is_terminated()


def test_finished_matcher_is_reset_without_the_gil():
    """Other threads run while LLGuidance resets a matcher that Python has dropped."""
    backend = LLGuidanceBackend(vocabulary())
    turns = 0
    running = True

    def take_turns():
        nonlocal turns
        while running:
            time.sleep(0)  # releases the GIL
            turns += 1

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)  # a thread keeps the GIL until it releases the GIL itself
    thread = threading.Thread(target=take_turns)
    thread.start()
    try:
        for attempt in range(100):
            pattern = f"(?i)([a-z ]{{0,50}}[aeiou]){{1,8}}{attempt}"
            matcher = backend.compile(GrammarSpec.regex(pattern)).matcher()
            before = turns
            del matcher
            others_ran = turns > before
            if others_ran:
                break
    finally:
        running = False
        thread.join()
        sys.setswitchinterval(interval)
    assert others_ran
