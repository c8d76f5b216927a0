"""Requests: invalid fields, relaxed verification, stop strings, and graph launches per round."""

import json
from dataclasses import replace

import numpy as np
import pytest
from engine_util import drain, mixed_requests, outputs

from graft.grammar import GrammarSpec
from graft.models.engine.request_state import RequestState
from graft.models.errors import MigrationError, RequestError, TokenizerError
from graft.models.request import Relaxed, Request
from graft.models.text.stream import IncrementalDecoder
from graft.sampling.params import MAX_STOP_IDS


def test_engine_launches_one_graph_per_round(engine):
    """Each round and each prefill chunk is exactly one graph launch.

    With K drafts, at most K + 1 mask rows per request and round are filled.
    """
    count_chunks = engine._scheduler.slots.count_completed_chunks
    engine.generate(mixed_requests(1))
    engine.synchronize()
    engine.reset_stats()
    before = engine.counters()
    chunks_before = count_chunks()
    engine.generate(mixed_requests(6))
    engine.synchronize()
    after = engine.counters()
    stats = engine.stats
    assert stats.rounds > 0
    if engine.device.kind == "soft":
        launches = [counters["device"]["count"]["graph_launch"] for counters in (before, after)]
        assert launches[1] - launches[0] == stats.rounds + count_chunks() - chunks_before
    fills = after["grammar"]["fills"] - before["grammar"]["fills"]
    assert 0 < fills <= (engine.options.draft_length + 1) * stats.row_rounds


#: Invalid values by field of a request with a prompt and a grammar.
INVALID_VALUES = {
    "temperature": (-1.0, float("nan"), 10**400, -(10**5000)),
    "top_p": (0.0, 2.0),
    "top_k": (-1, 10**5000),
    "min_p": (1.5,),
    "seed": (-5,),
    "max_tokens": (0, 10**6),
    "verify": ("hope",),
    "id": (["unhashable"],),
    "special_tokens": ("no",),
    "skip_special_tokens": (0,),
    "shown_tokens": ("<s>", [1], None),
    "timeout_s": (0,),
    "priority": (0.5, "high"),
    "prompt": ("\ud800",),
    "stop_ids": (list(range(MAX_STOP_IDS + 1)), [10**6]),
    "tokens": ([1],),  # cannot be combined with a prompt
    "logit_bias": (
        {10**6: 1.0},
        {"5": 1.0},
        {5: float("-inf")},
        3,
        dict.fromkeys(range(1025), 1.0),
    ),
    "allowed_ids": ([-1], []),
    "banned_ids": ([0.5], 5, [1] * 10**6),
    "presence_penalty": (2.5,),
    "frequency_penalty": (float("nan"),),
    "repetition_penalty": (0.0,),
    "min_tokens": (161,),
    "logprobs": (21,),
    "logprobs_masked": (True,),
    "n": (0, 129),
    "sample": (-1,),
    "relaxed": (0.5, Relaxed(top_k=0), Relaxed(delta=1.5), Relaxed(until=10**6)),
}
#: Invalid combinations of fields.
INVALID_FIELDS = [
    *({name: value} for name, values in INVALID_VALUES.items() for value in values),
    *({"prompt": None, "messages": messages} for messages in (5, [5])),
    *(
        {"prompt": None, "messages": [{"role": "user", "content": content}]}
        for content in ("\udfff", 10**5000, object())
    ),
    *({"prompt": None, "tokens": tokens} for tokens in ([3, -1], [5] * 5000)),
    *({"grammar": None, "stop": stop} for stop in ("abc", 5)),
    {"allowed_ids": [5, 6], "banned_ids": [6, 5, 7]},
]


@pytest.mark.parametrize("fields", INVALID_FIELDS, ids=lambda fields: "-".join(fields))
def test_engine_refuses_request_with_invalid_field(engine, fields):
    """A request with an invalid field is refused with an error of less than 300 characters.

    The output names the field. A valid request in the same call is served.
    """
    valid = mixed_requests(1)[0]
    refused, served = engine.generate([replace(valid, **fields), valid])
    assert refused.reason == "refused" and refused.error and not refused.tokens
    assert refused.error_type in ("RequestError", "TokenizerError") and len(refused.error) < 300
    assert refused.error_param is not None and refused.error_param.split(".")[0] in fields
    assert served.reason == "stop"


