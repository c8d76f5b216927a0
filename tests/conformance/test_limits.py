"""Stop strings and limits apply to tokens, not to rounds.

The model is its own drafter, so a round commits up to eight tokens, and the place where the output
must end lies inside a round. The oracles are the texts of the scripted model and their tokens.
"""

from __future__ import annotations

import pytest
from conformance_util import GUIDED, TEXTS, ask, is_person, one_by_one, results, tokens_of
from public_issues import issue


@pytest.fixture(scope="module")
def free(plain):
    """Tokens of the text "prose", and the text after each of them."""
    tokens = plain.generate([ask("prose")])[0].tokens
    texts = [plain.tokenizer.decode(tokens[: i + 1]) for i in range(len(tokens))]
    assert texts[-1] == TEXTS["prose"]
    return tokens, texts


def stop_strings(text):
    """Return strings of two to six characters that occur in the text, and their first places."""
    for begin in range(0, len(text) - 6, 3):
        string = text[begin : begin + 2 + begin % 5]
        yield string, text.index(string)


@issue(
    "vLLM",
    47616,
    "When a stop string ends inside accepted drafts, the tokens and log probabilities after it "
    "stay in the output.",
    "Tokens and log probabilities end with the token that completes the stop string.",
)
@issue(
    "SGLang",
    23802,
    "Only the end of the new text is searched, so a stop string early in the accepted drafts is "
    "missed.",
    "A stop string is found at every place of a round.",
)
def test_stop_string_inside_accepted_drafts(drafting, free):
    tokens, texts = free
    requests = []
    for string, _ in stop_strings(texts[-1]):
        requests.append(ask("prose", stop=[string], logprobs=0))
    outputs = drafting.generate(requests)
    assert len(outputs) > 15
    for (string, place), output in zip(stop_strings(texts[-1]), outputs, strict=True):
        needed = next(i for i, text in enumerate(texts) if string in text) + 1
        assert (output.reason, output.text) == ("stop_string", texts[-1][:place])
        assert output.tokens == tokens[:needed]
        assert len(output.logprobs) == needed


@issue(
    "SGLang",
    31599,
    "If a round crosses `max_new_tokens`, an earlier stop string of the round is ignored: wrong "
    "reason, and tokens after the stop string.",
    "Whichever comes first ends the output; with all limits from 1 to the length of the text.",
)
def test_stop_string_and_max_tokens_in_the_same_round(drafting, free):
    tokens, texts = free
    string = texts[-1][20:23]
    needed = next(i for i, text in enumerate(texts) if string in text) + 1
    assert 8 < needed < len(tokens) - 8
    limits = range(1, len(tokens) + 1)
    requests = [ask("prose", stop=[string], max_tokens=limit) for limit in limits]
    for limit, output in zip(limits, drafting.generate(requests), strict=True):
        if limit < needed:
            assert output.reason == "length" and output.tokens == tokens[:limit]
            assert texts[limit - 1].startswith(output.text)
        else:
            assert output.reason == "stop_string" and output.tokens == tokens[:needed]
            assert output.text == texts[-1].partition(string)[0]


@issue(
    "SGLang",
    33643,
    "`min_new_tokens` counts rounds and not tokens, so EOS stays masked for as many times longer "
    "as a round has tokens.",
    "An output that must have N tokens before a stop id has exactly N, although the model wants "
    "to stop from the first token on.",
)
def test_min_tokens_counts_tokens(drafting, plain):
    [eos] = tokens_of(plain, "<eos>")
    minima = range(1, 24, 2)
    requests = [
        ask("prose", min_tokens=minimum, logit_bias={eos: 900.0}, max_tokens=60)
        for minimum in minima
    ]
    outputs = drafting.generate(requests)
    assert [len(output.tokens) for output in outputs] == [minimum + 1 for minimum in minima]
    assert all(output.tokens[-1] == eos and output.reason == "stop" for output in outputs)


@issue(
    "vLLM",
    11484,
    "XGrammar fails under speculative decoding.",
    "With every limit from 1 token to the whole JSON, the output ends exactly at the limit.",
)
def test_max_tokens_inside_a_round_with_a_grammar(drafting):
    full = drafting.generate([ask("emoji", grammar=GUIDED)])[0]
    assert full.text == TEXTS["emoji"]
    limits = range(1, len(full.tokens) + 2)
    requests = [ask("emoji", grammar=GUIDED, max_tokens=limit, closing="off") for limit in limits]
    for limit, output in zip(limits, drafting.generate(requests), strict=True):
        assert output.tokens == full.tokens[:limit]
        assert output.reason == ("length" if limit < len(full.tokens) else "stop")
        assert full.text.startswith(output.text)


@issue(
    "vLLM",
    8350,
    "Guided JSON is cut in the middle of a value when `max_tokens` is reached.",
    "If the tokens suffice for any complete output, the output is complete; otherwise the request "
    "is refused.",
)
@pytest.mark.full
def test_guided_output_is_complete_within_max_tokens(drafting, plain):
    names = ("long", "emoji", "goes-on", "spaces")
    requests = [
        ask(name, grammar=GUIDED, max_tokens=limit) for name in names for limit in range(1, 34, 2)
    ]
    outputs = drafting.generate(requests)
    assert results(outputs) == one_by_one(plain, requests)
    for request, output in zip(requests, outputs, strict=True):
        if output.reason == "refused":
            assert output.error_param == "max_tokens" and request.max_tokens < 25
        else:
            assert output.reason == "stop" and is_person(output.text)
            assert len(output.tokens) <= request.max_tokens
    assert sum(output.reason == "stop" for output in outputs) > 20
