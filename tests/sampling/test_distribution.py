"""The distribution of sampled tokens over whole requests, compared with the exact one."""

from __future__ import annotations

import numpy as np
import pytest
import table_model as model
from table_model import COVERING


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=pytest.mark.full if i % 2 else ()) for i, c in enumerate(COVERING)],
    ids=str,
)
@pytest.mark.full(
    "[draft_length=1-length=5",
    "[draft_length=3-masked=True-length=5-forced",
    "[draft_length=4-length=5-sharp=True-temperature",
    "[draft_length=6-length=5-sharp=True-tree",
    "[draft_length=2-masked=True-stop_ids",
)
def test_sampled_token_pairs_follow_exact_distribution(device, stream, pytestconfig, case):
    """Neighbouring pairs of tokens pass a chi-square test, and impossible pairs never occur.

    With --full, the cases cover all pairs of settings, and 200,000 tokens are sampled per case.
    """
    samples = 200_000 if pytestconfig.getoption("full") else 20_000
    wrong, values = model.wrong_twice(device, stream, case, samples)
    assert not wrong, f"p-values {values}"


def test_chi_square_tail_matches_tables():
    """The 5 % and 0.1 % points match published tables."""
    points = {1: (3.841, 10.828), 2: (5.991, 13.816), 7: (14.067, 24.322), 40: (55.758, 73.402)}
    for dof, (five, tenth) in points.items():
        np.testing.assert_allclose(model.chi_square_tail(five, dof), 0.05, rtol=2e-3)
        np.testing.assert_allclose(model.chi_square_tail(tenth, dof), 0.001, rtol=2e-3)
