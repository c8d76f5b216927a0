"""Fixtures of the tests of the soft device."""

from __future__ import annotations

import pytest
import softcuda_util as util


@pytest.fixture
def soft():
    """The soft device of the process. Objects that a test creates are destroyed after it."""
    device = util.device()
    yield device
    device.close()


@pytest.fixture(scope="module")
def kernels():
    """The loaded module of the shared kernels."""
    device = util.device()
    loaded = device.kernels(util.KERNELS)
    device.created.clear()  # the module is used by more than one test
    yield loaded
    device.cuModuleUnload(loaded.module)


@pytest.fixture
def stream(soft):
    """A non-blocking stream."""
    return soft.stream()


@pytest.fixture
def other(soft):
    """A second non-blocking stream."""
    return soft.stream()


@pytest.fixture
def graph(soft):
    """An empty graph definition."""
    return soft.cuGraphCreate(0)


@pytest.fixture
def event(soft):
    """An event with timing."""
    return soft.cuEventCreate(0)


@pytest.fixture
def words(soft):
    """Eight words of pinned memory."""
    return util.Words(soft, 8)
