"""Servers to ask, what to ask them, and a crowd that asks."""

import asyncio
import contextlib
import random
import threading
import time

import openai

from graft.tools.demo_prompts import demo_prompts
from graft.tools.serve.app import Service, Settings
from graft.tools.serve.command import bound
from graft.tools.serve.driver import Driver
from graft.tools.serve.server import Server
from graft.tools.validity import is_valid

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ASKED = "Extract the fields.\nname: Olga Novak; age: 42"


@contextlib.contextmanager
def serving(engine, drain_s=20.0, **settings):
    """A server of the engine, in a thread; it is let go in the end."""
    service = Service(Driver(engine), Settings("demo", **settings))
    server = Server(service, bound("127.0.0.1", 0), drain_s)
    thread = threading.Thread(target=server.start)
    thread.start()
    try:
        wait_for(lambda: server.started or not thread.is_alive())
        yield server
    finally:
        server.drain()
        thread.join(30)
        assert not thread.is_alive()


def wait_for(true, seconds=20.0):
    """Until something holds."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def form(schema):
    """A schema as response_format."""
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def ask(client, **fields):
    """A chat of one message; what the client does not know goes beside."""
    extra = {
        key: fields.pop(key)
        for key in (
            "structured_outputs",
            "top_k",
            "guided_regex",
            "min_tokens",
            "repetition_penalty",
            "priority",
            "nonsense",
        )
        if key in fields
    }
    fields = {
        "model": "demo",
        "messages": [{"role": "user", "content": ASKED}],
        "temperature": 0,
        "max_tokens": 80,
    } | fields
    return client.chat.completions.create(**fields, extra_body=extra)


WRONG = [{"nonsense": 1}, {"temperature": -1}, {"response_format": form({"type": "nothing"})}]


def crowd():
    """What a crowd asks: prompts, and the fields of their calls."""
    draw = random.Random(1)
    return [
        (
            p,
            {
                "messages": [{"role": "user", "content": p.text}],
                "seed": draw.randrange(99),
                "temperature": draw.choice([0, 0.7, 1.3]),
                "max_tokens": 100,
                **(
                    {}
                    if p.grammar is None
                    else {"response_format": form(p.grammar.schema)}
                    if p.grammar.schema
                    else {"structured_outputs": {"regex": p.grammar.text}}
                ),
            },
        )
        for p in demo_prompts() * 4
    ]


async def one_of_crowd(client, turns, asked, number):
    """A call's text and end; every tenth is given up, every twentieth wrong."""
    fields = asked[number % len(asked)][1]
    stream = number % 10 == 3 or number % 2 == 0
    async with turns:
        if number % 20 == 7:
            try:
                await ask(client, **fields | WRONG[number % 3])
            except openai.BadRequestError:
                return "", "wrong"
        said = await ask(client, **fields, stream=stream)
        if not stream:
            return said.choices[0].message.content, said.choices[0].finish_reason
        text = ""
        async for piece in said:
            text += piece.choices[0].delta.content or ""
            if number % 10 == 3:
                await said.close()
                return text, "given up"
        return text, piece.choices[0].finish_reason


async def heard_by_crowd(url, asked, count, meanwhile=None):
    """What so many calls hear, 32 at once; `meanwhile` is told of the number of each that ends."""
    turns = asyncio.Semaphore(32)

    async def one(client, number):
        heard = await one_of_crowd(client, turns, asked, number)
        if meanwhile is not None:
            meanwhile(number)
        return heard

    # No connection is used twice: it may end by age just when the next call begins.
    async with openai.AsyncOpenAI(
        base_url=url,
        api_key="-",
        max_retries=0,
        timeout=600.0,
        default_headers={"connection": "close"},
    ) as client:
        return await asyncio.gather(*(one(client, i) for i in range(count)))


def alone(url, asked):
    """The answers of calls that are made one by one."""
    with openai.OpenAI(base_url=url, api_key="-", max_retries=0) as client:
        return [ask(client, **fields).choices[0] for _, fields in asked]


def check_crowd(asked, lone, heard):
    """Every answer is that of its lone run, and guided ones that ended are valid."""
    for number, (text, finish) in enumerate(heard):
        prompt = asked[number % len(asked)][0]
        own = lone[number % len(asked)]
        if finish == "given up":
            assert own.message.content.startswith(text)
        elif finish != "wrong":
            assert (text, finish) == (own.message.content, own.finish_reason)
            if prompt.grammar is not None and finish == "stop":
                assert is_valid(prompt.grammar, text)
    counts = [sum(f == kind for _, f in heard) for kind in ("given up", "wrong")]
    assert counts == [len(heard) // 10, len(heard) // 20]
