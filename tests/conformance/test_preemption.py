"""Preempted and moved requests continue exactly where they were.

The oracles are the texts of the scripted model, jsonschema, and outputs without preemption and
without speculation.
"""

from __future__ import annotations

from conformance_util import GUIDED, TEXTS, ask, is_person, matches, one_by_one, results
from engine_util import with_internal
from public_issues import issue

from graft.grammar import GrammarSpec
from graft.models.drafters import UserDrafter


def run(engine, requests, preempt):
    """Run requests. After each step, preempt those for which ``preempt(id, tokens so far)``."""
    seen = {engine.submit(request): 0 for request in requests}
    found = {}
    while engine.busy:
        for event in engine.step():
            seen[event.id] += len(event.tokens)
            if event.output is not None:
                found[event.id] = event.output
            elif preempt(event.id, seen[event.id]):
                engine.preempt(event.id)
    return [found[request.id] for request in requests]


def few_pages(model, engine_of, **options):
    """Return an engine with too few pages for all its rows at full length."""
    options = {"max_batch_size": 4, "draft_length": 3, "page_size": 4, "pages": 24, **options}
    return engine_of(model, **with_internal(options))


@issue(
    "TensorRT-LLM",
    18891,
    "After the recomputation of the KV cache, the request gets a new matcher, so the grammar "
    "starts again in the middle of the output.",
    "When pages run out, requests are preempted and recomputed; their JSON is that of the model.",
)
def test_grammar_goes_on_after_recomputation(model, engine_of):
    engine = few_pages(model, engine_of)
    requests = [ask("long", grammar=GUIDED, max_tokens=60, id=str(i)) for i in range(5)]
    outputs = run(engine, requests, lambda name, count: False)
    assert [output.text for output in outputs] == [TEXTS["long"]] * 5
    assert all(output.reason == "stop" for output in outputs)
    assert engine.stats.preemptions > 0


@issue(
    "vLLM",
    31955,
    "Drafts of the time before a preemption are verified after it, and the grammar refuses them.",
    "A drafter proposes what was right before the preemption; the output does not change.",
)
def test_drafts_from_before_a_preemption(plain, engine_of):
    text = plain.generate([ask("long", grammar=GUIDED)])[0].tokens
    last = []

    def propose(tokens):
        """Propose the drafts of the call before, which are right only if nothing has happened."""
        at = text.index(tokens[-1]) + 1 if tokens[-1] in text else 0
        stale, last[:] = list(last), text[at + 2 : at + 5]
        return stale or text[at : at + 3]

    engine = engine_of(UserDrafter.of(propose, deadline_s=20), draft_length=3, max_batch_size=2)
    requests = [ask("long", grammar=GUIDED, id=str(i)) for i in range(3)]
    outputs = run(engine, requests, lambda name, count: count % 5 == int(name))
    assert [output.text for output in outputs] == [TEXTS["long"]] * 3
    assert engine.stats.preemptions > 2


@issue(
    "vLLM",
    16832,
    "After a preemption by recomputation, the output is incomplete.",
    "All tokens are delivered exactly once, in the events and in the output.",
)
def test_events_after_a_preemption_are_complete(model, engine_of):
    engine = engine_of(model, draft_length=2, max_batch_size=2)
    texts = {}
    for i in range(3):
        texts[engine.submit(ask("emoji", grammar=GUIDED, id=str(i)))] = ""
    tokens = dict.fromkeys(texts, ())
    steps = 0
    found = {}
    while engine.busy:
        steps += 1
        for event in engine.step():
            texts[event.id] += event.text
            tokens[event.id] += event.tokens
            if event.output is not None:
                found[event.id] = event.output
            elif steps % 3 == 0:
                engine.preempt(event.id)
    for name, output in found.items():
        assert texts[name] == output.text == TEXTS["emoji"]
        assert list(tokens[name]) == output.tokens
    assert len(found) == 3 and engine.stats.preemptions > 2


