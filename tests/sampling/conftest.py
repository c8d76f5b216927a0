"""Fixtures of the sampling kernels' tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from kept_kernels import kept_kernels  # noqa: F401  (used by all tests of the folder)
from sampling_round import TableRound


@pytest.fixture(params=[1, 64], ids=["block1", "block64"])
def block(request) -> int:
    """Number of threads per block of the row kernels: 1 as on the soft device, or several."""
    return request.param


@pytest.fixture
def make_round(device, stream) -> Callable[..., TableRound]:
    """Return a function that creates a `TableRound` on the device and stream of the test."""
    return partial(TableRound, device, stream)