def test_failure_of_matcher_after_stop_id_fails_only_its_request(engine, monkeypatch):
    """A backend may fail while the engine tests whether an output satisfies its grammar."""
    original = RequestState.satisfies_grammar

    def satisfies_grammar(self):
        if self.id == "bad":
            raise ValueError("broken")
        return original(self)

    monkeypatch.setattr(RequestState, "satisfies_grammar", satisfies_grammar)
    request = mixed_requests(1)[0]
    good, bad = engine.generate([replace(request, id="good"), replace(request, id="bad")])
    assert good.finished and bad.tokens == good.tokens
    assert (bad.reason, bad.error_type) == ("error", "GrammarBackendError")
    assert "broken" in bad.error


def test_failure_of_tokenizer_fails_only_its_request(engine, monkeypatch):
    """The tokenizers library may panic when it converts the tokens of an output."""
    request = Request(tokens=[300, 301, 302], max_tokens=30, logprobs=1)
    requests = [replace(request, id="good"), replace(request, id="bad", temperature=0.9, seed=1)]
    good, whole = engine.generate(requests)
    pushed = []
    original = IncrementalDecoder.push

    def push(self, ids):
        if self is broken:
            pushed.extend(ids)
            if len(pushed) > 5:
                raise TokenizerError("the tokenizer failed: a panic")
        return original(self, ids)

    for item in requests:
        engine.submit(item)
    broken = engine._scheduler.unfinished["bad"].decoder
    monkeypatch.setattr(IncrementalDecoder, "push", push)
    found = drain(engine)
    bad = found["bad"]
    assert (bad.reason, bad.error_type) == ("error", "TokenizerError") and "a panic" in bad.error
    assert bad.tokens == pushed == whole.tokens[: len(pushed)]
    assert len(bad.logprobs) == len(bad.tokens) and whole.text.startswith(bad.text)
    assert (found["good"].tokens, found["good"].text) == (good.tokens, good.text)
    assert engine.generate(requests)[0].text == good.text


class Unreadable(list):
    """A list that cannot be read."""

    def __iter__(self):
        raise RuntimeError("the list cannot be read")


def nested(depth=1000):
    """Return a list that is nested `depth` times."""
    value = "a"
    for _ in range(depth):
        value = [value]
    return value


def broken_grammar(**fields):
    """Return a grammar whose fields have been changed after its construction."""
    grammar = GrammarSpec.regex("a")
    for name, value in fields.items():
        object.__setattr__(grammar, name, value)
    return grammar


def message(content):
    return {"prompt": None, "messages": [{"role": "user", "content": content}]}


ILL_TYPED_FIELDS = {
    "verify, array": {"verify": np.array([1, 2])},
    "max_tokens, NumPy": {"max_tokens": np.int64(3)},
    "temperature, array": {"temperature": np.array([0.5])},
    "stop, array": {"stop": np.array(["a"])},
    "tokens, array": {"prompt": None, "tokens": np.array([5, 6])},
    "tokens, NumPy": {"prompt": None, "tokens": [np.int64(5)]},
    "tokens, unreadable": {"prompt": None, "tokens": Unreadable([5])},
    "stop, unreadable": {"stop": Unreadable(["a"])},
    "allowed_ids, nested": {"allowed_ids": [[5]]},
    "logit_bias, nested": {"logit_bias": {5: [1.0]}},
    "grammar, unhashable": {"grammar": broken_grammar(strict=[])},
    "marker, unhashable": {"grammar": broken_grammar(marker=[])},
    "messages, nested": message(nested()),
    "messages, nested, plain": {**message(nested()), "special_tokens": False},
    "messages, NumPy": message(np.int64(3)),
    "messages, array, plain": {**message(np.array([1])), "special_tokens": False},
    "messages, key": message({("a",): 1}),
    "messages, key, plain": {**message({(("a",),): 1}), "special_tokens": False},
    "schema, nested": {"schema": nested(100_000)},
    "schema, NumPy": {"schema": np.array([1])},
}


