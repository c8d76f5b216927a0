"""The tokens of whole requests: exactly the target's law, and what speculation may not change."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import numpy as np
import pytest
import reference_round as ref
import table_model as model
from table_model import COLD, COVERING, MIXED, NARROW, NUCLEUS, PLAIN, PRUNED, Case

EACH = [{"masked": m, "pruned": p} for m in (True, False) for p in (True, False)]
EVERY = [
    Case(k, f, stop_ids=stops, late=late, **how)
    for k, stops, late in itertools.product((1, 2, 3), ((), (6,)), (False, True))
    for filters, hows in (
        ((PLAIN, COLD, MIXED, NARROW, NUCLEUS), EACH),
        ((PLAIN, MIXED), [{"masked": False, "point": True}]),
        ((PLAIN, MIXED), [{"probe": True, "pruned": pruned} for pruned in (True, False)]),
    )
    for f, how in itertools.product(filters, hows)
]


@pytest.mark.parametrize(
    "case", [*COVERING, *(pytest.param(case, marks=pytest.mark.full) for case in EVERY)], ids=str
)
def test_pairs_of_tokens_follow_the_exact_law(device, stream, pytestconfig, case):
    """Neighbouring pairs of as many tokens as show the mutants pass chi-square, impossible ones
    never occur; in settings that cover all pairs. With --full the whole product, of 200,000."""
    samples = 200_000 if pytestconfig.getoption("full") else 50_000
    wrong, values = model.wrong_twice(device, stream, case, samples)
    assert not wrong, f"p-values {values}"


def test_the_chi_square_tail_is_the_tabulated_one():
    """The 5 % and .1 % points of common tables."""
    points = {1: (3.841, 10.828), 2: (5.991, 13.816), 7: (14.067, 24.322), 40: (55.758, 73.402)}
    for dof, (five, tenth) in points.items():
        np.testing.assert_allclose(model.chi_square_tail(five, dof), 0.05, rtol=2e-3)
        np.testing.assert_allclose(model.chi_square_tail(tenth, dof), 0.001, rtol=2e-3)


# Greedy and coupled decoding: speculation of any kind changes no token.

FILTERS = [ref.Filter(0.0), PLAIN, MIXED, ref.Filter(0.4, top_p=0.9)]
SPECULATION = [
    (1, "masked"), (2, ""), (3, "masked pruned"), (3, "pruned late"), (2, "point late"),
    (3, "masked late"), (3, "masked probe"), (2, "masked probe pruned late"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(4), ids=["greedy", "plain", "mixed", "cold"])
@pytest.mark.parametrize("stop_ids", [(), (6,)], ids=["endless", "stop"])
def test_output_equals_decoding_without_speculation(device, stream, pytestconfig, number, stop_ids):
    """K = 1..3, masked, probed or not, pruned, host-made, late: 1,024 sequences stay the same; by
    turns without and with a stop id, and with --full in both ways."""
    f, turn = FILTERS[number], number + len(stop_ids)
    base = Case(3, f, verify=ref.COUPLED, length=12, stop_ids=stop_ids)
    run = functools.partial(model.run_case, device, stream, samples=1024 * 12, seed=4)
    plain = run(model.without_speculation(base))
    rejection = Case(0, f, verify=ref.REJECTION, length=12, stop_ids=stop_ids)
    np.testing.assert_array_equal(run(rejection), plain)
    if not f.greedy:
        assert len(np.unique(plain, axis=0)) > 100, "seeds make different sequences"
    for i, (k, how) in enumerate(SPECULATION):
        if (i + turn) % 2 and not pytestconfig.getoption("full"):
            continue
        flags = {"masked": False, **dict.fromkeys(how.split(), True)}
        case = replace(base, draft_length=k, **flags)
        np.testing.assert_array_equal(run(case), plain, err_msg=str(case))


def test_drafts_that_share_noise_are_accepted_more_often(make_round):
    """With the target as its own drafter every coupled draft is accepted, pruned or not wherever
    the wanted token is known."""
    table = model.make_table(17)
    own = type(table)(table.target, table.target, table.legal)
    r = make_round(slots=128, draft_length=3, vocab=8)
    case = Case(3, ref.Filter(1.0), verify=ref.COUPLED, length=9)
    rounds_before = r.replay
    tokens = model.generate(r, own, case, first_seed=77)
    assert (tokens != model.NOTHING).all()
    assert r.replay - rounds_before == 3, "1 token, then 4 and 4: nothing was refused"
    known = np.isin(tokens, PRUNED).mean()
    assert 0.2 < known < 0.95, "the pruned vocabulary of the other tests really prunes"
