"""Fixtures of the tests of cudagraph. A test file defines its kernel source as ``TEXT``."""

from __future__ import annotations

import pytest

from graft.cudagraph import Device, KernelModule, load_text


@pytest.fixture(scope="module")
def module(device: Device, request: pytest.FixtureRequest) -> KernelModule:
    """Compiled kernels of the test file."""
    return load_text(device, request.module.TEXT, request.path.with_suffix(".cu").name)


@pytest.fixture(params=["mailbox", "spinkernel"])
def transport(request: pytest.FixtureRequest) -> str:
    """Name of the lane method that adds a mailbox, "mailbox" or "spinkernel"."""
    return str(request.param)
