"""Mask rows belong to one request and one position.

The model wants to write text that the grammar forbids, and the drafter proposes exactly this text.
Verification would therefore accept every draft whose mask row is missing, stale or another
request's. The oracles are jsonschema, re, the texts of the scripted model, and the same requests
without speculation, one at a time.
"""

from __future__ import annotations

import logging
from functools import partial

import pytest
from conformance_util import (
    GUIDED,
    SCRIPTS,
    TEXTS,
    ask,
    is_person,
    matches,
    one_by_one,
    results,
    tokens_of,
)
from public_issues import issue

from graft.grammar import GrammarSpec
from graft.models import Engine, Request
from graft.models.drafters import NGram, UserDrafter
from graft.tools.demo_model import demo_model

#: Grammars without a common text, each with the name of a text that it forbids.
DISJOINT = {
    "[a-f]{3,9}": "list",
    "[0-9]{2,8}": "prose",
    "(yes|no)( yes| no){0,4}": "person",
    "[x-z]{2}-[A-F]{2,6}": "call",
}


def proposer(engine, lengths):
    """Return a drafter that proposes the texts that the model writes without a grammar.

    Parameters
    ----------
    engine
        Engine without a drafter that generates the texts.
    lengths
        Function from the number of calls so far to the number of drafts.
    """
    texts = {}
    for name in SCRIPTS:
        [script] = tokens_of(engine, f"<script:{name}>")
        texts[script] = engine.generate([ask(name, max_tokens=60)])[0].tokens
    calls = 0

    def propose(tokens):
        nonlocal calls
        calls += 1
        text = next(texts[token] for token in tokens if token in texts)
        begin = text.index(tokens[-1]) + 1 if tokens[-1] in text else 0
        return text[begin : begin + lengths(calls)]

    return UserDrafter.of(propose, deadline_s=20)


@issue(
    "vLLM",
    54437,
    "When the hand-over of drafts to the scheduler goes stale, mask rows of the drafts allow every "
    "token, and up to a round of unconstrained tokens is accepted.",
    "Drafts that the grammar has not seen are verified under complete mask rows.",
)
def test_drafts_of_the_unconstrained_text_are_rejected(plain, engine_of):
    """The texts begin as the grammar demands and leave it later, in the middle of the drafts."""
    engine = engine_of(proposer(plain, lambda calls: 3), draft_length=3)
    names = ("goes-on", "newlines", "separator", "separator-inside", "prose")
    requests = [ask(name, grammar=GUIDED) for name in names]
    outputs = engine.generate(requests)
    assert results(outputs) == one_by_one(plain, requests)
    assert all(output.reason == "stop" and is_person(output.text) for output in outputs)
    assert sum(engine.stats.accepted) > 10


@issue(
    "LMDeploy",
    4551,
    "With speculative decoding, the grammar is silently ignored for drafts and target.",
    "Outputs with and without speculation satisfy the schema and are equal.",
)
@pytest.mark.parametrize(
    "options",
    [
        {"draft_masking": "auto"},
        {"draft_masking": "probe"},
        {"draft_masking": "none"},
        {"draft_tree": (2, 3)},
        {"forced_drafts": True},
        {"generation": "graph"},
        {"grammar_backend": "xgrammar"},
    ],
    ids=lambda options: "-".join(map(str, *options.items())),
)
@pytest.mark.full("draft_masking-none", "draft_masking-probe", "grammar_backend-xgrammar")
def test_grammar_holds_with_speculation(plain, model, engine_of, options):
    engine = engine_of(model, draft_length=5, **options)
    requests = [ask(name, grammar=GUIDED) for name in ("prose", "list", "goes-on", "call")]
    outputs = engine.generate(requests)
    assert all(is_person(output.text) for output in outputs)
    assert results(outputs) == one_by_one(plain, requests)


