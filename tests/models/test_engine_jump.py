"""Jump-forward on the real engine: the text it would have been, in fewer rounds, whatever else
happens to a request."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from engine_util import demo_engine, mixed_requests
from test_engine_overlap import COUPLED, answer, disturbed, settled, workload

from graft.cudagraph.errors import OptionError
from graft.cudagraph.lanes import StreamLane
from graft.grammar.backend import make_backend
from graft.grammar.llguidance import LLGuidanceBackend
from graft.grammar.matcher import Matcher
from graft.grammar.statement import GrammarSpec
from graft.models.engine import Engine
from graft.models.jump import SEAM
from graft.models.request import Output, Request

#: All of it is forced.
CONST = {
    "type": "object",
    "properties": {
        "a_long_property_name": {"const": "and a long constant, even with an é in it"},
        "another_property_name": {"const": [1, 2, {"nested": "value"}]},
    },
    "required": ["a_long_property_name", "another_property_name"],
    "additionalProperties": False,
}


def const_request(**options: Any) -> Request:
    spec = GrammarSpec.json_schema(CONST, key_order="schema")
    return Request(prompt="anything", grammar=spec, **({"max_tokens": 200} | options))


@pytest.mark.parametrize("speculation", [False, True])
def test_forced_text_is_the_tokenizers_own_spelling(speculation):
    """A whole output that is forced: the text of an engine that samples it, in the tokens that the
    tokenizer gives it, in a round or two."""
    with demo_engine(speculation=speculation, max_batch_size=1) as engine:
        (plain,) = engine.generate([const_request()])
    with settled(demo_engine(speculation=speculation, max_batch_size=1,
                             jump_forward=True)) as engine:  # fmt: skip
        (output,) = engine.generate([const_request()])
        spelled = engine.tokenizer.backend.encode(plain.text, add_special_tokens=False).ids
    assert output.text == plain.text and output.reason == "stop"
    assert json.loads(output.text)["another_property_name"] == [1, 2, {"nested": "value"}]
    assert output.tokens[:-1] == spelled
    assert output.jumps == 1 and output.jumped_tokens >= len(spelled) - 4
    assert output.rounds <= 5 and not output.exact
    assert plain.jumps == plain.jumped_tokens == plain.rounds_saved == 0 and plain.exact


@pytest.fixture(scope="module")
def alone() -> dict[str, list[tuple[str, list[int], str]]]:
    """What each request gets by itself: no drafter, one row, one round in flight."""
    options: dict[str, Any] = {"speculation": False, "max_batch_size": 1, "overlap": False}
    with settled(demo_engine(**options, jump_forward=True, jump_least=2)) as engine:
        found = {
            name: [answer(engine.generate([r])[0]) for r in workload(**sampling)]
            for name, sampling in (("greedy", {}), ("coupled", COUPLED))
        }
        assert engine.stats.jumps > 20
        return found


def check(output: Output, expected: tuple[str, list[int], str], where: object) -> None:
    """The same answer; of a cancelled one the text, and all tokens that were final."""
    if output.reason != "cancelled":
        assert answer(output) == expected, where
        return
    final = max(len(output.tokens) - SEAM, 0)
    assert expected[2].startswith(output.text.rstrip("\ufffd")), where
    assert output.tokens[:final] == expected[1][:final], where


SHAPES: list[dict[str, Any]] = [
    {"max_batch_size": 1, "mask_drafts": False},
    {"max_batch_size": 2, "forced_drafts": True},
    {"max_batch_size": 3, "speculation": False, "forced_drafts": True, "draft_length": 4},
    {"max_batch_size": 4, "draft_legality": "probe", "overlap": False},
    {"max_batch_size": 5, "pages": 40, "page_size": 16, "max_length": 400},
    {"max_batch_size": 8, "grammar_transport": "native", "grammar_threads": 2,
     "grammar_budget_us": 30.0},
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_disturbed_requests_jump_the_same(alone, shape):
    """Greedy and coupled, joined late, preempted, cancelled, with few pages or late grammar: all
    tokens as if each ran alone, jumps included."""
    with settled(demo_engine(jump_forward=True, jump_least=2, **shape)) as engine:
        for mode in ("greedy", "coupled"):
            requests = workload(**({} if mode == "greedy" else COUPLED))
            outputs, _ = disturbed(engine, requests, seed=shape["max_batch_size"])
            for request, expected in zip(requests, alone[mode], strict=True):
                check(outputs[str(request.id)], expected, (mode, request.id))
        assert engine.stats.jumps > 0 and engine.stats.preemptions > 0


@pytest.mark.full
@pytest.mark.parametrize("transport", ["native", "mailbox", "spinkernel", "python"])
def test_disturbed_jumps_for_long(alone, transport):
    """Thirty disturbed runs at several batch sizes, by every transport."""
    for batch in (1, 3, 5, 8):
        options: dict[str, Any] = {"grammar_transport": transport, "max_batch_size": batch}
        with settled(demo_engine(jump_forward=True, jump_least=2, **options)) as engine:
            for seed in range(8):
                mode = "greedy" if seed % 2 else "coupled"
                requests = workload(**({} if mode == "greedy" else COUPLED))
                outputs, _ = disturbed(engine, requests, seed=1000 * batch + seed)
                for request, expected in zip(requests, alone[mode], strict=True):
                    check(outputs[str(request.id)], expected, (batch, seed, request.id))


def test_overlap_keeps_jumps_of_rejection_sampling():
    """A jump begins a round anew with and without a round in flight: the same tokens are drawn."""
    requests = workload(temperature=0.9, verify="rejection")
    found = []
    for overlap in (True, False):
        options: dict[str, Any] = {"overlap": overlap, "max_batch_size": 4}
        with settled(demo_engine(jump_forward=True, jump_least=2, **options)) as engine:
            found.append([answer(o) for o in engine.generate(requests)])
            assert engine.stats.jumps > 10
    assert found[0] == found[1]


def test_rounds_saved_are_the_rounds_saved():
    """Without drafts and overlap the count is exact; texts are those of sampling."""
    requests = mixed_requests(6)
    rounds, texts = [], []
    for jump in (False, True):
        with settled(demo_engine(speculation=False, overlap=False, jump_forward=jump)) as engine:
            outputs = engine.generate(requests)
            rounds.append([o.rounds for o in outputs])
            texts.append([o.text for o in outputs])
            stats = engine.stats
            made = sum(len(o.tokens) for o in outputs)
            assert made == stats.tokens + stats.jumped_tokens
            assert stats.jumped_tokens == sum(o.jumped_tokens for o in outputs)
    assert texts[0] == texts[1]
    saved = [before - after for before, after in zip(*rounds, strict=True)]
    assert sum(saved) > 10 and saved == [o.rounds_saved for o in outputs]


def test_jumps_are_exact_where_one_spelling_is_legal():
    """With forced text narrowed to the tokenizer's own spelling a jump changes no token, at any
    temperature; and no output that is called exact is changed by any grammar."""
    requests = [replace(r, temperature=0.8, seed=i, verify="coupled")
                for i, r in enumerate([const_request(), *mixed_requests(5)])]  # fmt: skip
    for canonical in (True, False):
        options: dict[str, Any] = {
            "grammar_backend": functools.partial(LLGuidanceBackend, canonical=canonical)
        }
        found = []
        for jump in (False, True):
            with settled(demo_engine(speculation=False, jump_forward=jump, **options)) as engine:
                found.append(engine.generate(requests))
        exact = [after.exact for after in found[1]]
        assert all(exact) if canonical else not all(exact)
        for before, after in zip(*found, strict=True):
            assert before.tokens == after.tokens or not after.exact
        assert sum(output.jumped_tokens for output in found[1]) > 30


def test_every_max_tokens():
    """The limit holds within a jump too; what there is begins the whole output."""
    with settled(demo_engine(max_batch_size=2, jump_forward=True, jump_least=2)) as engine:
        for base in (const_request(), replace(mixed_requests(1)[0], max_tokens=200)):
            (whole,) = engine.generate([base])
            assert whole.reason == "stop" and whole.jumps > 0
            for limit in range(1, len(whole.tokens), 3):
                (output,) = engine.generate([replace(base, max_tokens=limit)])
                assert output.reason == "length" and len(output.tokens) == limit
                assert whole.text.startswith(output.text)


def test_streams_get_final_tokens_and_all_text():
    """No token that a stream was given is rewritten; texts and tokens add up to the output."""
    with settled(demo_engine(jump_forward=True, jump_least=2)) as engine:
        events = list(engine.stream([*mixed_requests(5), const_request()]))
        tokenizer, ahead = engine.tokenizer, 0
        for output in (e.output for e in events if e.output is not None):
            mine = [e for e in events if e.id == output.id]
            assert "".join(e.text for e in mine) == output.text
            assert [t for e in mine for t in e.tokens] == output.tokens
            text, tokens = "", []
            for event in mine[:-1]:
                text, tokens = text + event.text, [*tokens, *event.tokens]
                ahead += len(text) > len(tokenizer.decode(tokens))
    assert ahead > 0, "text waits for tokens"


def test_an_error_while_jumping_ends_its_request_alone(monkeypatch):
    """A grammar that fails when asked what it forces, at the start or later, harms no other."""
    plain = Matcher.forced_text
    asked = dict.fromkeys(("first", "later"), 0)

    def failing(self: Matcher) -> bytes:
        for name, when in (("first", 1), ("later", 3)):
            if name in self.compiled.spec.text:
                asked[name] += 1
                if asked[name] == when:
                    raise (RuntimeError if when == 1 else KeyError)("no idea")
        return plain(self)

    monkeypatch.setattr(Matcher, "forced_text", failing)
    bad = [replace(const_request(), grammar=GrammarSpec.regex(f"[ab]{name}[0-9]+{name}"))
           for name in ("first", "later")]  # fmt: skip
    good = mixed_requests(3)
    with settled(demo_engine(jump_forward=True)) as engine:
        expected = [answer(o) for o in engine.generate(good)]
        refused, failed, *others = engine.generate([*bad, *good])
        assert refused.reason == "refused" and failed.reason == "error"
        assert refused.error == "no idea" and failed.error == "'no idea'"
        assert [answer(o) for o in others] == expected


def test_grammars_in_python_jump_too():
    """A backend without a native side, and free requests beside it, which never jump."""
    free = Request(tokens=[300, 301, 302], max_tokens=20)
    options: dict[str, Any] = {
        "grammar_transport": "python",
        "grammar_backend": lambda v: make_backend("llguidance", v, native=False),
    }
    texts = []
    for jump in (False, True):
        with settled(demo_engine(speculation=False, jump_forward=jump, **options)) as engine:
            spec = GrammarSpec.regex('[ab]", "a longer name": [0-9]')
            guided, unguided = engine.generate([replace(const_request(), grammar=spec), free])
            texts.append((guided.text, unguided.tokens))
            assert (guided.jumps > 0) == jump and not unguided.jumps
    assert texts[0] == texts[1]


def test_keys_and_values_behind_a_change_are_those_of_a_whole_prefill():
    """Bit for bit, in both caches: prefill one text, exchange its end, prefill from there."""
    with demo_engine(max_batch_size=2, max_length=320) as engine:
        first, second = prefilled_twice(engine)
    assert len(first) == 4 and first == second


def prefilled_twice(engine: Engine) -> list[list[bytes]]:
    """Keys and values of both caches of a slot whose text was changed, and of one that had it."""
    rng = np.random.default_rng(2)
    built, lane = engine._built, StreamLane(engine._built.stream)
    tokens = [rng.integers(0, 2000, 90).tolist() for _ in range(2)]
    changed = [*tokens[0][:12], *tokens[1][12:]]
    for slot in (0, 1):
        for cache in built.caches:
            assert cache.allocate(slot, 90)
            cache.set_table(lane, slot)
    built.prefill.run(lane, 0, tokens[0])
    built.prefill.extend(lane, 0, changed, 11)
    built.prefill.run(lane, 1, changed)
    built.stream.synchronize()
    found: list[list[bytes]] = []
    for slot in (0, 1):
        owned = [(array.to_host(), list(cache.pages_of(slot)))
                 for cache in built.caches for array in (cache.k, cache.v)]  # fmt: skip
        paged = [array[:, pages] for array, pages in owned]
        found.append([a.reshape(len(a), -1, *a.shape[3:])[:, :89].tobytes() for a in paged])
        for cache in built.caches:
            cache.release(slot)
    return found


def test_bad_least_length():
    """Refused by name before anything runs."""
    with pytest.raises(OptionError, match="jump_least"):
        demo_engine(jump_forward=True, jump_least=0)
