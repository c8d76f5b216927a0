"""Tests of the server's fields `closing` and `thinking_token_budget`, through HTTP."""

from __future__ import annotations

import re

import pytest

for package in ("pydantic", "starlette", "uvicorn", "prometheus_client"):
    pytest.importorskip(package, reason="the extra serve is not installed")
openai = pytest.importorskip("openai", reason="the package openai is not installed")
httpx = pytest.importorskip("httpx", reason="the package httpx is not installed")

from engine_util import demo_engine  # noqa: E402
from reference_language import LanguageBackend  # noqa: E402
from serving_util import chat, open_client, run_server  # noqa: E402

PATTERN = r'\{"ids": \[[1-9][0-9]*(, [1-9][0-9]*)*\]\}'


@pytest.fixture(scope="module")
def engine():
    """Engine whose grammars know their distances."""
    with demo_engine(max_batch_size=4, grammar_backend=LanguageBackend) as opened:
        yield opened


@pytest.fixture
def server(engine, request):
    """Server of the engine. A test may set the reasoning parser with indirect parametrization."""
    with run_server(engine, reasoning_parser=getattr(request, "param", None)) as started:
        yield started


@pytest.fixture
def client(server):
    with open_client(server.url) as opened:
        yield opened


def structured(client, **fields):
    return chat(client, structured_outputs={"regex": PATTERN}, **fields)


def needed_tokens(client):
    """Return the smallest `max_tokens`, which the error of a smaller one names."""
    with pytest.raises(openai.BadRequestError) as caught:
        structured(client, max_tokens=2)
    assert caught.value.body["param"] == "max_tokens"
    return int(re.search(r"max_tokens is 2, .* needs (\d+) tokens", str(caught.value))[1])


def test_server_completes_structured_output_within_max_tokens(client):
    needed = needed_tokens(client)
    for stream in (False, True):
        for budget in range(needed, needed + 6):
            response = structured(client, max_tokens=budget, stream=stream, temperature=1.0, n=2)
            if stream:
                texts = ["", ""]
                for chunk in response:
                    for choice in chunk.choices:
                        texts[choice.index] += choice.delta.content or ""
                        assert choice.finish_reason in (None, "stop")
            else:
                assert response.usage.completion_tokens <= 2 * budget
                assert {choice.finish_reason for choice in response.choices} == {"stop"}
                texts = [choice.message.content for choice in response.choices]
            assert all(re.fullmatch(PATTERN, text) for text in texts), texts


def test_server_field_turns_closing_off(client, server):
    needed = needed_tokens(client)
    choice = structured(client, max_tokens=needed - 1, closing="off").choices[0]
    assert choice.finish_reason == "length"
    assert not re.fullmatch(PATTERN, choice.message.content)
    free = chat(client, max_tokens=4, temperature=2.0, ignore_eos=True).choices[0]
    assert free.finish_reason == "length"
    for value in ("on", 1):
        with pytest.raises(openai.BadRequestError, match="closing must be one of"):
            structured(client, closing=value)
    with pytest.raises(openai.BadRequestError, match="needs a grammar"):
        chat(client, closing="require")
    url = server.url.removesuffix("/v1") + "/metrics"
    assert "graft_grammar_closed_total" in httpx.get(url, timeout=60).text


def test_server_completes_structured_output_with_ignored_stop_ids(client):
    """With `ignore_eos`, the output uses all its tokens, and is complete."""
    budget = needed_tokens(client) + 9
    response = structured(client, max_tokens=budget, ignore_eos=True)
    assert response.choices[0].finish_reason == "stop"
    assert re.fullmatch(PATTERN, response.choices[0].message.content)
    assert response.usage.completion_tokens == budget


@pytest.mark.parametrize("server", ["deepseek_r1"], indirect=True)
def test_server_ends_reasoning_in_time_for_the_answer(client):
    """The demo model does not end a reasoning section by itself."""
    needed = needed_tokens(client)
    for budget in (needed, needed + 1, needed + 20):
        response = structured(client, max_tokens=budget, temperature=1.5, seed=budget)
        [choice] = response.choices
        assert choice.finish_reason == "stop"
        assert re.fullmatch(PATTERN, choice.message.content)
        assert len(choice.message.reasoning_content or "") > 9 or budget < needed + 20


@pytest.mark.parametrize("server", ["deepseek_r1"], indirect=True)
def test_thinking_token_budget_limits_reasoning(client, engine):
    fields = {"temperature": 1.5, "seed": 3, "return_token_ids": True, "max_tokens": 80}
    for budget in (9, 12, 30):
        choice = structured(client, thinking_token_budget=budget, **fields).choices[0]
        ids = choice.token_ids
        assert "</think>" in engine.tokenizer.decode(ids[:budget], special=True)
        assert re.fullmatch(PATTERN, choice.message.content)
    unlimited = structured(client, thinking_token_budget=-1, **fields).choices[0]
    assert "</think>" not in engine.tokenizer.decode(unlimited.token_ids[:30], special=True)
    with pytest.raises(openai.BadRequestError, match="thinking_token_budget is 2, but") as caught:
        structured(client, thinking_token_budget=2)
    assert caught.value.body["param"] == "thinking_token_budget"


def test_thinking_token_budget_needs_reasoning_parser(client):
    with pytest.raises(openai.BadRequestError, match="requires a chat completion and a server"):
        chat(client, thinking_token_budget=9)
