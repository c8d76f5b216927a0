"""Fixtures of the soft device's tests; ``KERNELS`` is a test file's own kernel text."""

from __future__ import annotations

import pytest
import softcuda_util as util


@pytest.fixture(scope="session")
def soft():
    """The process's soft device."""
    return util.device()


@pytest.fixture(scope="module")
def module(soft, request):
    """The file's kernels, loaded."""
    made = soft.module(request.module.KERNELS)
    yield made
    soft.ok(soft.d.cuModuleUnload(made))


@pytest.fixture
def stream(soft):
    """A non-blocking stream."""
    made = soft.stream()
    yield made
    soft.ok(soft.d.cuStreamDestroy(made))


@pytest.fixture
def graph(soft):
    """An empty definition."""
    made = soft.ok(soft.d.cuGraphCreate(0))
    yield made
    soft.ok(soft.d.cuGraphDestroy(made))


@pytest.fixture
def event(soft):
    """An event."""
    made = soft.ok(soft.d.cuEventCreate(0))
    yield made
    soft.ok(soft.d.cuEventDestroy(made))
