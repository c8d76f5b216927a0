"""Random JSON schemas, compared with jsonschema; see `schema_fuzz`."""

from __future__ import annotations

import collections

import pytest
from schema_fuzz import check_random_schema

pytest.importorskip("llguidance")


@pytest.mark.parametrize(
    "first, count", [(0, 300), pytest.param(10_000, 10_000, marks=pytest.mark.full)]
)
def test_random_schemas_are_enforced_exactly(first: int, count: int):
    """No output is invalid, no walk ends early, and no value is refused without a reason."""
    problems = []
    statuses: collections.Counter[str] = collections.Counter()
    for seed in range(first, first + count):
        outcome = check_random_schema(seed)
        problems += outcome.problems
        statuses[outcome.status] += 1
    print(f"seeds {first} to {first + count - 1}: {dict(statuses)}")
    assert problems == []
    assert statuses["exact"] > 0.4 * count
