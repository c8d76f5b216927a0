"""Fixtures for the tests of the soft device."""

from __future__ import annotations

import pytest
import softcuda_util as util


@pytest.fixture(scope="session")
def ptx_stub(tmp_path_factory):
    """Path of a stand-in for the PTX library, see ptx_stub.cpp."""
    return util.build_ptx_stub(tmp_path_factory.mktemp("stub") / "libgraft_ptx.so")


@pytest.fixture
def soft():
    """The soft device of this process, with helper methods.

    Objects that a test creates with its methods are destroyed after the test.
    """
    device = util.device()
    yield device
    device.close()


@pytest.fixture(scope="module")
def kernels():
    """The module with the kernels of ``softcuda_util.KERNELS``, loaded once per test file."""
    device = util.device()
    loaded = device.kernels(util.KERNELS)
    device.created.clear()  # the first test must not unload the module
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
    """Eight 64-bit words in pinned memory."""
    return util.Words(soft, 8)
