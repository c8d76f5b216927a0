"""Tests of forced tokens, which must change only the number of rounds and not the outputs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from engine_util import demo_engine, mixed_requests
from guide_device import Device
from guide_util import SPECS
from reference_round import COUPLED, pack_bits
from table_model import COLD, MIXED, PLAIN, Case, wrong_twice
from test_guide_rounds import equal_counters

from graft.cudagraph.errors import OptionError
from graft.grammar import Vocabulary
from graft.grammar.forced import ForcedTokens


def test_forced_tokens_match_brute_force():
    """The native code has different paths for mask rows with few and with many legal ids."""
    rng = np.random.default_rng(0)
    text = b"abababababababababababab"
    tokens = [text[: i % 20 + 1] for i in range(90)] + [b"c", b"", b"abc"]
    vocabulary = Vocabulary(tokens, 100, [91])
    forced = ForcedTokens(vocabulary)
    unique_only = ForcedTokens(vocabulary, unique_only=True)
    rows = [[], [91], [92], [3, 91]]
    for _ in range(600):
        most = 93 if rng.random() < 0.3 else 90
        rows.append(np.unique(rng.integers(0, most, rng.integers(0, 80))).tolist())
    for ids in rows:
        legal = np.zeros((1, 100), bool)
        legal[0, ids] = True
        row = pack_bits(legal)[0]
        texts = [vocabulary.tokens[i] for i in ids]
        longest = max(texts, key=len, default=b"")  # the first one of the greatest length
        begin = len(ids) <= 64 and all(text and longest.startswith(text) for text in texts)
        expected = ids[texts.index(longest)] if ids and (begin or len(ids) == 1) else -1
        assert forced.token(row) == expected
        assert unique_only.token(row) == (expected if len(ids) == 1 else -1)


@pytest.mark.parametrize("chain", [False, True], ids=["with a drafter", "without a drafter"])
@pytest.mark.parametrize("name", sorted(SPECS))
def test_guide_follows_forced_tokens(xgrammar, name, chain):
    """Mask rows equal the reference matcher's rows, with Python and with native matchers."""
    forced = ForcedTokens(xgrammar.vocabulary)
    device = Device(xgrammar, slots=3, draft_length=3, masked=not chain, seed=5, forced=forced)
    for slot in range(3):
        device.join(slot, xgrammar.compile(SPECS[name]), limit=40)
    for _ in range(14):
        device.publish()
        device.run()
        device.clear_ended()
    assert equal_counters(device)["desyncs"] == 0


CASES = [
    Case(3, PLAIN, forced="beside"),
    Case(2, MIXED, forced="beside", pruned=True, stop_ids=(6,)),
    Case(3, COLD, forced="beside", late=True),
    Case(3, MIXED, forced="beside", probe=True, pruned=True),
    Case(3, PLAIN, forced="alone"),
    Case(3, MIXED, forced="alone", stop_ids=(6,)),
    Case(3, PLAIN, verify=COUPLED, forced="beside"),
]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.full if case.probe or case.late else ())
        for case in CASES
    ],
    ids=str,
)
@pytest.mark.full(
    "[draft_length=3-masked=True-length=5-forced=beside",
    "[draft_length=3-masked=True-length=5-forced=alone",
    "[draft_length=3-verify=1",
)
def test_forced_drafts_preserve_target_distribution(device, stream, pytestconfig, case):
    """The test samples 40,000 tokens with forced drafts, some of which are illegal.

    The cases include coupled sampling. With --full, 100,000 tokens are sampled per case.
    """
    samples = 100_000 if pytestconfig.getoption("full") else 16_000
    wrong, values = wrong_twice(device, stream, case, samples)
    assert not wrong, f"p-values {values}"


def outputs(requests: list, **options: Any) -> tuple[list, Any, dict[str, int]]:
    with demo_engine(**options) as engine:
        found = [(o.reason, o.tokens) for o in engine.generate(requests)]
        return found, engine.stats, engine.counters()["grammar"]


@pytest.mark.parametrize(
    "sampled", [pytest.param(False, marks=pytest.mark.full), True], ids=["greedy", "coupled"]
)
def test_engine_forced_drafts_do_not_change_outputs(pytestconfig, sampled):
    """Outputs with forced drafts equal outputs without forced drafts.

    For engines without a drafter, the forced drafts save rounds. The complete set of variants with
    sampling runs only with the option ``--full``.
    """
    requests = mixed_requests(6)
    if sampled:
        requests = [
            replace(r, temperature=0.9, top_p=0.9, seed=i, verify="coupled")
            for i, r in enumerate(requests)
        ]
    expected, plain, _ = outputs(requests, speculation=False)
    assert plain.forced_tokens == 0
    variants = [
        {"speculation": True},
        {"speculation": True, "draft_masking": "probe"},
        {"speculation": False, "draft_masking": "probe"},
        {"speculation": False, "draft_length": 5},
    ]
    for options in variants[:: 3 if sampled and not pytestconfig.getoption("--full") else 1]:
        found, stats, grammar = outputs(requests, forced_drafts=True, **options)
        assert found == expected
        assert stats.forced_tokens > 0
        assert grammar["desyncs"] == grammar["errors"] == 0
        assert stats.tokens == plain.tokens
        if not options["speculation"]:
            # Every accepted draft saves a round, except a stop id, because no bonus token follows
            # a stop id.
            saved = stats.forced_tokens - len(requests)
            assert 0 < saved <= plain.row_rounds - stats.row_rounds


def test_engine_rejects_too_many_forced_drafts():
    with pytest.raises(OptionError, match="from 1 to 63"):
        demo_engine(forced_drafts=True, speculation=False, draft_length=64)
