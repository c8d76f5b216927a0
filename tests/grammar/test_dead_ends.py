"""Tests of dead ends, that is, of states in which no token is legal.

If no token is legal for the target model, the request ends with the reason ``"dead_end"``. If some
tokens are legal but none of them is in the drafter's vocabulary, only the drafts of the round end.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from engine_util import demo_engine, mixed_requests

from graft.grammar import GrammarSpec, Vocabulary, XGrammarBackend
from graft.models.request import Request


def xgrammar_without(
    is_removed: Callable[[int, bytes], bool],
) -> Callable[[Vocabulary], XGrammarBackend]:
    """Return a factory of XGrammar backends whose vocabulary lacks the text of some tokens."""

    def make(known: Vocabulary) -> XGrammarBackend:
        tokens = [b"" if is_removed(id, text) else text for id, text in enumerate(known.tokens)]
        return XGrammarBackend(Vocabulary(tokens, known.size, known.stop_ids))

    return make


def generate_both(requests: list[Request], masking: str, **options: Any) -> list:
    """Generate the outputs of requests without a drafter and with a drafter."""
    outputs = []
    for drafting in ({"speculation": False}, {"draft_masking": masking}):
        with demo_engine(**drafting, **options) as engine:
            outputs.append(engine.generate(requests))
    return outputs


def results_of(outputs: list) -> list[tuple[str, list[int]]]:
    """Return the finish reason and the tokens of each output."""
    return [(output.reason, output.tokens) for output in outputs]


@functools.cache
def demo_vocabularies() -> tuple[list[bytes], np.ndarray]:
    """Return the tokens of the demo model, and the ids that its drafter can propose."""
    with demo_engine() as engine:
        tokens = engine._built.compiler.backend.vocabulary.tokens
        return tokens, engine._resources.drafter.vocab.d2t.to_host()


@pytest.mark.parametrize("masking", ["auto", "probe"])
def test_grammar_dead_end_finishes_only_its_request(masking: str) -> None:
    """A request whose grammar requires a text that no token spells ends with a dead end.

    The tokens of other requests do not change.
    """
    backend = xgrammar_without(lambda id, text: b"~" in text)
    others = [
        Request(prompt=f"Say {word}.", grammar=GrammarSpec.choice([word, "no"]), max_tokens=20)
        for word in ("yes", "perhaps")
    ]
    late = Request(prompt="Say.", grammar=GrammarSpec.ebnf('root ::= "abc" [0-9]{3} "~"'))
    immediate = Request(prompt="Say.", grammar=GrammarSpec.ebnf('root ::= "~"'))
    options = {"grammar_backend": backend, "draft_masking": masking, "max_batch_size": 4}
    with demo_engine(**options) as engine:
        alone = engine.generate(others)
        mixed = engine.generate([late, others[0], immediate, others[1]])
        counters = engine.counters()["grammar"]
    late_output, first, immediate_output, second = mixed
    assert results_of([first, second]) == results_of(alone)
    assert late_output.reason == "dead_end"
    assert late_output.text.startswith("abc")
    assert len(late_output.text) == 6
    assert immediate_output.reason == "dead_end"
    assert immediate_output.tokens == []
    assert counters["desyncs"] == counters["errors"] == 0
    assert counters["dead_ends"] >= 2


@pytest.mark.parametrize("masking", ["auto", pytest.param("probe", marks=pytest.mark.full)])
def test_grammar_outside_draft_vocabulary_is_decoded_without_drafts(masking: str) -> None:
    """If no candidate of the drafter is legal, the output is the same as without a drafter."""
    known = np.zeros(1 << 16, bool)
    known[demo_vocabularies()[1]] = True
    backend = xgrammar_without(lambda id, text: bool(known[id]))
    words = GrammarSpec.regex("[ -~]{20}")
    requests = [
        Request(prompt=request.prompt, grammar=words, max_tokens=24)
        for request in mixed_requests(3)
    ]
    options = {"grammar_backend": backend, "max_batch_size": 4}
    plain, drafted = generate_both(requests, masking, **options)
    assert results_of(drafted) == results_of(plain)
    for output in drafted:
        assert output.drafted <= 1  # the drafter can propose only the stop id
        assert len(output.tokens) > 1
        assert not known[output.tokens[:-1]].any()


@pytest.mark.parametrize("masking", [pytest.param("auto", marks=pytest.mark.full), "probe"])
def test_drafts_end_before_token_outside_draft_vocabulary(masking: str) -> None:
    """Drafts end before a token that the draft vocabulary does not contain.

    In this test, every second token of the text is missing in the draft vocabulary. The drafts
    before a missing token are verified, and the output is the same as without a drafter.
    """
    pytest.importorskip("llguidance")
    tokens, known = demo_vocabularies()
    words = [id for id, text in enumerate(tokens) if len(text) > 1 and text.isalpha()]
    inside = next(id for id in words if id in known)
    outside = next(id for id in words if id not in known)
    text = (tokens[inside] + tokens[outside]).decode()
    grammar = GrammarSpec.regex(f"(?:{text}){{4}}")
    request = Request(prompt="Say.", grammar=grammar, max_tokens=20)
    backend = xgrammar_without(lambda id, text: id not in (inside, outside))
    [plain], [drafted] = generate_both([request], masking, grammar_backend=backend)
    assert drafted.tokens == plain.tokens
    assert plain.tokens[:-1] == [inside, outside] * 4
    assert drafted.reason == "stop"
    assert 0 < drafted.accepted == drafted.drafted <= 5
