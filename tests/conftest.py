"""Fixtures of all tests, and selection of the tests to run.

Tests marked ``full`` need ``--full``, tests marked ``ptx`` need ``--ptx``, and tests marked
``nvrtc`` need either. With ``--soak`` only tests marked ``soak`` run. Tests marked ``cuda`` need
``GRAFT_DEVICE=cuda``. All other tests always run, on the selected device.
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

# A shell starts background jobs with SIGINT ignored, which child processes would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that the Makefile's longer targets use."""
    parser.addoption("--full", action="store_true", help="also run the tests marked full")
    parser.addoption("--ptx", action="store_true", help="also run the tests marked ptx")
    parser.addoption("--soak", action="store_true", help="run only the tests marked soak")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests that this run does not include."""
    full = config.getoption("--full")
    ptx = config.getoption("--ptx")
    soak = config.getoption("--soak")
    cuda = os.environ.get("GRAFT_DEVICE") == "cuda"

    def is_selected(item: pytest.Item) -> bool:
        if item.get_closest_marker("cuda") and not cuda:
            return False
        if soak or item.get_closest_marker("soak"):
            return bool(soak and item.get_closest_marker("soak"))
        if item.get_closest_marker("ptx") and not ptx:
            return False
        if item.get_closest_marker("nvrtc") and not (ptx or full):
            return False
        return bool(full or not item.get_closest_marker("full"))

    deselected = [item for item in items if not is_selected(item)]
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        items[:] = [item for item in items if is_selected(item)]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Build the PTX library before the first test that needs it."""
    if item.get_closest_marker("ptx"):
        from graft.cudagraph.kernels.compiler import cache_folder
        from graft.cudagraph.kernels.ptx import provide_ptx_library

        provide_ptx_library(cache_folder() / "soft")


def pytest_collection_finish() -> None:
    """Exempt all objects created so far from garbage collection, which makes it faster."""
    gc.freeze()


@pytest.fixture(scope="session")
def device() -> Device:
    """The device of the process, which ``GRAFT_DEVICE`` selects."""
    from graft.cudagraph.device import open_device

    return open_device()


@pytest.fixture
def stream(device: Device) -> Iterator[Stream]:
    """A stream of the device, closed after the test."""
    stream = device.stream("test")
    yield stream
    stream.close()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of shared test data; tests that need it are skipped if it does not exist."""
    configured = os.environ.get("GRAFT_TEST_DATA")
    folder = Path(configured) if configured else ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no test data at {folder} (GRAFT_TEST_DATA names the folder)")
    return folder