@issue(
    "vLLM",
    49620,
    "A round that was launched before a preemption delivers its tokens after it.",
    "Requests are preempted in every step while a round is in flight; no token is lost or doubled.",
)
def test_round_in_flight_during_a_preemption(plain, model, engine_of):
    engine = engine_of(model, draft_length=5, max_batch_size=3)
    names = ["long", "emoji", "goes-on", "person"]
    requests = [ask(name, grammar=GUIDED, id=name) for name in names]
    outputs = run(engine, requests, lambda name, count: True)
    assert results(outputs) == one_by_one(plain, requests)
    assert engine.stats.surplus_tokens > 0  # of rounds that were in flight


@issue(
    "SGLang",
    25388,
    "With disaggregated prefill and overlap, the grammar of the decoding side lags by one round; "
    "guided requests are aborted.",
    "Requests that move to another engine after 1 to 8 tokens have the text of the model.",
)
def test_migration_of_a_guided_request(model, engine_of):
    first = engine_of(model, draft_length=1, max_batch_size=8)
    second = engine_of(model, draft_length=3, max_batch_size=8)
    names = [first.submit(ask("long", grammar=GUIDED, id=str(i))) for i in range(1, 9)]
    seen = dict.fromkeys(names, 0)
    found = {}
    while first.busy or second.busy:
        for engine in (first, second):
            for event in engine.step() if engine.busy else ():
                seen[event.id] += len(event.tokens)
                if event.output is not None and event.output.reason != "moved":
                    found[event.id] = event.output
        for name in names:
            if name not in found and seen[name] >= int(name):
                seen[name] = -1000
                second.migrate_in(first.migrate_out(name))
    assert [found[name].text for name in names] == [TEXTS["long"]] * 8
    assert [found[name].reason for name in names] == ["stop"] * 8


@issue(
    "vLLM",
    5349,
    "After a recomputation, the generated tokens count as prompt, which changes penalties and "
    "other parameters that distinguish the two.",
    "Frequency penalty, presence penalty and `min_tokens` have the same effect as without "
    "preemption.",
)
def test_penalties_after_a_preemption(plain, model, engine_of):
    grammar = GrammarSpec.regex("[a-e]{1,40}")
    requests = []
    for i, fields in enumerate(
        (
            {"frequency_penalty": 2.0},
            {"presence_penalty": 2.0, "min_tokens": 12},
            {"repetition_penalty": 3.0, "min_tokens": 20},
            {"min_tokens": 15, "temperature": 8.0},
        )
    ):
        fields = {"grammar": grammar, "seed": 3, "verify": "coupled", "id": str(i), **fields}
        requests.append(ask("prose", logit_bias={97: 1.0, 98: 2.0}, **fields))
    engine = engine_of(model, draft_length=2)
    outputs = run(engine, requests, lambda name, count: count % 4 == 1)
    assert results(outputs) == one_by_one(plain, requests)
    assert engine.stats.preemptions > 2
    assert all(matches("[a-e]{1,40}", output.text) for output in outputs)


@issue(
    "TensorRT-LLM",
    19296,
    "Drafters outside the common drafting loop never roll the grammar back after verification.",
    "With a lookup drafter, a model and a user's function, rejected drafts leave no trace.",
)
def test_rejected_drafts_leave_no_trace(plain, model, engine_of):
    from graft.models.drafters import NGram

    wrong = plain.generate([ask("long", grammar=GUIDED)])[0].tokens
    drafters = {
        "ngram": NGram,
        "model": model,
        "function": UserDrafter.of(lambda tokens: wrong[len(tokens) % 9 :][:3], deadline_s=20),
    }
    requests = [ask(name, grammar=GUIDED) for name in ("person", "newlines", "list", "emoji")]
    expected = one_by_one(plain, requests)
    for name, drafter in drafters.items():
        masking = "none" if name == "model" else "auto"
        engine = engine_of(drafter, draft_length=3, draft_masking=masking)
        outputs = engine.generate(requests)
        assert results(outputs) == expected
        assert all(is_person(output.text) for output in outputs)
