"""Outputs that always close: with a grammar, the output is complete within `max_tokens`.

The grammar backend is `LanguageBackend`, whose matchers know the exact distance of every state.
"""

import functools
import itertools
import re
from dataclasses import replace

import pytest
from engine_cases import DRAFTER_OPTIONS, MORE_TREE_OPTIONS, answer, settled
from engine_util import demo_engine
from reference_language import LanguageBackend

from graft.grammar import GrammarSpec
from graft.models.request import Request

PATTERNS = (
    r'\{"ids": \[[1-9][0-9]*(, [1-9][0-9]*)*\], "name": "[a-z ]*"\}',
    r"(ab|c[de]{2,4})+(;|, (x|yz)*!)",
    r"[a-z ,.]*",
)
PROMPT = [300, 301, 302]
MODES = (
    {},
    {"temperature": 1.5, "verify": "coupled"},
    {"temperature": 1.0, "verify": "rejection"},
    {"temperature": 1.2, "verify": "per_token", "top_p": 0.9},
    {"temperature": 1.0, "verify": "relaxed"},
)
ALL_OPTIONS = {**DRAFTER_OPTIONS, **MORE_TREE_OPTIONS}
QUICK = ("eagle3", "eagle3, tree", "dflash, lattice probe")


def closing_engine(**options):
    return demo_engine(**{"max_batch_size": 8, "grammar_backend": LanguageBackend, **options})


@functools.cache
def smallest_budget(pattern):
    """Return the number of tokens that the shortest output of a pattern needs."""
    with closing_engine(speculation=False) as engine:
        [output] = engine.generate([pattern_request(pattern, 1)])
    found = re.search(r"needs (\d+) tokens", output.error or "")
    return int(found[1]) if found else 1


def pattern_request(pattern, max_tokens, **options):
    spec = GrammarSpec.regex(pattern)
    return Request(tokens=PROMPT, grammar=spec, max_tokens=max_tokens, **options)


def budget_requests(modes=MODES, count=12):
    """Return requests of all patterns, with every budget from the smallest one upwards."""
    requests = []
    modes = itertools.cycle(modes)
    for pattern in PATTERNS:
        first = smallest_budget(pattern)
        for budget in range(first, first + count):
            options = {"seed": len(requests), "closing": "require", **next(modes)}
            requests.append(pattern_request(pattern, budget, **options))
    return requests


def check_complete(request, output):
    assert (output.reason, output.closing) == ("stop", "guaranteed"), output
    assert len(output.tokens) <= request.max_tokens
    assert output.finished
    text = output.text.rpartition("</think>")[2]
    assert re.fullmatch(request.grammar.text, text), output.text


@pytest.fixture(scope="module")
def engine():
    with settled(closing_engine()) as shared:
        yield shared


@pytest.fixture(scope="module")
def expected():
    """Answers to the greedy and coupled `budget_requests`, without speculation, one by one."""
    requests = budget_requests()
    with settled(closing_engine(speculation=False, max_batch_size=1, overlap=False)) as engine:
        outputs = engine.generate(requests)
    for request, output in zip(requests, outputs, strict=True):
        check_complete(request, output)
    return [
        answer(output) if request.verify in (None, "coupled") else None
        for request, output in zip(requests, outputs, strict=True)
    ]


@pytest.mark.parametrize(
    "drafter", [pytest.param(n, marks=() if n in QUICK else pytest.mark.full) for n in ALL_OPTIONS]
)
def test_closing_completes_outputs_with_every_drafter(drafter, expected):
    """Every output is complete, and greedy and coupled ones are the same as without drafts."""
    requests = budget_requests()
    with settled(closing_engine(**ALL_OPTIONS[drafter])) as engine:
        outputs = engine.generate(requests)
    for request, output, wanted in zip(requests, outputs, expected, strict=True):
        check_complete(request, output)
        assert wanted is None or answer(output) == wanted
    assert any(
        len(output.tokens) == r.max_tokens for r, output in zip(requests, outputs, strict=True)
    )


def test_closing_off_allows_incomplete_outputs(engine):
    request = pattern_request(PATTERNS[0], 8, closing="off")
    [output] = engine.generate([request])
    assert (output.reason, output.closing, len(output.tokens)) == ("length", "off", 8)
    [free] = engine.generate([Request(tokens=PROMPT, max_tokens=2)])
    assert free.closing == "off"


@pytest.mark.parametrize("mode", MODES[:2], ids=("greedy", "coupled"))
def test_closing_leaves_outputs_unchanged_that_fit(engine, mode):
    """Outputs that are complete without closing are the same with it."""
    requests = []
    for seed, pattern, budget in itertools.product(range(3), (*PATTERNS, "[ab]{3,15}"), (20, 40)):
        requests.append(pattern_request(pattern, budget, seed=seed, logprobs=3, **mode))
    closed = engine.generate(requests)
    free = engine.generate([replace(request, closing="off") for request in requests])
    reasons = set()
    for output, wanted in zip(closed, free, strict=True):
        assert output.reason == "stop"
        reasons.add(wanted.reason)
        if wanted.reason == "stop":
            assert answer(output) == answer(wanted)
    assert reasons == {"stop", "length"}


def test_closing_refuses_max_tokens_below_shortest_output(engine):
    needed = smallest_budget(PATTERNS[0])
    for closing in ("auto", "require"):
        [output] = engine.generate([pattern_request(PATTERNS[0], needed - 1, closing=closing)])
        assert (output.reason, output.error_param) == ("refused", "max_tokens")
        assert f"max_tokens is {needed - 1}" in output.error
        assert f"needs {needed} tokens" in output.error
        assert not output.tokens
    request = pattern_request(PATTERNS[0], needed)
    [output] = engine.generate([request])
    check_complete(request, output)
    assert len(output.tokens) == needed


def test_closing_counts_positions_of_the_context():
    """Without `max_tokens`, the end of the context is the budget."""
    with settled(closing_engine(max_length=40, max_batch_size=2)) as engine:
        request = pattern_request(PATTERNS[2], None, closing="require", banned_ids=())
        [output] = engine.generate([replace(request, temperature=1.0, seed=3)])
        assert output.reason == "stop" and re.fullmatch(PATTERNS[2], output.text)
        assert len(output.tokens) <= 40 - len(PROMPT)


@pytest.mark.parametrize(
    "options",
    [{"closing": "require", "grammar": None}, {"closing": "always"}, {"max_reasoning_tokens": 5}],
    ids=str,
)
def test_request_rejects_invalid_closing(engine, options):
    [output] = engine.generate([Request(tokens=PROMPT, **options)])
    assert output.reason == "refused"
    assert output.error_param == next(iter(options))
