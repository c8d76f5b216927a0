"""Fixtures of the model and engine tests."""

import pytest
from engine_util import demo_engine


@pytest.fixture(scope="module")
def engine():
    """Engine with the demo model, its drafter and four batch rows.

    All tests of a module share this engine. Each test must finish or cancel its requests.
    """
    with demo_engine(max_batch_size=4) as shared:
        yield shared
