"""Fixtures and selection of the tests that check and measure a GPU."""

import os
from pathlib import Path

import pytest

from graft.tools.gpu_first.plugin import figure
from graft.tools.gpu_first.runner import RESULTS_VARIABLE

__all__ = ["figure"]


def pytest_collection_modifyitems(config, items):
    """Deselect the tests of this folder, unless the runner or ``--full`` runs them.

    A short test run starts the runner in tests/tools/test_gpu_first.py.
    """
    if RESULTS_VARIABLE in os.environ or config.getoption("--full"):
        return
    here = Path(__file__).parent
    deselected = [item for item in items if item.path.parent == here]
    config.hook.pytest_deselected(items=deselected)
    items[:] = [item for item in items if item.path.parent != here]


@pytest.fixture(scope="session")
def small(device):
    """Whether to use sizes that the soft device can run."""
    return device.kind == "soft" or bool(os.environ.get("GPU_FIRST_SMALL"))
