"""Fixtures: an engine of the demo model, a server of it, and a client."""

import pytest

from graft.models.engine.engine import Engine
from graft.models.request import Limits
from graft.tools.demo_model import demo_model


@pytest.fixture(scope="module")
def engine():
    """An engine of the demo model with eight slots. At the end it must hold no resources."""
    with Engine(
        *demo_model(),
        max_batch_size=8,
        max_length=512,
        limits=Limits(grammar_bytes=4096, waiting=100),
    ) as made:
        yield made
        made.synchronize()
        assert made.counters()["held"] == {
            "slots": 0,
            "leaving_slots": 0,
            "pages": 0,
            "unread_replays": 0,
            "unretired_replays": 0,
        }


@pytest.fixture(scope="module")
def server(engine):
    """A server of the engine that requires an API key."""
    from serving_util import run_server

    with run_server(engine, api_key="key", max_body_bytes=20_000) as made:
        yield made


@pytest.fixture(scope="module")
def client(server):
    """OpenAI's client without retries."""
    import openai

    with openai.OpenAI(base_url=server.url, api_key="key", max_retries=0) as made:
        yield made