@issue(
    "vLLM",
    49694,
    "The worker trims drafts of one request but walks the flat bitmask with the trimmed length, so "
    "later requests of the batch get mask rows of the request before them.",
    "Requests with disjoint grammars and different numbers of drafts each satisfy their own "
    "grammar.",
)
def test_different_numbers_of_drafts_do_not_shift_mask_rows(plain, engine_of):
    engine = engine_of(proposer(plain, lambda calls: calls * 7 % 4), draft_length=3)
    requests = []
    for pattern, name in DISJOINT.items():
        for seed in range(2):
            requests.append(
                ask(
                    name,
                    grammar=GrammarSpec.regex(pattern),
                    temperature=30.0,
                    seed=seed,
                    verify="coupled",
                )
            )
    outputs = engine.generate(requests)
    for pattern, pair in zip(DISJOINT, zip(outputs[::2], outputs[1::2], strict=True), strict=True):
        assert all(output.reason == "stop" and matches(pattern, output.text) for output in pair)
    assert results(outputs) == one_by_one(plain, requests)


@issue(
    "vLLM",
    50952,
    "In the first round of a request there are fewer drafts than the maximum, so its bitmask has "
    "fewer rows than its logits.",
    "Rounds with 0, 1, 2 and 3 drafts follow each other; all requests finish.",
)
def test_rounds_with_fewer_drafts_than_the_maximum(plain, engine_of):
    drafter = proposer(plain, lambda calls: (0, 0, 1, 3, 2, 0, 3)[calls % 7])
    engine = engine_of(drafter, draft_length=3)
    requests = [ask("person", grammar=GUIDED, id=str(i)) for i in range(6)]
    outputs = engine.generate(requests)
    assert [output.text for output in outputs] == [TEXTS["person"]] * 6
    assert [output.reason for output in outputs] == ["stop"] * 6
    assert sum(engine.stats.accepted) > 0


@issue(
    "TensorRT-LLM",
    15022,
    "If the schedule of draft lengths reaches 0, the bitmask and the logits have different batch "
    "sizes, and the capture of the graph fails.",
    "Rounds in which no request has a draft alternate with rounds with drafts.",
)
def test_rounds_in_which_no_request_has_drafts(plain, engine_of):
    rounds = 0

    def length(calls):
        nonlocal rounds
        rounds += calls % 2
        return 3 if rounds % 2 else 0

    engine = engine_of(proposer(plain, length), draft_length=3)
    requests = [ask("long", grammar=GUIDED) for _ in range(2)]
    outputs = engine.generate(requests)
    assert [output.text for output in outputs] == [TEXTS["long"]] * 2
    tokens, rounds = engine.stats.tokens, engine.stats.rounds
    assert tokens / 2 / 4 < rounds < tokens / 2  # some rounds have accepted drafts, some have none


@issue(
    "vLLM",
    22896,
    "In a batch with guided requests, the mask rows of the others are initialized with zeros, so "
    "they only generate exclamation marks.",
    "Unconstrained requests write their own texts in a batch with guided requests.",
)
def test_unconstrained_requests_in_a_batch_with_guided_requests(drafting):
    names = ("prose", "list", "call", "goes-on")
    requests = []
    for name in names:
        requests += [ask(name), ask(name, grammar=GUIDED)]
    outputs = drafting.generate(requests)
    assert [output.text for output in outputs[::2]] == [TEXTS[name] for name in names]
    assert all(is_person(output.text) for output in outputs[1::2])


@issue(
    "TensorRT-LLM",
    6774,
    "Dummy requests that pad the batch to the size of a CUDA graph need mask rows too; before, "
    "guided decoding was impossible with padding.",
    "Batches of 3, 5 and 7 requests, which are padded to 4 and 8 rows, have the texts of the "
    "requests.",
)
@pytest.mark.parametrize("count", [3, 5, 7])
def test_padding_rows_do_not_affect_requests(drafting, count):
    names = ["person", "emoji", "goes-on", "long", "prose", "list", "call"][:count]
    requests = [ask(name, grammar=GUIDED) for name in names]
    outputs = drafting.generate(requests)
    assert [output.text for output in outputs[:2]] == [TEXTS["person"], TEXTS["emoji"]]
    assert all(output.reason == "stop" and is_person(output.text) for output in outputs)


