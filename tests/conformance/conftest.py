"""Models of the conformance tests: the scripted model, whose text is known in advance."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conformance_util import ADDED, SCRIPTS, STOPS
from kept_kernels import kept_kernels  # noqa: F401  (used by all tests of the folder)
from scripted_model import write_scripted_model

from graft.models import Engine


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the model that writes the texts of `SCRIPTS`."""
    folder = tmp_path_factory.mktemp("scripted")
    return write_scripted_model(folder, SCRIPTS, added=ADDED, stops=STOPS)


@pytest.fixture(scope="session")
def plain(model: Path) -> Iterator[Engine]:
    """Engine without speculation and with one batch row: the baseline of equalities."""
    with Engine(model, max_batch_size=1, max_length=512) as engine:
        yield engine


@pytest.fixture(scope="session")
def drafting(model: Path) -> Iterator[Engine]:
    """Engine in which the model is its own drafter, so that rounds have up to eight tokens."""
    with Engine(model, model, max_batch_size=8, max_length=512, draft_length=7) as engine:
        yield engine


@pytest.fixture
def engine_of(model: Path) -> Iterator[Any]:
    """A function that creates engines of the model; they are closed after the test."""
    opened = []

    def create(drafter: Any = None, **options: Any) -> Engine:
        engine = Engine(model, drafter, **{"max_batch_size": 4, "max_length": 512} | options)
        opened.append(engine)
        return engine

    yield create
    for engine in opened:
        engine.close()
