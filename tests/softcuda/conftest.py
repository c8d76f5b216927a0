"""Fixtures of the soft device's tests."""

from __future__ import annotations

import pytest
import softcuda_util as util


@pytest.fixture
def soft():
    """The process's soft device; what a test's checked calls made is freed behind it."""
    device = util.device()
    yield device
    device.close()


@pytest.fixture(scope="module")
def kernels():
    """The shared kernels, loaded."""
    device = util.device()
    made = device.kernels(util.KERNELS)
    device.made.clear()  # they outlive the test
    yield made
    device.cuModuleUnload(made.module)


@pytest.fixture
def stream(soft):
    """A non-blocking stream."""
    return soft.stream()


@pytest.fixture
def other(soft):
    """Another one."""
    return soft.stream()


@pytest.fixture
def graph(soft):
    """An empty definition."""
    return soft.cuGraphCreate(0)


@pytest.fixture
def event(soft):
    """An event."""
    return soft.cuEventCreate(0)


@pytest.fixture
def words(soft):
    """Eight pinned words."""
    return util.Words(soft, 8)
