"""Requests come, fail, are cancelled and leave, each alone."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from engine_util import mixed_requests

from graft.grammar.statement import GrammarSpec
from graft.models.engine import Engine
from graft.models.request import Request
from graft.models.text import StopFinder
from graft.sampling.state import MAX_STOP_IDS


def test_what_a_round_costs(engine: Engine) -> None:
    """One graph launch, counted by engine and device alike, and at most K+1 mask rows a request."""
    engine.generate(mixed_requests(1))
    engine.settle()
    engine.reset_stats()
    before = engine.counters()
    engine.generate(mixed_requests(6))
    engine.settle()
    after, stats = engine.counters(), engine.stats
    assert stats.rounds > 0
    if engine.device.kind == "soft":
        launched = [c["device"]["count"]["graph_launch"] for c in (before, after)]
        assert launched[1] - launched[0] == stats.rounds
    fills = after["grammar"]["fills"] - before["grammar"]["fills"]
    assert 0 < fills <= (engine.options.draft_length + 1) * stats.row_rounds


BAD = {
    "temperature": {"temperature": -1.0},
    "temperature nan": {"temperature": float("nan")},
    "top_p 0": {"top_p": 0.0},
    "top_p 2": {"top_p": 2.0},
    "top_k": {"top_k": -1},
    "min_p": {"min_p": 1.5},
    "seed": {"seed": -5},
    "max_tokens": {"max_tokens": 0},
    "verify": {"verify": "hope"},
    "messages": {"prompt": None, "messages": 5},
    "message": {"prompt": None, "messages": [5]},
    "prompt": {"prompt": "\ud800"},
    "surrogate in a message": {"prompt": None, "messages": [{"role": "user", "content": "\udfff"}]},
    "number in a message": {"prompt": None, "messages": [{"role": "user", "content": 10**5000}]},
    "object in a message": {"prompt": None, "messages": [{"role": "user", "content": object()}]},
    "huge temperature": {"temperature": 10**400},
    "unspeakable temperature": {"temperature": -(10**5000)},
    "unspeakable top_k": {"top_k": 10**5000},
    "id": {"id": ["unhashable"]},
    "special_tokens": {"special_tokens": "no"},
    "timeout_s": {"timeout_s": 0},
    "many stop ids": {"stop_ids": list(range(MAX_STOP_IDS + 1))},
    "stop text": {"grammar": None, "stop": "abc"},
    "tokens": {"prompt": None, "tokens": [3, -1]},
    "stop": {"grammar": None, "stop": 5},
    "stop with grammar": {"stop": ["}"]},
    "stop ids": {"stop_ids": [10**6]},
    "long": {"max_tokens": 10**6},
    "prompt longer than the cache": {"prompt": None, "tokens": [5] * 5000},
    "prompt and tokens": {"tokens": [1]},
    "bias of no id": {"logit_bias": {10**6: 1.0}},
    "bias by text": {"logit_bias": {"5": 1.0}},
    "endless bias": {"logit_bias": {5: float("-inf")}},
    "bias of nothing": {"logit_bias": 3},
    "many biases": {"logit_bias": dict.fromkeys(range(1025), 1.0)},
    "allowed ids": {"allowed_ids": [-1]},
    "nothing allowed": {"allowed_ids": []},
    "nothing left": {"allowed_ids": [5, 6], "banned_ids": [6, 5, 7]},
    "banned ids": {"banned_ids": [0.5]},
    "banned text": {"banned_ids": 5},
    "more ids than there are": {"banned_ids": [1] * 10**6},
    "presence_penalty": {"presence_penalty": 2.5},
    "frequency_penalty": {"frequency_penalty": float("nan")},
    "repetition_penalty": {"repetition_penalty": 0.0},
    "min_tokens": {"min_tokens": 161},
    "logprobs": {"logprobs": 21},
    "n": {"n": 0},
    "many samples": {"n": 129},
    "sample": {"sample": -1},
}


@pytest.mark.parametrize("change", BAD.values(), ids=BAD)
def test_bad_option_ends_alone(engine: Engine, change: dict[str, object]) -> None:
    """A request with a senseless option is refused in a sentence; its neighbour is served."""
    good = mixed_requests(1)[0]
    refused, served = engine.generate([replace(good, **change), good])
    assert refused.reason == "refused" and refused.error and not refused.tokens
    assert refused.error_type in ("RequestError", "TokenizerError") and len(refused.error) < 300
    assert served.reason == "stop"


def test_what_is_no_request_is_refused_and_none_is_nothing(engine: Engine) -> None:
    """Objects of other kinds fail alone; None for stop strings and ids means none."""
    good = replace(mixed_requests(1)[0], stop=None, stop_ids=None)
    refused, served = engine.generate([{"prompt": "x"}, good])  # type: ignore[list-item]
    assert "must be a Request" in (refused.error or "") and served.reason == "stop"


def test_max_tokens_is_a_length_ending(engine: Engine) -> None:
    """A request ends after exactly max_tokens, wherever in a round that falls."""
    base = mixed_requests(1)[0]
    for limit in range(1, 9):
        (output,) = engine.generate([replace(base, max_tokens=limit)])
        assert output.reason == "length" and len(output.tokens) == limit


def test_one_token_prompt(engine: Engine) -> None:
    """A prompt of one token needs no prefill and still decodes."""
    (output,) = engine.generate(
        [Request(tokens=[40], grammar=GrammarSpec.choice(["yes", "no"]), max_tokens=8)]
    )
    assert output.reason == "stop" and output.text in ("yes", "no")


def test_stop_string_cuts(engine: Engine) -> None:
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


def test_stop_strings_are_found_as_by_searching_the_whole_text() -> None:
    """Overlapping strings in pieces of any size: found in the same piece and at the same place, and
    what is held back is the longest end of the text that begins a string."""
    rng = random.Random(4)
    for _ in range(400):
        stops = {"".join(rng.choices("ab", k=rng.randint(1, 6))) for _ in range(rng.randint(1, 4))}
        finder, text = StopFinder(sorted(stops)), ""
        for _ in range(30):
            piece = "".join(rng.choices("abc", k=rng.randint(0, 4)))
            text += piece
            expected = min((text.find(s) for s in stops if s in text), default=None)
            assert finder.feed(piece) == expected
            if expected is not None:
                break
            ends = [n for n in range(len(text) + 1) if any(s.startswith(text[n:]) for s in stops)]
            assert finder.held == len(text) - ends[0]


def test_stochastic_is_reproducible(engine: Engine) -> None:
    """A seed names an output; the seed of an unseeded request is reported and repeats it."""
    request = replace(mixed_requests(1)[0], temperature=1.0)
    (first,) = engine.generate([request])
    (second,) = engine.generate([replace(request, seed=first.seed)])
    assert first.tokens == second.tokens


def test_outputs_are_valid_json(engine: Engine) -> None:
    """Under a schema, even at a high temperature, a finished output parses."""
    requests = [
        replace(r, temperature=1.5, seed=i, max_tokens=200)
        for i, r in enumerate(mixed_requests(8, seed=51))
    ]
    finished = [
        o for o, r in zip(engine.generate(requests), requests, strict=True)
        if o.finished and r.grammar is not None and r.grammar.kind == "json_schema"
    ]  # fmt: skip
    assert finished
    for output in finished:
        json.loads(output.text)