@pytest.mark.parametrize("fields", ILL_TYPED_FIELDS.values(), ids=ILL_TYPED_FIELDS)
def test_request_with_wrong_types_does_not_affect_others(engine, fields):
    """`generate` refuses a request with a field of a wrong type, and serves the others."""
    served = mixed_requests(1)[0]
    ill_typed = replace(served, **{"grammar": None, **fields})
    before, refused, after = engine.generate([served, ill_typed, served])
    assert refused.reason == "refused" and refused.error and len(refused.error) < 300
    assert refused.error_type in ("RequestError", "GrammarError", "TokenizerError")
    assert before.finished and after.tokens == before.tokens
    engine.submit(replace(ill_typed, id="x"))
    assert outputs(engine.step())["x"].error == refused.error


def test_exception_of_object_in_request_is_logged_with_its_traceback(engine, caplog):
    with caplog.at_level("WARNING", "graft"):
        (refused,) = engine.generate([Request(tokens=Unreadable([5]), id="u")])
    assert refused.reason == "refused"
    (record,) = (record for record in caplog.records if record.exc_info)
    assert record.getMessage() == "request u cannot be read"
    assert "in __iter__" in caplog.text


def test_engine_refuses_other_types_than_request(engine):
    """`generate` refuses objects that are not requests, and serves the valid requests in the list.

    The valid request here has ``stop=None`` and ``stop_ids=None``, which is the same as empty
    lists.
    """
    valid = replace(mixed_requests(1)[0], stop=None, stop_ids=None)
    with pytest.raises(RequestError, match="must be a Request, got 5"):
        engine.warm(5)
    with pytest.raises(MigrationError, match="expected a MigratedRequest, got 5"):
        engine.migrate_in(5)
    refused, served = engine.generate([{"prompt": "x"}, valid])
    assert "must be a Request" in (refused.error or "") and served.reason == "stop"


def test_relaxed_verification_accepts_more_drafts(engine):
    """Relaxed outputs satisfy their grammars. Most of them contain tokens that are not exact."""
    requests = coupled_requests()
    exact = engine.generate(requests)
    relaxed = engine.generate(relax(requests))
    assert sum(o.exact for o in relaxed) < len(relaxed) // 2
    assert {o.reason for o in relaxed} <= {"stop", "length"}
    assert acceptance_rate(exact) < 0.9 < acceptance_rate(relaxed)
    assert not engine.counters()["grammar"]["desyncs"]


def test_relaxed_verification_is_exact_after_its_end_id(engine):
    """Verification is relaxed only until the token `Relaxed.until` has been generated.

    Here it is the first token of each output. The outputs are therefore equal to those of exact
    verification, also for preempted requests.
    """
    requests = coupled_requests()
    expected = engine.generate(requests)
    for request, output in zip(relax(requests), expected, strict=True):
        until = output.tokens[0]
        engine.submit(replace(request, relaxed=Relaxed(10**6, 1.0, until=until)))
    found = {}
    preempted = 0
    while engine.busy:
        found |= outputs(engine.step())
        if len(found) == preempted:
            preempted += any(engine.preempt(o.id) for o in expected if o.id not in found)
    assert preempted
    assert all(output.exact for output in found.values())
    assert [found[o.id].tokens for o in expected] == [o.tokens for o in expected]


@pytest.mark.parametrize("relaxed", [Relaxed(1, 0.0), Relaxed(2, 0.3), Relaxed(10**6, 1.0)])
def test_output_is_exact_if_relaxed_verification_changed_no_token(engine, relaxed):
    """`Output.exact` is true for exactly the outputs that equal those of exact verification."""
    requests = coupled_requests()
    expected = engine.generate(requests)
    assert all(output.exact for output in expected)
    outputs = engine.generate([replace(r, verify="relaxed", relaxed=relaxed) for r in requests])
    is_equal = [o.tokens == e.tokens for o, e in zip(outputs, expected, strict=True)]
    assert [output.exact for output in outputs] == is_equal


def coupled_requests():
    requests = []
    for i, request in enumerate(mixed_requests(6)):
        sampling = {"temperature": 1.2, "verify": "coupled", "seed": i}
        requests.append(replace(request, id=str(i), **sampling))
    return requests


