"""Pytest plugin that writes the results of tests to a file as they come.

The environment variable `RESULTS_VARIABLE` names the file. It contains lines of JSON:

``{"event": "begin", "test": ID, "time": SECONDS}``
    A test begins. The time is that of the monotonic clock.
``{"event": "figure", "test": ID, "name": ..., "value": ..., "unit": ..., "predicted": ...}``
    The test has measured a value; see the fixture `figure`.
``{"event": "end", "test": ID, "outcome": ..., "seconds": ..., "message": ...}``
    The test has passed, failed or been skipped. `message` is the traceback or the reason.

Tests that the file already contains are deselected, so that a new process continues after a test
that crashed. If a test fails and the device can no longer be used, the process exits.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from graft.tools.gpu_first.runner import (
    DEVICE_LOST_STATUS,
    RESULTS_VARIABLE,
    append_line,
    read_lines,
)

#: Time limit of the question whether the device can still be used.
SYNCHRONIZE_S = 5.0

#: The running test: its id, its start, and its outcome so far.
_running: dict[str, Any] = {"test": "", "outcome": "passed", "message": "", "start": 0.0}


def _results() -> Path:
    return Path(os.environ[RESULTS_VARIABLE])


@pytest.fixture
def figure() -> Callable[..., None]:
    """Return a function that records a measured value of the test at once.

    Its arguments are the name, the value (None if it cannot be measured), the unit, and optionally
    the predicted range and a note.
    """

    def add(
        name: str,
        value: float | None,
        unit: str = "",
        predicted: tuple[float, float] | None = None,
        note: str = "",
    ) -> None:
        line = {"event": "figure", "test": _running["test"], "name": name, "value": value}
        if RESULTS_VARIABLE in os.environ:
            append_line(_results(), {**line, "unit": unit, "predicted": predicted, "note": note})

    return add


if RESULTS_VARIABLE in os.environ:

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
        """Deselect the tests that an earlier process has begun."""
        begun = {line["test"] for line in read_lines(_results())}
        deselected = [item for item in items if item.nodeid in begun]
        config.hook.pytest_deselected(items=deselected)
        items[:] = [item for item in items if item.nodeid not in begun]

    def pytest_runtest_logstart(nodeid: str) -> None:
        """Write that a test begins."""
        start = time.monotonic()
        _running.update(test=nodeid, outcome="passed", message="", start=start)
        append_line(_results(), {"event": "begin", "test": nodeid, "time": start})

    def pytest_runtest_logreport(report: pytest.TestReport) -> None:
        """Write the outcome of a test after its last phase, and exit if the device is lost."""
        if report.outcome != "passed" and _running["outcome"] != "failed":
            text = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
            _running.update(outcome=report.outcome, message=text)
        if report.when != "teardown":
            return
        seconds = time.monotonic() - _running["start"]
        line = {"event": "end", "test": report.nodeid, "seconds": seconds}
        is_lost = _running["outcome"] == "failed" and _device_is_lost()
        message = f"{_running['message']}{' (the device is lost)' if is_lost else ''}"
        line |= {"outcome": _running["outcome"], "message": message}
        append_line(_results(), line)
        if is_lost:
            os._exit(DEVICE_LOST_STATUS)


def _device_is_lost() -> bool:
    """Return whether the process has opened a device that fails or does not answer in time."""
    driver = sys.modules.get("graft.cudagraph.driver.driver")
    if driver is None or not driver.is_context_retained():
        return False
    answered = []

    def synchronize() -> None:
        driver.call(driver.cu.cuCtxSynchronize)
        answered.append(True)

    thread = threading.Thread(target=synchronize, daemon=True)
    thread.start()
    thread.join(SYNCHRONIZE_S)
    return not answered
