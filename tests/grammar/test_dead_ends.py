"""States in which no token is legal: the request ends; if only the drafter has no legal token, its
drafts end."""

from __future__ import annotations

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
    """Return the outputs without a drafter, and those with one."""
    outputs = []
    for more in ({"speculation": False}, {"draft_masking": masking}):
        with demo_engine(**more, **options) as engine:
            outputs.append(engine.generate(requests))
    return outputs


@pytest.mark.parametrize("masking", ["fill", "probe"])
def test_grammar_dead_end_finishes_only_its_request(masking: str) -> None:
    """A grammar requires a text that no token spells: its request ends with the reason dead_end,
    and the tokens of other requests do not change."""
    backend = xgrammar_without(lambda id, text: b"~" in text)
    others = [
        Request(prompt=f"Say {word}.", grammar=GrammarSpec.choice([word, "no"]), max_tokens=20)
        for word in ("yes", "perhaps")
    ]
    late = Request(prompt="Say.", grammar=GrammarSpec.ebnf('root ::= "abc" [0-9]{3} "~"'))
    now = Request(prompt="Say.", grammar=GrammarSpec.ebnf('root ::= "~"'))
    options = {"grammar_backend": backend, "draft_masking": masking, "max_batch_size": 4}
    with demo_engine(**options) as engine:
        alone = [(o.reason, o.tokens) for o in engine.generate(others)]
        mixed = engine.generate([late, others[0], now, others[1]])
        grammar = engine.counters()["grammar"]
    assert [(o.reason, o.tokens) for o in (mixed[1], mixed[3])] == alone
    assert mixed[0].reason == mixed[2].reason == "dead_end"
    assert mixed[0].text.startswith("abc") and len(mixed[0].text) == 6 and mixed[2].tokens == []
    assert grammar["desyncs"] == grammar["errors"] == 0 and grammar["dead_ends"] >= 2


@pytest.mark.parametrize("masking", ["fill", "probe"])
def test_grammar_outside_draft_vocabulary_is_decoded_without_drafts(masking: str) -> None:
    """No candidate is legal; tokens and reasons are those of the target."""
    with demo_engine() as engine:
        d2t = engine._parts.drafter.vocab.d2t.to_host()
    known = np.zeros(1 << 16, bool)
    known[d2t] = True
    backend = xgrammar_without(lambda id, text: bool(known[id]))
    words = GrammarSpec.regex("[ -~]{20}")
    requests = [Request(prompt=r.prompt, grammar=words, max_tokens=24) for r in mixed_requests(3)]
    options = {"grammar_backend": backend, "max_batch_size": 4}
    plain, drafted = generate_both(requests, masking, **options)
    assert [(o.reason, o.tokens) for o in drafted] == [(o.reason, o.tokens) for o in plain]
    assert all(o.drafted <= 1 for o in drafted)  # of all legal ids it knows the last, a stop id
    assert all(len(o.tokens) > 1 and not known[o.tokens[:-1]].any() for o in drafted)


@pytest.mark.parametrize("masking", ["fill", "probe"])
def test_drafts_end_before_token_outside_draft_vocabulary(masking: str) -> None:
    """Every other token is missing in the draft vocabulary: the drafts end before it, the last
    draft is verified, and the target continues as without a drafter."""
    with demo_engine() as engine:
        d2t = engine._parts.drafter.vocab.d2t.to_host()
        tokens = engine._built.compiler.backend.vocabulary.tokens
    words = [id for id, text in enumerate(tokens) if len(text) > 1 and text.isalpha()]
    has = next(id for id in words if id in d2t)
    lacks = next(id for id in words if id not in d2t)
    both = (tokens[has] + tokens[lacks]).decode()
    request = Request(prompt="Say.", grammar=GrammarSpec.regex(f"(?:{both}){{4}}"), max_tokens=20)
    backend = xgrammar_without(lambda id, text: id not in (has, lacks))
    [plain], [drafted] = generate_both([request], masking, grammar_backend=backend)
    assert drafted.tokens == plain.tokens and plain.tokens[:-1] == [has, lacks] * 4
    assert drafted.reason == "stop" and 0 < drafted.accepted == drafted.drafted <= 5