def relax(requests):
    """Return the requests with relaxed verification that accepts almost every legal draft."""
    return [replace(r, verify="relaxed", relaxed=Relaxed(10**6, 1.0)) for r in requests]


def acceptance_rate(outputs):
    accepted = sum(output.accepted for output in outputs)
    drafted = sum(output.drafted for output in outputs)
    return accepted / drafted


def test_max_tokens_limits_output_length(engine):
    request = mixed_requests(1)[0]
    for max_tokens in range(1, 9):
        (output,) = engine.generate([replace(request, max_tokens=max_tokens, closing="off")])
        assert output.reason == "length" and len(output.tokens) == max_tokens


def test_stop_string_ends_output_and_is_never_streamed(engine):
    request = Request(tokens=[300, 301, 302], max_tokens=60, temperature=3.0, seed=5)
    (whole,) = engine.generate([request])
    stop = whole.text[20:24]
    assert len(stop) == 4
    events = list(engine.stream([replace(request, stop=[stop])]))
    output = events[-1].output
    assert output is not None and output.reason == "stop_string"
    assert output.text == whole.text[: whole.text.index(stop)]
    assert "".join(e.text for e in events) == output.text


def test_stop_string_is_text_before_min_tokens(engine):
    """A stop string within the first `min_tokens` tokens is text, a later one ends the output."""
    request = Request(tokens=[300, 301, 302], max_tokens=60, temperature=3.0, seed=5)
    (whole,) = engine.generate([request])
    assert whole.reason == "length"
    for min_tokens in (10, 25):
        length = len(engine.tokenizer.decode(whole.tokens[:min_tokens]))
        first = whole.text[:length].strip()[0]
        end = whole.text.find(first, length)
        expected = whole.text if end < 0 else whole.text[:end]
        early = replace(request, stop=[first])
        late, after, early = engine.generate(
            [replace(early, min_tokens=min_tokens), replace(early, stop_after=min_tokens), early]
        )
        assert late.text == after.text == expected
        assert early.text == whole.text[: whole.text.index(first)]
        assert early.reason == "stop_string"


def test_stop_string_ends_output_with_grammar(engine):
    """A stop string may end an output that does not satisfy its grammar yet."""
    request = mixed_requests(1)[0]
    (whole,) = engine.generate([request])
    (cut,) = engine.generate([replace(request, stop=['":'])])
    assert whole.finished and cut.reason == "stop_string" and not cut.finished
    assert cut.text == whole.text[: whole.text.index('":')]


def test_output_ended_by_stop_id_with_text_is_finished_if_grammar_is_satisfied(engine):
    """A grammar treats a stop id with text as text, so the id may end an incomplete output."""
    request = Request(prompt="a", grammar=GrammarSpec.regex("[ab]{4}(c[ab]{4})?"), max_tokens=20)
    c, a = (engine.tokenizer.encode(char, special=False)[-1] for char in "ca")
    banned = {token: -1e3 for token in engine.tokenizer.stop_ids}
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    json_request = Request(prompt="a", grammar=GrammarSpec.json_schema(schema))
    (object_output,) = engine.generate([json_request])
    whole, inside, after, cut = engine.generate(
        [
            request,
            replace(request, stop_ids=[a], logit_bias={a: 1e3}),
            replace(request, stop_ids=[c], logit_bias=banned | {c: 1e3}),
            replace(json_request, stop_ids=object_output.tokens[2:3]),
        ]
    )
    assert whole.reason == "stop" and whole.finished
    assert (inside.reason, inside.text, inside.finished) == ("stop", "", False)
    assert after.reason == "stop" and len(after.text) == 4 and after.finished
    assert object_output.finished
    assert (cut.reason, cut.tokens) == ("stop", object_output.tokens[:3]) and not cut.finished


def test_json_schema_outputs_parse_at_high_temperature(engine):
    requests = []
    for i, request in enumerate(mixed_requests(8, seed=51)):
        requests.append(replace(request, temperature=1.5, seed=i, max_tokens=200))
    finished = 0
    for output, request in zip(engine.generate(requests), requests, strict=True):
        if output.finished and getattr(request.grammar, "kind", None) == "json_schema":
            json.loads(output.text)
            finished += 1
    assert finished