@issue(
    "vLLM",
    53777,
    "A block drafter proposes the same illegal token in every round; each time the log says that "
    "the state machine failed to advance.",
    "Illegal drafts are rejected like others: no error, no log message, a valid output.",
)
def test_drafter_that_always_proposes_an_illegal_token(plain, engine_of, caplog):
    [newline] = tokens_of(plain, "\n")
    engine = engine_of(UserDrafter.of(lambda tokens: [newline] * 3, deadline_s=20), draft_length=3)
    with caplog.at_level(logging.INFO, "graft"):
        outputs = engine.generate([ask("newlines", grammar=GUIDED) for _ in range(4)])
    assert not caplog.messages
    assert all(output.error is None and is_person(output.text) for output in outputs)
    assert sum(engine.stats.accepted) == 0 < sum(engine.stats.tested)


@issue(
    "vLLM",
    53181,
    "With multi-token prediction, the grammar still gets tokens that it refuses, mostly the same "
    "one.",
    "A model that wants line breaks writes the schema's JSON on one line.",
)
def test_drafter_and_target_want_line_breaks(plain, drafting):
    requests = [ask("newlines", grammar=GUIDED) for _ in range(5)]
    outputs = drafting.generate(requests)
    assert all(is_person(output.text) and "\n" not in output.text for output in outputs)
    assert results(outputs) == one_by_one(plain, requests)


@issue(
    "SGLang",
    9187,
    "With EAGLE, a structured output ends at the first place where the drafter's choice differs "
    "from the grammar; the rest is lost.",
    "After a draft that the grammar forbids, the output goes on to its end.",
)
def test_output_goes_on_after_an_illegal_draft():
    """The demo model with its EAGLE-3 head, whose drafts are not masked."""
    schema = {
        "type": "object",
        "properties": {"qua": {"type": "string"}, "zor": {"enum": ["k7", "m4"]}},
        "required": ["qua", "zor"],
        "additionalProperties": False,
    }
    requests = [
        Request(
            prompt=f"name: Olga Novak; age: {age}",
            grammar=GrammarSpec.json_schema(schema),
            max_tokens=120,
        )
        for age in range(40, 46)
    ]
    target, drafter = demo_model()
    with Engine(target, drafter, max_batch_size=4, draft_masking="none") as engine:
        outputs = engine.generate(requests)
        assert sum(engine.stats.accepted) < sum(engine.stats.tested)
    with Engine(target, max_batch_size=1) as engine:
        assert results(outputs) == one_by_one(engine, requests)
    for output in outputs:
        assert output.reason == "stop"
        assert matches(r'\{"qua": ".*", "zor": "(k7|m4)"\}', output.text)


@issue(
    "vLLM",
    10442,
    "With n-gram drafts, guided outputs are cut after about five tokens.",
    "The output has all tokens of the text.",
)
def test_ngram_drafts_do_not_cut_the_output(plain, engine_of):
    engine = engine_of(partial(NGram, shortest=1), draft_length=4)
    requests = [ask(name, grammar=GUIDED) for name in ("long", "person", "emoji")]
    outputs = engine.generate(requests)
    assert [output.text for output in outputs] == [TEXTS[n] for n in ("long", "person", "emoji")]
    assert results(outputs) == one_by_one(plain, requests)


