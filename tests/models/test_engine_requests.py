"""Requests come, fail, are cancelled and leave, each alone."""

import json
import random
from dataclasses import replace

import pytest
from engine_util import mixed_requests, outputs

from graft.models.errors import MigrationError, RequestError
from graft.models.request import Relaxed, Request
from graft.models.text.stop import StopFinder
from graft.sampling.params import MAX_STOP_IDS


def test_what_a_round_costs(engine):
    """One graph launch, counted by engine and device alike, beside those of pieces of prompts, and
    at most K+1 mask rows a request."""
    pieces = engine._scheduler.seating.progress
    engine.generate(mixed_requests(1))
    engine.synchronize()
    engine.reset_stats()
    before = engine.counters()
    begun = pieces()
    engine.generate(mixed_requests(6))
    engine.synchronize()
    after = engine.counters()
    stats = engine.stats
    assert stats.rounds > 0
    if engine.device.kind == "soft":
        launched = [c["device"]["count"]["graph_launch"] for c in (before, after)]
        assert launched[1] - launched[0] == stats.rounds + pieces() - begun
    fills = after["grammar"]["fills"] - before["grammar"]["fills"]
    assert 0 < fills <= (engine.options.draft_length + 1) * stats.row_rounds


#: Values that an option of a request cannot have.
WRONG = {
    "temperature": (-1.0, float("nan"), 10**400, -(10**5000)),
    "top_p": (0.0, 2.0),
    "top_k": (-1, 10**5000),
    "min_p": (1.5,),
    "seed": (-5,),
    "max_tokens": (0, 10**6),
    "verify": ("hope",),
    "id": (["unhashable"],),
    "special_tokens": ("no",),
    "timeout_s": (0,),
    "priority": (0.5, "high"),
    "prompt": ("\ud800",),
    "stop_ids": (list(range(MAX_STOP_IDS + 1)), [10**6]),
    "stop": (["}"],),  # with a grammar
    "tokens": ([1],),  # beside a prompt
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
#: And such that show with others: other prompts, no grammar, nothing that is left.
BAD = [
    *({name: value} for name, values in WRONG.items() for value in values),
    *({"prompt": None, "messages": messages} for messages in (5, [5])),
    *(
        {"prompt": None, "messages": [{"role": "user", "content": content}]}
        for content in ("\udfff", 10**5000, object())
    ),
    *({"prompt": None, "tokens": tokens} for tokens in ([3, -1], [5] * 5000)),
    *({"grammar": None, "stop": stop} for stop in ("abc", 5)),
    {"allowed_ids": [5, 6], "banned_ids": [6, 5, 7]},
]


@pytest.mark.parametrize("change", BAD, ids=lambda change: "-".join(change))
def test_bad_option_ends_alone(engine, change):
    """A request with a senseless option is refused in a sentence; its neighbour is served."""
    good = mixed_requests(1)[0]
    refused, served = engine.generate([replace(good, **change), good])
    assert refused.reason == "refused" and refused.error and not refused.tokens
    assert refused.error_type in ("RequestError", "TokenizerError") and len(refused.error) < 300
    assert served.reason == "stop"


def test_what_is_no_request_is_refused_and_none_is_nothing(engine):
    """Objects of other kinds fail alone; None for stop strings and ids means none."""
    good = replace(mixed_requests(1)[0], stop=None, stop_ids=None)
    with pytest.raises(RequestError, match="must be a Request, got 5"):
        engine.warm(5)
    with pytest.raises(MigrationError, match="must be a HandOver, got 5"):
        engine.migrate_in(5)
    refused, served = engine.generate([{"prompt": "x"}, good])
    assert "must be a Request" in (refused.error or "") and served.reason == "stop"


def test_relaxed_requests(engine):
    """They accept what others refuse, obey their grammar and say that they are not exact. Relaxed
    up to their first token, which no draft can be, they are as others, also when preempted."""
    requests = [
        replace(r, temperature=1.2, verify="coupled", seed=i, id=str(i))
        for i, r in enumerate(mixed_requests(6))
    ]
    plain = engine.generate(requests)
    relaxed = [replace(r, verify="relaxed", relaxed=Relaxed(10**6, 1.0)) for r in requests]
    loose = engine.generate(relaxed)
    assert all(o.exact for o in plain) and not any(o.exact for o in loose)
    assert {o.reason for o in loose} <= {"stop", "length"}
    shares = [
        sum(o.accepted for o in those) / sum(o.drafted for o in those) for those in (plain, loose)
    ]
    assert shares[0] < 0.9 < shares[1]
    assert not engine.counters()["grammar"]["desyncs"]

    for request, output in zip(relaxed, plain, strict=True):
        engine.submit(replace(request, relaxed=Relaxed(10**6, 1.0, until=output.tokens[0])))
    done = {}
    preempted = 0
    while engine.busy:
        done |= outputs(engine.step())
        if len(done) == preempted:
            preempted += any(engine.preempt(o.id) for o in plain if o.id not in done)
    assert preempted
    assert [done[o.id].tokens for o in plain] == [o.tokens for o in plain]


def test_max_tokens_is_a_length_ending(engine):
    """A request ends after exactly max_tokens, wherever in a round that falls."""
    base = mixed_requests(1)[0]
    for limit in range(1, 9):
        (output,) = engine.generate([replace(base, max_tokens=limit)])
        assert output.reason == "length" and len(output.tokens) == limit


def test_stop_string_cuts(engine):
    """A stop string ends a free request, is cut from its text, and is never streamed."""
    base = Request(tokens=[300, 301, 302], max_tokens=60, temperature=3.0, seed=5)
    (whole,) = engine.generate([base])
    stop = whole.text[20:24]
    assert len(stop) == 4
    events = list(engine.stream([replace(base, stop=[stop])]))
    output = events[-1].output
    assert output is not None and output.reason == "stop_string"
    assert output.text == whole.text[: whole.text.index(stop)]
    assert "".join(e.text for e in events) == output.text


def test_stop_strings_are_found_as_by_searching_the_whole_text():
    """Overlapping strings in pieces of any size: found in the same piece and at the same place, and
    what is held back is the longest end of the text that begins a string."""
    rng = random.Random(4)
    for _ in range(400):
        stops = {"".join(rng.choices("ab", k=rng.randint(1, 6))) for _ in range(rng.randint(1, 4))}
        finder = StopFinder(sorted(stops))
        text = ""
        for _ in range(30):
            piece = "".join(rng.choices("abc", k=rng.randint(0, 4)))
            text += piece
            expected = min((text.find(s) for s in stops if s in text), default=None)
            assert finder.feed(piece) == expected
            if expected is not None:
                break
            ends = [n for n in range(len(text) + 1) if any(s.startswith(text[n:]) for s in stops)]
            assert finder.held == len(text) - ends[0]


def test_outputs_are_valid_json(engine):
    """Under a schema, even at a high temperature, a finished output parses."""
    requests = [
        replace(r, temperature=1.5, seed=i, max_tokens=200)
        for i, r in enumerate(mixed_requests(8, seed=51))
    ]
    finished = 0
    for output, request in zip(engine.generate(requests), requests, strict=True):
        if output.finished and getattr(request.grammar, "kind", None) == "json_schema":
            json.loads(output.text)
            finished += 1
    assert finished
