"""Fixtures of the models' and the engine's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from engine_util import demo_engine

from graft.models.engine import Engine


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """The demo model with its drafter, four rows, for tests that leave it idle."""
    with demo_engine(max_batch_size=4) as made:
        yield made
