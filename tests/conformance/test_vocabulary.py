"""Ids without a token are never generated, and text does not depend on where tokens end.

The scripted model has more logit columns than its tokenizer has tokens, as many checkpoints do.
"""

from __future__ import annotations

import json

import numpy as np
from conformance_util import GUIDED, TEXTS, ask, is_person, matches
from public_issues import issue

from graft.grammar import GrammarSpec


def num_columns(model):
    """Return the number of logit columns of a checkpoint."""
    return json.loads((model / "config.json").read_text())["vocab_size"]


@issue(
    "XGrammar",
    611,
    "The mask is as wide as the tokenizer, and the logits are wider; an id of the padding is "
    "sampled, and the matcher ends the process.",
    "At an extreme temperature, no id beyond the tokenizer is generated, with and without a "
    "grammar.",
)
@issue(
    "Outlines",
    236,
    "The mask has the size of the tokenizer's vocabulary and cannot be applied to the logits.",
    "As above.",
)
def test_padded_columns_of_the_logits_are_never_sampled(drafting, model):
    known = drafting.tokenizer.backend.get_vocab_size()
    assert num_columns(model) > known
    grammars = [None, GUIDED, GrammarSpec.regex("(?s:.){5,40}"), None]
    requests = [
        ask("prose", grammar=grammar, temperature=1e4, seed=seed, max_tokens=60)
        for seed, grammar in enumerate(grammars * 4)
    ]
    outputs = drafting.generate(requests)
    ids = np.concatenate([output.tokens for output in outputs])
    assert ids.size > 400 and ids.max() < known
    assert not any(output.error for output in outputs)


@issue(
    "vLLM",
    50924,
    "The grammar's bitmask has 4041 words and the worker's buffer 4040; the first guided request "
    "ends the engine.",
    "With a size that is not a multiple of 32, the ids of the last word of a row are legal where "
    "the grammar names them.",
)
@issue(
    "vLLM",
    51467,
    "The same sizes in an error of `apply_grammar_bitmask`, which ends the engine.",
    "As above.",
)
def test_last_partial_word_of_the_mask(drafting, model):
    last = drafting.tokenizer.backend.get_vocab_size() - 1
    name = drafting.tokenizer.backend.id_to_token(last)
    assert num_columns(model) % 32 and last // 32 == num_columns(model) // 32
    grammar = GrammarSpec.lark(f"start: <[{last}]> /[a-z]{{2}}/ <[{last}]>")
    [output] = drafting.generate([ask("prose", grammar=grammar, skip_special_tokens=False)])
    assert output.reason == "stop"
    assert output.tokens[0] == output.tokens[-2] == last
    assert matches("[a-z]{2}", output.text.replace(name, ""))


@issue(
    "llama.cpp",
    23677,
    "`<unused49>` under a grammar ends the server.",
    "With a large bias towards all special tokens, outputs satisfy the grammar.",
)
def test_bias_towards_all_special_tokens(drafting):
    backend = drafting.tokenizer.backend
    special = [id for id, token in backend.get_added_tokens_decoder().items() if token.special]
    assert len(special) > 5
    requests = [ask(n, grammar=GUIDED, logit_bias=dict.fromkeys(special, 900.0)) for n in TEXTS]
    for output in drafting.generate(requests):
        assert output.reason in ("stop", "length") and output.error is None
        assert output.reason == "length" or is_person(output.text)


@issue(
    "llama.cpp",
    4446,
    "A character whose bytes are in two tokens is damaged when it is streamed.",
    "The texts of the events have whole characters, and concatenate to the text of the output.",
)
def test_streamed_characters_are_complete(drafting):
    events = list(drafting.stream([ask("emoji", grammar=GUIDED), ask("emoji")]))
    for name in {event.id for event in events}:
        parts = [event.text for event in events if event.id == name]
        assert "".join(parts) == TEXTS["emoji"]
        assert not any("\ufffd" in part for part in parts)
        assert len(parts) > 2
