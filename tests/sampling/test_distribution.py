"""The tokens of whole requests: exactly the target's law."""

from __future__ import annotations

import numpy as np
import pytest
import table_model as model
from table_model import COVERING


@pytest.mark.parametrize("case", COVERING, ids=str)
def test_pairs_of_tokens_follow_the_exact_law(device, stream, pytestconfig, case):
    """Neighbouring pairs of as many tokens as show the mutants pass chi-square, impossible ones
    never occur; in settings that cover all pairs. With --full of 200,000."""
    samples = 200_000 if pytestconfig.getoption("full") else 40_000
    wrong, values = model.wrong_twice(device, stream, case, samples)
    assert not wrong, f"p-values {values}"


def test_the_chi_square_tail_is_the_tabulated_one():
    """The 5 % and .1 % points of common tables."""
    points = {1: (3.841, 10.828), 2: (5.991, 13.816), 7: (14.067, 24.322), 40: (55.758, 73.402)}
    for dof, (five, tenth) in points.items():
        np.testing.assert_allclose(model.chi_square_tail(five, dof), 0.05, rtol=2e-3)
        np.testing.assert_allclose(model.chi_square_tail(tenth, dof), 0.001, rtol=2e-3)
