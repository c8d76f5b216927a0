"""A fixture that keeps kernels loaded between the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from graft.cudagraph import device as device_module


@pytest.fixture(scope="module", autouse=True)
def kept_kernels() -> Iterator[None]:
    """Keep each kernel module that a test loads until the last test of the file has run.

    Otherwise, a module is unloaded with the last object of a test that uses its kernels, and the
    next test loads it again.
    """
    load = device_module.load
    kept = []

    def load_and_keep(*arguments: Any) -> Any:
        kept.append(load(*arguments))
        return kept[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_module, "load", load_and_keep)
        yield
