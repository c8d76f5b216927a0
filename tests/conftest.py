"""Fixtures of all tests, and selection of the tests to run.

Tests marked ``full`` need ``--full``, tests marked ``ptx`` need ``--ptx``, and tests marked
``nvrtc`` need either. With ``--soak`` only tests marked ``soak`` run. Tests marked ``cuda`` need
``GRAFT_DEVICE=cuda``. Tests marked ``overlap`` do not run if a setting of the device makes launches
or allocations wait for it. All other tests always run, on the selected device.

A mark ``full`` with arguments applies to the cases of a test whose id, in brackets, contains one of
the arguments. These cases do not run in short runs on the soft device, because other tests check
the same behavior. With ``--ptx`` or on CUDA, they run.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import os
import re
import signal
from collections.abc import Generator, Iterator
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


def calls_wait_for_device() -> bool:
    """Return whether the device is set so that launches or allocations wait for it."""
    blocking = os.environ.get("SOFTCUDA_LAUNCH_BLOCKING") or os.environ.get("CUDA_LAUNCH_BLOCKING")
    lock_model = int(os.environ.get("SOFTCUDA_LOCK_MODEL") or 0)
    return blocking not in (None, "", "0") or bool(lock_model & 16)


def is_marked_full(item: pytest.Item, *, runs_all_cases: bool) -> bool:
    """Return whether a test is marked ``full``.

    With `runs_all_cases`, marks of single cases, which have arguments, do not count.
    """
    case = "[" + item.name.partition("[")[2]
    for mark in item.iter_markers("full"):
        if not mark.args or (not runs_all_cases and any(text in case for text in mark.args)):
            return True
    return False


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests that this run does not include."""
    full = config.getoption("--full")
    ptx = config.getoption("--ptx")
    soak = config.getoption("--soak")
    cuda = os.environ.get("GRAFT_DEVICE") == "cuda"
    blocking = calls_wait_for_device()

    def is_selected(item: pytest.Item) -> bool:
        if item.get_closest_marker("cuda") and not cuda:
            return False
        if item.get_closest_marker("overlap") and blocking:
            return False
        if soak or item.get_closest_marker("soak"):
            return bool(soak and item.get_closest_marker("soak"))
        if item.get_closest_marker("ptx") and not ptx:
            return False
        if item.get_closest_marker("nvrtc") and not (ptx or full):
            return False
        return bool(full or not is_marked_full(item, runs_all_cases=ptx or cuda))

    deselected = [item for item in items if not is_selected(item)]
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        items[:] = [item for item in items if is_selected(item)]


#: Packages without which a part of the tests cannot run, by the name under which they are imported.
OPTIONAL_PACKAGES = (
    *("llguidance", "xgrammar", "tvm_ffi", "jsonschema", "jsonschema_specifications", "openai"),
    *("starlette", "uvicorn", "pydantic", "prometheus_client", "httpx", "gguf", "mpi4py"),
    "cuda.core",
)


@functools.cache
def missing_package_pattern() -> re.Pattern[str] | None:
    """Return a pattern of messages that say that a missing package is required.

    The result is None if all packages are installed.
    """
    missing = [name for name in OPTIONAL_PACKAGES if importlib.util.find_spec(name) is None]
    if not missing:
        return None
    names = "|".join(map(re.escape, missing))
    return re.compile(
        rf"(?:No module named '|import of )(?P<module>{names})\b"
        rf"|\b(?P<package>{names}) is not installed",
        re.IGNORECASE,
    )


def skip_if_package_is_missing(report: pytest.CollectReport | pytest.TestReport) -> None:
    """Change the outcome of a failure to "skipped" if it says that a package is not installed."""
    pattern = missing_package_pattern()
    if not report.failed or pattern is None:
        return
    texts = [report.longreprtext, *(text for _, text in report.sections)]
    found = pattern.search("\n".join(texts))
    if found:
        name = found["module"] or found["package"]
        report.outcome = "skipped"
        path = report.nodeid.partition("::")[0]
        report.longrepr = (path, 0, f"Skipped: the package {name} is not installed")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Skip test files that import a missing package."""
    report = yield
    skip_if_package_is_missing(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Skip tests that need a missing package."""
    report = yield
    skip_if_package_is_missing(report)
    return report


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Build the PTX library before the first test that needs it."""
    if item.get_closest_marker("ptx"):
        from graft.cudagraph.kernels.compiler import cache_folder
        from graft.cudagraph.kernels.ptx import provide_ptx_library

        provide_ptx_library(cache_folder() / "soft")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exempt the objects that the collection creates from garbage collection, to save time.

    The collection creates many objects and little garbage, so it runs without garbage collection.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


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
