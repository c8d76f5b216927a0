"""Fixtures shared by every test, and which tests run.

Tests marked ``full`` run with ``--full``, those marked ``soak`` with ``--soak`` and only then,
those marked ``cuda`` where ``GRAFT_DEVICE=cuda``; the others always, on whichever device it is.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from graft.cudagraph.device import Device, Stream

# A shell's background job begins with Ctrl-C ignored, and so would the tests' own processes.
signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the switches of the Makefile's longer targets."""
    parser.addoption("--full", action="store_true", help="run the tests marked full too")
    parser.addoption("--soak", action="store_true", help="run only the tests marked soak")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what this run does not ask for; pytest reports the number."""
    full = config.getoption("--full")
    soak = config.getoption("--soak")
    cuda = os.environ.get("GRAFT_DEVICE") == "cuda"

    def wanted(item: pytest.Item) -> bool:
        if item.get_closest_marker("cuda") and not cuda:
            return False
        if soak or item.get_closest_marker("soak"):
            return bool(soak and item.get_closest_marker("soak"))
        return bool(full or not item.get_closest_marker("full"))

    left_out = [item for item in items if not wanted(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if wanted(item)]


def pytest_collection_finish() -> None:
    """What is there before any test is no garbage: collections need not look at it again."""
    gc.freeze()


@pytest.fixture(scope="session")
def device() -> Device:
    """The process's device (``GRAFT_DEVICE``; the Makefile sets soft or cuda)."""
    from graft.cudagraph.device import open_device

    return open_device()


@pytest.fixture
def stream(device: Device) -> Iterator[Stream]:
    """A stream of the device, closed after the test."""
    made = device.stream("test")
    yield made
    made.close()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of shared test data; tests that use it skip, saying so, where it is absent."""
    named = os.environ.get("GRAFT_TEST_DATA")
    folder = Path(named) if named else ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no test data at {folder} (GRAFT_TEST_DATA names the folder)")
    return folder
