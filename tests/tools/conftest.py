"""A server of the demo model, and a client of it."""

import pytest

from graft.models.engine.engine import Engine
from graft.models.request import Limits
from graft.tools.demo_model import demo_model


@pytest.fixture(scope="module")
def engine():
    """The demo model, eight rows; servers of a module follow each other before it."""
    with Engine(
        *demo_model(),
        max_batch_size=8,
        max_length=512,
        limits=Limits(grammar_bytes=4096, waiting=100),
    ) as made:
        yield made
        made.settle()
        assert made.counters()["held"] == {
            "slots": 0,
            "leaving_slots": 0,
            "pages": 0,
            "unread_replays": 0,
            "unretired_replays": 0,
        }


@pytest.fixture(scope="module")
def server(engine):
    """What most tests ask."""
    from serving_util import serving

    with serving(engine, api_key="key", body_bytes=20_000) as made:
        yield made


@pytest.fixture(scope="module")
def client(server):
    """OpenAI's client, which does not try twice."""
    import openai

    with openai.OpenAI(base_url=server.url, api_key="key", max_retries=0) as made:
        yield made
