"""Fixtures of the sampling kernels' tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from sampling_round import TableRound


@pytest.fixture(params=[1, 64], ids=["block1", "block64"])
def block(request) -> int:
    """Both shapes of the row kernels: one thread a row, and many."""
    return request.param


@pytest.fixture
def make_round(device, stream) -> Callable[..., TableRound]:
    """Makes a `TableRound` on the device and stream of the test."""
    return partial(TableRound, device, stream)