@issue(
    "vLLM",
    15554,
    "N-gram drafts from the prompt violate the grammar, and the matcher stops with a parser error.",
    "Drafts copied from an illegal text of the prompt are rejected; the output is valid.",
)
@issue(
    "SGLang",
    17585,
    "N-gram drafts together with a grammar crash the server, because no mask is built.",
    "As above.",
)
def test_ngram_drafts_of_illegal_text_in_the_prompt(plain, engine_of):
    shown = TEXTS["newlines"].replace('"Bob"', "null")
    messages = [{"role": "user", "content": f"<script:newlines>{shown * 3}"}]
    requests = [Request(messages=messages, grammar=GUIDED, max_tokens=80) for _ in range(3)]
    engine = engine_of(partial(NGram, shortest=1), draft_length=5)
    outputs = engine.generate(requests)
    assert all(output.reason == "stop" and is_person(output.text) for output in outputs)
    assert results(outputs) == one_by_one(plain, requests)
    assert sum(engine.stats.accepted) < sum(engine.stats.tested)


@issue(
    "SGLang",
    40458,
    "In batches that mix prefill and decoding, the grammar of decoding requests lags by one token, "
    "and the next token is refused.",
    "Requests that join with long prompts do not change the outputs of running guided requests.",
)
def test_prefill_of_other_requests_does_not_delay_the_grammar(plain, model, engine_of):
    engine = engine_of(model, draft_length=2, prefill_rows=4)
    guided = [ask(name, grammar=GUIDED, id=name) for name in ("long", "goes-on", "newlines")]
    expected = one_by_one(plain, guided)
    for request in guided:
        engine.submit(request)
    found = {}
    joined = 0
    while engine.busy:
        for event in engine.step():
            if event.output is not None:
                found[event.id] = event.output
        if joined < 3:
            joined += 1
            prompt = [{"role": "user", "content": f"<script:list>{'pad ' * 30}"}]
            engine.submit(Request(messages=prompt, max_tokens=30, id=f"late {joined}"))
    assert results([found[request.id] for request in guided]) == expected
    assert all(found[f"late {i}"].text == TEXTS["list"] for i in (1, 2, 3))


@issue(
    "TokenSpeed",
    1314,
    "With more than 128 mask rows (batch size times drafts), the capture of the graph hangs.",
    "A batch with 44 guided requests and four rows each finishes.",
)
def test_more_than_128_mask_rows(plain, model, engine_of):
    options = {"max_batch_size": 44, "max_length": 128, "prefill_rows": 256}
    engine = engine_of(model, draft_length=3, **options)
    names = ["person", "emoji", "goes-on", "newlines"] * 11
    outputs = engine.generate([ask(name, grammar=GUIDED, max_tokens=60) for name in names])
    expected = one_by_one(plain, [ask(name, grammar=GUIDED, max_tokens=60) for name in names[:4]])
    assert results(outputs) == expected * 11
    assert engine.stats.rounds < 40  # all requests run at the same time


@issue(
    "Outlines",
    757,
    "When a sequence starts, the state of all other sequences is reset.",
    "Requests that join in the middle of others do not change them.",
)
@issue(
    "Outlines",
    628,
    "Sequences that share a grammar mix up their states.",
    "Requests that share a grammar and are at different places satisfy it.",
)
def test_requests_that_share_a_grammar_have_their_own_state(plain, model, engine_of):
    grammar = GrammarSpec.regex("([a-c]{2}-){2,5}[0-9]{2}")
    requests = [
        ask("prose", grammar=grammar, temperature=20.0, seed=seed, verify="coupled", id=str(seed))
        for seed in range(7)
    ]
    engine = engine_of(model, draft_length=2, max_batch_size=8)
    found = {}
    waiting = list(requests)
    while engine.busy or waiting:
        if waiting:
            engine.submit(waiting.pop(0))
        for event in engine.step():
            if event.output is not None:
                found[event.id] = event.output
    outputs = [found[request.id] for request in requests]
    assert results(outputs) == one_by_one(plain, requests)
    assert all(matches(grammar.text, output.text) for output in outputs)
    assert len({output.text for output in outputs}) > 4
