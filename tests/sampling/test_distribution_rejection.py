"""Rejection sampling yields exactly the masked, filtered target distribution."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from table_model import (
    COLD,
    COVERING,
    MIXED,
    NARROW,
    NUCLEUS,
    PLAIN,
    Case,
    chi_square_tail,
    wrong_twice,
)

EVERY = [
    Case(k, f, masked=masked, pruned=pruned, stop_ids=stops, late=late)
    for k, f, masked, pruned, stops, late in itertools.product(
        (1, 2, 3), (PLAIN, COLD, MIXED, NARROW, NUCLEUS), (True, False), (True, False), ((), (6,)),
        (False, True),
    )
] + [
    Case(k, f, masked=False, point=True, stop_ids=stops, late=late)
    for k, f, stops, late in itertools.product(
        (1, 2, 3), (PLAIN, MIXED), ((), (6,)), (False, True)
    )
] + [
    Case(k, f, probe=True, pruned=pruned, stop_ids=stops, late=late)
    for k, f, pruned, stops, late in itertools.product(
        (1, 2, 3), (PLAIN, MIXED), (True, False), ((), (6,)), (False, True)
    )
]  # fmt: skip


@pytest.mark.parametrize("case", COVERING, ids=str)
def test_pairs_of_tokens_follow_the_exact_law(device, stream, case):
    """200,000 tokens: neighbouring pairs pass chi-square, impossible ones never occur."""
    wrong, values = wrong_twice(device, stream, case, 200_000)
    assert not wrong, f"p-values {values}"


@pytest.mark.full
@pytest.mark.parametrize("case", EVERY, ids=str)
def test_pairs_of_tokens_follow_the_exact_law_in_every_setting(device, stream, case):
    """The same for the whole product of settings."""
    wrong, values = wrong_twice(device, stream, case, 200_000)
    assert not wrong, f"p-values {values}"


def test_the_chi_square_tail_is_the_tabulated_one():
    """The 5 % and .1 % points of common tables."""
    points = {1: (3.841, 10.828), 2: (5.991, 13.816), 7: (14.067, 24.322), 40: (55.758, 73.402)}
    for dof, (five, tenth) in points.items():
        np.testing.assert_allclose(chi_square_tail(five, dof), 0.05, rtol=2e-3)
        np.testing.assert_allclose(chi_square_tail(tenth, dof), 0.001, rtol=2e-3)
