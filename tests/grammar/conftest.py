"""Fixtures of the grammar tests.

Tests with the fixture `backend` run once per backend. A test file that needs only one backend
overrides the fixture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from guide_util import THINK, byte_vocabulary
from kept_kernels import kept_kernels  # noqa: F401  (used by all tests of the folder)

from graft.grammar import GrammarBackend, GrammarService, make_backend


@pytest.fixture(scope="module", params=["xgrammar", "llguidance"])
def backend(request: pytest.FixtureRequest) -> GrammarBackend:
    """Return a grammar backend with a small vocabulary. Tests run once per backend."""
    return make_backend(request.param, byte_vocabulary(names={"</think>": THINK}))


@pytest.fixture(scope="session")
def xgrammar() -> GrammarBackend:
    """Return the XGrammar backend, for tests that do not depend on the backend."""
    return make_backend("xgrammar", byte_vocabulary())


@pytest.fixture
def serve() -> Iterator[Callable[..., GrammarService]]:
    """Yield a function that creates compile services. The services are closed after the test."""
    opened: list[GrammarService] = []

    def make(choice: Any = "xgrammar", vocabulary: Any = None, **limits: Any) -> GrammarService:
        service = GrammarService(vocabulary or byte_vocabulary(), choice, **limits)
        opened.append(service)
        return service

    yield make
    for service in opened:
        service.close()
