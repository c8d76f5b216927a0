"""Fixtures of the grammar tests. A file whose tests need a single backend overrides `backend`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from guide_util import THINK, byte_vocabulary

from graft.grammar import GrammarBackend, GrammarService, make_backend


@pytest.fixture(scope="module", params=["xgrammar", "llguidance"])
def backend(request: pytest.FixtureRequest) -> GrammarBackend:
    """Return each backend, with a small vocabulary."""
    return make_backend(request.param, byte_vocabulary(names={"</think>": THINK}))


@pytest.fixture(scope="session")
def xgrammar() -> GrammarBackend:
    """Return XGrammar, for tests that do not depend on the backend."""
    return make_backend("xgrammar", byte_vocabulary())


@pytest.fixture
def serve() -> Iterator[Callable[..., GrammarService]]:
    """Yield a factory of compile services; they are closed after the test."""
    opened: list[GrammarService] = []

    def make(choice: Any = "xgrammar", vocabulary: Any = None, **limits: Any) -> GrammarService:
        opened.append(GrammarService(vocabulary or byte_vocabulary(), choice, **limits))
        return opened[-1]

    yield make
    for service in opened:
        service.close()
