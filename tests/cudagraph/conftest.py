"""Fixtures of the room's tests; ``TEXT`` is a test file's own kernel text."""

from __future__ import annotations

import pytest

from graft.cudagraph import Device, KernelModule, load_text


@pytest.fixture(scope="module")
def module(device: Device, request: pytest.FixtureRequest) -> KernelModule:
    """The file's kernels."""
    return load_text(device, request.module.TEXT, request.path.with_suffix(".cu").name)


@pytest.fixture(params=["mailbox", "spinkernel"])
def transport(request: pytest.FixtureRequest) -> str:
    """How a request is waited for: the name of the lane's method."""
    return str(request.param)
