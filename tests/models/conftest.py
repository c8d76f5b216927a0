"""Fixtures of the models' and the engine's tests."""

import pytest
from engine_util import demo_engine


@pytest.fixture(scope="module")
def engine():
    """The demo model with its drafter, four rows, for tests that leave it idle."""
    with demo_engine(max_batch_size=4) as made:
        yield made
