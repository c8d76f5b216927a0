"""Fixtures for tests of the server: an engine with the demo model, a server, and clients."""

import pytest

from graft.models.engine.engine import Engine
from graft.models.request import Limits
from graft.tools.demo_model import demo_model


@pytest.fixture(scope="module")
def engine():
    """Return an engine with the demo model.

    After the tests of a module, check that the engine has released all slots and pages.
    """
    with Engine(
        *demo_model(),
        max_batch_size=8,
        max_length=512,
        limits=Limits(grammar_bytes=4096, waiting=100),
    ) as engine:
        yield engine
        engine.synchronize()
        assert engine.counters()["held"] == {
            "slots": 0,
            "leaving_slots": 0,
            "pages": 0,
            "unread_replays": 0,
            "unretired_replays": 0,
        }


@pytest.fixture(scope="module")
def server(engine):
    """Return a server of the engine that requires an API key."""
    from serving_util import run_server

    with run_server(engine, api_keys=("key", "other key"), max_body_bytes=20_000) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    """Return OpenAI's client for the server. It does not retry failed requests."""
    from serving_util import open_client

    with open_client(server.url, "key") as client:
        yield client


@pytest.fixture(scope="module")
def http():
    """Return a plain HTTP client, for endpoints that OpenAI's client does not have."""
    import httpx

    with httpx.Client(verify=False, timeout=60) as client:
        yield client
