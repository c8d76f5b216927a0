"""Greedy and coupled decoding: speculation of any kind changes no token."""

from __future__ import annotations

import numpy as np
import numpy_sampling as ref
import pytest
from sampling_round import TableRound
from table_model import (
    FIRST,
    NOTHING,
    PRUNED,
    START,
    Case,
    generate,
    make_table,
    run_case,
    without_speculation,
)

FILTERS = [
    ref.Filter(0.0), ref.Filter(1.0), ref.Filter(1.2, top_k=5, top_p=0.85, min_p=0.05),
    ref.Filter(0.4, top_p=0.9),
]  # fmt: skip


@pytest.mark.parametrize("f", FILTERS, ids=["greedy", "plain", "mixed", "cold"])
@pytest.mark.parametrize("stop_ids", [(), (6,)], ids=["endless", "stop"])
def test_output_equals_decoding_without_speculation(device, stream, f, stop_ids):
    """K = 1..3, masked, probed or not, pruned, host-made, late: 1,024 sequences stay the same."""
    base = Case(3, f, verify=ref.COUPLED, length=12, stop_ids=stop_ids)
    plain = run_case(device, stream, without_speculation(base), 1024 * 12, seed=4)
    rejection = Case(0, f, verify=ref.REJECTION, length=12, stop_ids=stop_ids)
    np.testing.assert_array_equal(run_case(device, stream, rejection, 1024 * 12, seed=4), plain)
    if not f.greedy:
        assert len(np.unique(plain, axis=0)) > 100, "seeds make different sequences"
    for k, masked, pruned, point, late in [
        (1, True, False, False, False), (2, False, False, False, False),
        (3, True, True, False, False), (3, False, True, False, True), (2, False, False, True, True),
        (3, True, False, False, True),
    ]:  # fmt: skip
        case = Case(k, f, ref.COUPLED, masked, pruned, point, stop_ids, 12, late=late)
        np.testing.assert_array_equal(
            run_case(device, stream, case, 1024 * 12, seed=4), plain, err_msg=str(case)
        )
    for k, pruned, late in [(3, False, False), (2, True, True)]:
        case = Case(k, f, ref.COUPLED, True, pruned, False, stop_ids, 12, late=late, probe=True)
        np.testing.assert_array_equal(
            run_case(device, stream, case, 1024 * 12, seed=4), plain, err_msg=str(case)
        )


def test_output_equals_the_oracle_token_by_token(device, stream):
    """Without speculation every token is argmax(log p + Gumbel(seed, position)) of the oracle."""
    f = ref.Filter(0.9, top_k=6, top_p=0.95)
    case = Case(0, f, verify=ref.COUPLED, length=8)
    table = make_table(17)
    r = TableRound(device, stream, slots=64, draft_length=0, vocab=8)
    tokens = generate(r, table, case, first_seed=2**40)
    for slot in range(64):
        a, b = START
        for t in range(case.length):
            p = ref.distribution(table.target[a, b], table.legal[a, b], f)
            token = ref.draw(p, 2**40 + slot, FIRST + 1 + t, ref.NOISE)
            assert tokens[slot, t] == token
            a, b = b, token


def test_drafts_that_share_noise_are_accepted_more_often(device, stream):
    """With the target as its own drafter every coupled draft is accepted, pruned or not wherever
    the wanted token is known."""
    table = make_table(17)
    own = type(table)(table.target, table.target, table.legal)
    r = TableRound(device, stream, slots=128, draft_length=3, vocab=8)
    case = Case(3, ref.Filter(1.0), verify=ref.COUPLED, length=9)
    rounds_before = r.replay
    tokens = generate(r, own, case, first_seed=77)
    assert (tokens != NOTHING).all()
    assert r.replay - rounds_before == 3, "1 token, then 4 and 4: nothing was refused"
    known = np.isin(tokens, PRUNED).mean()
    assert 0.2 < known < 0.95, "the pruned vocabulary of the other tests really prunes"
