"""Helpers for tests of the server: a server in a thread, requests, and load tests."""

import asyncio
import contextlib
import random
import threading
import time
import weakref
from concurrent.futures import Future

import openai

from graft.tools.demo.prompts import demo_prompts
from graft.tools.output_check import is_valid
from graft.tools.serve.app import Service, Settings
from graft.tools.serve.command import bind_socket
from graft.tools.serve.engine_driver import EngineDriver
from graft.tools.serve.server import Server

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
PROMPT = "Extract the fields.\nname: Olga Novak; age: 42"
#: Fields that OpenAI's client does not know, so that they are passed to it in ``extra_body``.
EXTRA_FIELDS = (
    "enable_thinking",
    "structured_outputs",
    "top_k",
    "guided_regex",
    "guided_json",
    "guided_json_object",
    "regex",
    "ebnf",
    "min_tokens",
    "repetition_penalty",
    "priority",
    "ignore_eos",
    "skip_special_tokens",
    "use_beam_search",
    "prompt_logprobs",
    "stop_token_ids",
    "allowed_token_ids",
    "include_reasoning",
    "separate_reasoning",
    "return_token_ids",
    "closing",
    "thinking_token_budget",
    "nonsense",
)
#: By engine, the driver of the server that uses the engine.
_DRIVERS = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def run_server(engine, drain_s=20.0, access_log=False, **settings):
    """Run a server of the engine in a thread, and drain the server when the context ends."""
    driver = _DRIVERS[engine] = EngineDriver(engine)
    service = Service(driver, Settings("demo", **settings))
    server = Server(service, bind_socket("127.0.0.1", 0), drain_s, access_log)
    thread = threading.Thread(target=server.start)
    thread.start()
    try:
        wait_for(lambda: server.started or not thread.is_alive())
        yield server
    finally:
        server.drain()
        thread.join(30)
        assert not thread.is_alive()


def open_client(url, api_key="-", **options):
    """Return OpenAI's client. It does not retry failed requests.

    It loads no certificates, because that takes longer than many requests.
    """
    http = openai.DefaultHttpxClient(verify=False)
    return openai.OpenAI(base_url=url, api_key=api_key, max_retries=0, http_client=http, **options)


def open_async_client(url, api_key="-", **options):
    """Return the asynchronous client that corresponds to `open_client`."""
    http = openai.DefaultAsyncHttpxClient(verify=False)
    return openai.AsyncOpenAI(
        base_url=url, api_key=api_key, max_retries=0, http_client=http, **options
    )


def wait_for(condition, seconds=60.0):
    """Wait until a condition holds; fail after a time limit in seconds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def generate(engine, requests):
    """Generate with an engine that a server also uses, in the server's thread.

    If another thread called the engine, the server's thread could call it at the same time, for
    example to reclaim pages after its client has received the last event.
    """
    outputs = Future()

    def run():
        try:
            outputs.set_result(engine.generate(requests))
        except Exception as error:
            outputs.set_exception(error)

    _DRIVERS[engine]._put(run)
    return outputs.result(60)


def response_format(schema):
    """Return the value of response_format for a JSON schema."""
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def chat(client, **fields):
    """Send a chat completion request. `fields` replace the default values of request fields."""
    extra = {key: fields.pop(key) for key in EXTRA_FIELDS if key in fields}
    defaults = {
        "model": "demo",
        "messages": [{"role": "user", "content": PROMPT}],
        "temperature": 0,
        "max_tokens": 80,
    }
    return client.chat.completions.create(**defaults | fields, extra_body=extra)


INVALID = [
    {"nonsense": 1},
    {"temperature": -1},
    {"response_format": response_format({"type": "nothing"})},
]


def load_requests():
    """Return the requests of a load test, as pairs of a demo prompt and API fields."""
    rng = random.Random(1)
    requests = []
    for prompt in demo_prompts() * 4:
        fields = {
            "messages": [{"role": "user", "content": prompt.text}],
            "seed": rng.randrange(99),
            "temperature": rng.choice([0, 0.7, 1.3]),
            "max_tokens": 100,
        }
        if prompt.grammar is not None and prompt.grammar.schema:
            fields["response_format"] = response_format(prompt.grammar.schema)
        elif prompt.grammar is not None:
            fields["structured_outputs"] = {"regex": prompt.grammar.text}
        requests.append((prompt, fields))
    return requests


async def send_numbered(client, slots, requests, number):
    """Send one request of a load test and return its text and finish reason.

    `number` selects one of `requests`. The client closes the stream of every tenth request after
    the first chunk, and sends an invalid field in every twentieth request.
    """
    fields = requests[number % len(requests)][1]
    closes_early = number % 10 == 3
    stream = closes_early or number % 2 == 0
    async with slots:
        if number % 20 == 7:
            try:
                await chat(client, **fields | INVALID[number % 3])
            except openai.BadRequestError:
                return "", "invalid"
        response = await chat(client, **fields, stream=stream)
        if not stream:
            choice = response.choices[0]
            return choice.message.content, choice.finish_reason
        text = ""
        async for chunk in response:
            text += chunk.choices[0].delta.content or ""
            if closes_early:
                await response.close()
                return text, "closed"
        return text, chunk.choices[0].finish_reason


async def run_load(url, requests, count, on_end=None):
    """Send `count` requests, at most 32 at a time; return their texts and finish reasons.

    When a request has ended, `on_end` is called with the number of the request.
    """
    slots = asyncio.Semaphore(32)

    async def send(client, number):
        result = await send_numbered(client, slots, requests, number)
        if on_end is not None:
            on_end(number)
        return result

    # Disable keep-alive: the server could close an idle connection just when the client sends
    # the next request on it.
    options = {"timeout": 600.0, "default_headers": {"connection": "close"}}
    async with open_async_client(url, **options) as client:
        return await asyncio.gather(*(send(client, i) for i in range(count)))


def run_sequentially(url, requests):
    """Send requests one after the other, and return their response choices."""
    with open_client(url) as client:
        return [chat(client, **fields).choices[0] for _, fields in requests]


def check_load(requests, sequential, results):
    """Check the responses of a load test.

    Each response must equal the response in `sequential`, for which the same request was sent
    alone. Structured outputs that are not truncated must satisfy their grammars.
    """
    for number, (text, finish_reason) in enumerate(results):
        prompt = requests[number % len(requests)][0]
        expected = sequential[number % len(requests)]
        if finish_reason == "closed":
            assert expected.message.content.startswith(text)
        elif finish_reason != "invalid":
            assert (text, finish_reason) == (expected.message.content, expected.finish_reason)
            if prompt.grammar is not None and finish_reason == "stop":
                assert is_valid(prompt.grammar, text)
    reasons = [reason for _, reason in results]
    assert reasons.count("closed") == len(results) // 10
    assert reasons.count("invalid") == len(results) // 20
