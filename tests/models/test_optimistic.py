"""Engines whose tokens are sampled without masks and then checked give the same outputs.

The expected outputs come from an engine without a drafter that fills every mask row and runs one
request at a time.
"""

from __future__ import annotations

import functools
import random
from dataclasses import replace
from typing import Any

import pytest
from engine_cases import DRAFTER_OPTIONS, MORE_TREE_OPTIONS, answer, answers, settled
from engine_util import demo_engine, mixed_requests
from reference_matchers import ReferenceLLGuidance

from graft.cudagraph.errors import OptionError
from graft.grammar import GrammarSpec

SAMPLED = {"temperature": 0.9}
#: Options of the requests. Drafts that the grammar has probed are not tested by rejection sampling,
#: so tokens are sampled as with coupled verification.
MODES = {
    "greedy": {},
    "coupled": {**SAMPLED, "verify": "coupled"},
    "rejection": {**SAMPLED, "verify": "rejection"},
    "filtered": {**SAMPLED, "top_p": 0.95, "verify": "coupled"},
}
NESTED = 'root ::= "[" (root ("," root)*)? "]" | "x"'
GRAMMARS = [
    GrammarSpec.choice(["yes", "no", "perhaps"]),
    GrammarSpec.regex("[a-f]{3,9}(-[0-9]+)*"),
    GrammarSpec.json_object(),
    GrammarSpec.ebnf(NESTED),
]
OPTIMISTIC = {
    name: {**options, "draft_masking": "optimistic"}
    for name, options in (DRAFTER_OPTIONS | MORE_TREE_OPTIONS).items()
    if not options.get("forced_drafts")
} | {"none": {"speculation": False, "draft_masking": "optimistic"}}
QUICK = ("none", "eagle3, tree", "dflash, lattice probe")


def requests_of(count: int, max_tokens: int) -> list:
    """Return requests with schemas and with other grammars, in all modes."""
    requests = mixed_requests(count, seed=31, max_tokens=max_tokens)
    for i, grammar in enumerate(GRAMMARS * (count // 8)):
        requests.append(replace(requests[i], grammar=grammar))
    requests.append(replace(requests[0], grammar=None))
    numbered = []
    for i, request in enumerate(requests):
        for mode, options in MODES.items():
            if mode == "rejection" and request.grammar is None:
                continue  # its drafts are sampled from a stored distribution
            numbered.append(replace(request, id=f"{i} {mode}", seed=70 + i, **options))
    return numbered


@functools.cache
def expected_answers(count: int, max_tokens: int, backend: Any):
    """Return requests and their answers without drafts, with filled mask rows."""
    requests = requests_of(count, max_tokens)
    options = {"speculation": False, "max_batch_size": 1, "overlap": False}
    with settled(demo_engine(**options, grammar_backend=backend)) as engine:
        expected = answers(engine.generate(coupled(requests)))
        counters = engine.counters()["grammar"]
    assert counters["checks"] == counters["check_calls"] == 0
    return requests, expected


def coupled(requests: list) -> list:
    """Return the requests with coupled instead of rejection sampling."""
    return [replace(r, verify="coupled" if r.verify else None) for r in requests]


def check_outputs(count: int, max_tokens: int, backend: Any = "auto", **options) -> dict[str, int]:
    """Compare the outputs of an optimistic engine; return its grammar counters."""
    requests, expected = expected_answers(count, max_tokens, backend)
    order = random.Random(3).sample(range(len(requests)), len(requests))
    options = {"max_batch_size": 5, **options}
    with settled(demo_engine(**options, grammar_backend=backend)) as engine:
        outputs = engine.generate([requests[i] for i in order])
        counters = engine.counters()["grammar"]
    found = dict(zip(order, map(answer, outputs), strict=True))
    different = [requests[i].id for i in order if found[i] != expected[i]]
    assert not different
    return counters


@pytest.mark.parametrize(
    "drafter, count",
    [
        *((name, 8) for name in QUICK),
        *(pytest.param(name, 24, marks=pytest.mark.full) for name in OPTIMISTIC),
    ],
)
def test_optimistic_engine_gives_same_outputs(drafter, count):
    """Outputs equal those of filled rows, and few rows are filled for tokens that are checked."""
    max_tokens = 12 if count == 8 else 40
    counters = check_outputs(count, max_tokens, **OPTIMISTIC[drafter])
    assert counters["checks"] > 100
    assert counters["check_misses"] < counters["checks"] / 3
    assert drafter != "none" or count == 8 or counters["fills_ahead"] > 0


@pytest.mark.full
@pytest.mark.parametrize("drafter", ["none", "eagle3", "dflash, tree"])
@pytest.mark.parametrize("backend", ["xgrammar", ReferenceLLGuidance])
def test_optimistic_outputs_are_equal_for_each_backend(drafter, backend):
    """XGrammar's matchers and matchers that are written in Python check tokens as well."""
    counters = check_outputs(8, 30, backend, **OPTIMISTIC[drafter])
    assert counters["checks"] > 200


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [
        {"grammar_transport": "mailbox"},
        {"grammar_transport": "spinkernel"},
        {"composition": "two"},
        {"grammar_budget_us": 1.0, "grammar_threads": 2},
        {"draft_length": "auto"},
        {"programmatic": False, "overlap": False},
    ],
    ids=str,
)
def test_optimistic_outputs_are_equal_for_each_engine_option(options):
    """Transports, split rounds, late requests and cut drafts change no output."""
    counters = check_outputs(8, 30, **OPTIMISTIC["eagle3"], **options)
    assert counters["checks"] > 200
    assert ("grammar_budget_us" in options) == (counters["late_rows"] > 0)


def test_optimistic_engine_fills_rows_of_requests_that_need_them():
    """Filters and parameters that depend on the mask are incompatible with unmasked sampling."""
    base = mixed_requests(1, seed=5, max_tokens=8)[0]
    sampled = replace(base, **SAMPLED, verify="coupled")
    filled = [
        replace(sampled, top_k=5),
        replace(sampled, top_p=0.5),
        replace(sampled, min_p=0.1),
        replace(base, min_tokens=3),
        replace(base, logprobs=1, logprobs_masked=True),
        replace(base, verify="relaxed"),
    ]
    checked = [base, sampled, replace(base, top_k=5, top_p=0.5), replace(sampled, logprobs=1)]
    with settled(demo_engine(**OPTIMISTIC["none"])) as engine:
        for request in filled + checked:
            before = engine.counters()["grammar"]
            engine.generate([request])
            after = engine.counters()["grammar"]
            assert (after["checks"] > before["checks"]) == (request in checked), request


@pytest.mark.parametrize(
    "options, message",
    [
        ({"mask_drafts": False}, "draft_masking='optimistic' requires mask_drafts=True"),
        (
            {"speculation": False, "forced_drafts": True},
            "cannot be combined with forced_drafts without a drafter",
        ),
    ],
)
def test_optimistic_option_is_refused_if_mask_rows_are_needed(options, message):
    with pytest.raises(OptionError, match=message):
        demo_engine(draft_masking="optimistic", **options)
