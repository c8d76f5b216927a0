"""The endpoint, asked by OpenAI's own client: answers, grammars, refusals, leaving."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import json
import os
import random
import re
import sys
import threading
import time
from pathlib import Path

import jsonschema
import pytest

from graft.grammar.statement import GrammarSpec
from graft.models.engine import Engine
from graft.models.request import Limits, Request
from graft.tools import cli
from graft.tools.bench import serving as serving_bench
from graft.tools.demo_model import demo_model
from graft.tools.demo_prompts import demo_prompts
from graft.tools.serve import calls
from graft.tools.serve.command import bound
from graft.tools.validity import is_valid

for package in ("starlette", "uvicorn", "prometheus_client"):
    pytest.importorskip(package, reason="the extra serve is not installed")
openai = pytest.importorskip("openai", reason="the package openai is not installed")
httpx = pytest.importorskip("httpx", reason="the package httpx is not installed")

from graft.tools.serve import app  # noqa: E402
from graft.tools.serve import server as leaving  # noqa: E402

WEB = httpx.Client(verify=False)
PERSON = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
          "required": ["name", "age"], "additionalProperties": False}
ASKED = "Extract the fields.\nname: Olga Novak; age: 42"
LONG = {"prompt": "a", "max_tokens": 400, "logit_bias": {"3": -1000}, "temperature": 0}


@pytest.fixture(scope="module")
def engine():
    """The demo model, eight rows; servers of this module follow each other before it."""
    with Engine(*demo_model(), max_batch_size=8, max_length=512,
                limits=Limits(grammar_bytes=4096, waiting=100)) as made:
        yield made
        made.settle()
        assert made.counters()["held"] == {"slots": 0, "leaving_slots": 0, "pages": 0,
                                           "unread_replays": 0, "unretired_replays": 0}


@contextlib.contextmanager
def serving(engine, drain_s=20.0, **settings):
    """A server of the engine, in a thread; it is let go in the end."""
    service = app.Service(engine, app.Settings("demo", **settings))
    server = leaving.Server(service, bound("127.0.0.1", 0), drain_s)
    thread = threading.Thread(target=server.start)
    thread.start()
    try:
        wait_for(lambda: server.started or not thread.is_alive())
        yield server
    finally:
        server.drain()
        thread.join(30)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def server(engine):
    """What most tests ask."""
    with serving(engine, api_key="key", body_bytes=20_000) as made:
        yield made


@pytest.fixture(scope="module")
def client(server):
    """OpenAI's client, which does not try twice."""
    with openai.OpenAI(base_url=server.url, api_key="key", max_retries=0) as made:
        yield made


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
    extra = {key: fields.pop(key) for key in ("structured_outputs", "top_k", "guided_regex",
                                              "min_tokens", "repetition_penalty", "nonsense")
             if key in fields}  # fmt: skip
    fields = {"model": "demo", "messages": [{"role": "user", "content": ASKED}], "temperature": 0,
              "max_tokens": 80} | fields
    return client.chat.completions.create(**fields, extra_body=extra)


#: Fields of a call, and the same as the engine is asked.
SAME = [
    ({}, {}),
    ({"response_format": form(PERSON)}, {"grammar": PERSON}),
    ({"temperature": None, "seed": -3, "n": 3, "top_p": 0.9, "top_k": 40},
     {"temperature": 1.0, "seed": 2**64 - 3, "n": 3, "top_p": 0.9, "top_k": 40,
      "verify": "coupled"}),
    ({"stop": ["va"], "min_tokens": 5}, {"stop": ["va"], "min_tokens": 5}),
    ({"logit_bias": {"3": -100}, "max_tokens": 9, "presence_penalty": 1, "frequency_penalty": 0.5,
      "repetition_penalty": 1.5},
     {"logit_bias": {3: -100.0}, "max_tokens": 9, "presence_penalty": 1.0,
      "frequency_penalty": 0.5, "repetition_penalty": 1.5}),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "same"), SAME)
def test_answers_are_the_engines_own_whole_and_streamed(engine, client, fields, same):
    """Texts, ends, usage and log probabilities are what the engine says of the same request."""
    if "grammar" in same:
        same = {"grammar": GrammarSpec.json_schema(same["grammar"])}
    outputs = engine.generate([Request(
        **{"prompt": ASKED, "max_tokens": 80, "logprobs": 2} | same)])  # fmt: skip
    finish = [{"stop_string": "stop"}.get(o.reason, o.reason) for o in outputs]
    fields = fields | {"logprobs": True, "top_logprobs": 2}
    whole = ask(client, **fields)
    assert [c.message.content for c in whole.choices] == [o.text for o in outputs]
    assert [c.finish_reason for c in whole.choices] == finish
    assert whole.usage.prompt_tokens == outputs[0].prompt_tokens
    assert whole.usage.completion_tokens == sum(len(o.tokens) for o in outputs)
    texts, told, ends = [[""] * len(outputs), [[] for _ in outputs], [None] * len(outputs)]
    for piece in ask(client, **fields, stream=True, stream_options={"include_usage": True}):
        for c in piece.choices:
            texts[c.index] += c.delta.content or ""
            told[c.index] += c.logprobs.content
            ends[c.index] = c.finish_reason
    assert (texts, ends, piece.usage.total_tokens) == (
        [o.text for o in outputs], finish, whole.usage.total_tokens)
    for output, streamed, choice in zip(outputs, told, whole.choices, strict=True):
        ids = output.tokens[:-1] if output.finished else output.tokens
        assert streamed == choice.logprobs.content
        assert [t.logprob for t in streamed] == [
            pytest.approx(output.logprobs[i].value) for i in range(len(ids))]
        assert b"".join(bytes(t.bytes) for t in streamed).decode() == engine.tokenizer.decode(ids)
        assert all(len(t.top_logprobs) == 2 for t in streamed)


def test_completions_take_several_prompts_of_text_or_ids(engine, client):
    """Prompts stand as they are, without the chat template; columns of log probabilities fit."""
    ids = engine.tokenizer.encode("name: Olga")
    outputs = engine.generate([Request(tokens=ids, max_tokens=5)] * 2)
    for prompt in (["name: Olga"] * 2, [ids, ids]):
        said = client.completions.create(model="demo", prompt=prompt, max_tokens=5, temperature=0,
                                         logprobs=1)
        assert [c.text for c in said.choices] == [o.text for o in outputs]
        told = said.choices[1].logprobs
        assert "".join(told.tokens) == outputs[1].text and told.text_offset[0] == 0
        assert [list(top.values()) for top in told.top_logprobs] == [
            [pytest.approx(p)] for p in told.token_logprobs]
        assert said.usage.prompt_tokens == 2 * len(ids)


TAGS = {"type": "structural_tag", "triggers": ["<a>"],
        "structures": [{"begin": "<a>", "schema": {"type": "integer"}, "end": "</a>"}]}


@pytest.mark.parametrize(("fields", "right"), [
    ({"response_format": {"type": "json_object"}}, lambda said: isinstance(json.loads(said), dict)),
    ({"structured_outputs": {"json": PERSON}}, lambda said: {*json.loads(said)} == {"name", "age"}),
    ({"structured_outputs": {"regex": "[0-9]{3}x"}}, re.compile("[0-9]{3}x").fullmatch),
    ({"guided_regex": "[0-9]{3}y"}, re.compile("[0-9]{3}y").fullmatch),
    ({"structured_outputs": {"choice": ["red, dark", "blue"]}}, {"red, dark", "blue"}.__contains__),
    ({"structured_outputs": {"grammar": 'root ::= "e" [0-9]'}}, re.compile("e[0-9]").fullmatch),
    ({"structured_outputs": {"grammar": 'start: "l" /[0-9]/'}}, re.compile("l[0-9]").fullmatch),
    ({"response_format": TAGS}, re.compile("(?!.*<a>).*").fullmatch),
    ({"structured_outputs": {"structural_tag": json.dumps(TAGS)}}, re.compile("[^<]*").fullmatch),
])  # fmt: skip
def test_every_kind_of_grammar_is_obeyed(client, fields, right):
    """Guided answers end by themselves and are what the grammar, in vLLM's words, asks for."""
    choice = ask(client, **fields).choices[0]
    assert choice.finish_reason == "stop" and right(choice.message.content)


TOWN = {"type": "object", "properties": {"city": {"$ref": "#/$defs/c"}}, "required": ["city"],
        "$defs": {"c": {"type": "string", "pattern": "^[A-Z][a-z]{2,7}$"}},
        "additionalProperties": False}
SCHEMAS = {"town": TOWN, "person": PERSON}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": schema}}
         for name, schema in SCHEMAS.items()]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", "auto", {"type": "function",
                                                         "function": {"name": "town"}}])
def test_tools_are_called_as_asked(engine, client, choice, stream):
    """Calls have arguments of their function's schema; where the model may call, it is led to."""
    fields = {"tools": TOOLS, "tool_choice": choice, "stream": stream}
    if choice == "auto":
        tag = engine.tokenizer.encode("<tool_call>")
        fields |= {"logit_bias": {str(token): 200 - 10 * i for i, token in enumerate(tag)},
                   "repetition_penalty": 100.0, "parallel_tool_calls": False}
    said = ask(client, **fields)
    pieces = list(said) if stream else [said]
    parts = [p.choices[0].delta if stream else p.choices[0].message for p in pieces]
    [call] = [call for part in parts for call in part.tool_calls or []]
    jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    assert call.function.name == "town" or not isinstance(choice, dict)
    assert pieces[-1].choices[0].finish_reason == "tool_calls" and call.id.startswith("call_")
    history = [{"role": "user", "content": [{"type": "text", "text": ASKED}]},
               {"role": "assistant", "tool_calls": [call.model_dump(exclude={"index"})]},
               {"role": "tool", "tool_call_id": call.id, "content": "name: Olga"}]
    free = ask(client, tools=TOOLS, messages=history).choices[0]
    assert free.finish_reason == "stop" and free.message.content and not free.message.tool_calls


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_calls_are_read_out_of_text_in_any_pieces(size):
    """Text and calls come apart, whatever stands in arguments; what is cut off stays text."""
    arguments = ['{"x": "</tool_call> \\"}"}', "[1, {}]"]
    written = [f'<tool_call>\n{{"name": "f{i}", "arguments": {a}}}\n</tool_call>'
               for i, a in enumerate(arguments)]
    text = f"so <tool{written[0]} and {written[1]} <tool_call>\n{{"
    reader = calls.CallReader("auto", 128)
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    said, found = "", []
    for i, piece in enumerate(pieces):
        more, new = reader.feed(piece, i == len(pieces) - 1)
        said, found = said + more, found + new
    assert said == "so <tool and  <tool_call>\n{"
    assert [(c["function"]["name"], c["function"]["arguments"]) for c in found] == [
        ("f0", arguments[0]), ("f1", arguments[1])]
    once = calls.CallReader("auto", 1)
    assert len(once.feed(text, True)[1]) == 1 and once.feed("", True)[1] == []
    cut = calls.CallReader("required", 1)
    assert cut.feed('{"name": "f", "arguments": {', True) == ('{"name": "f", "arguments": {', [])


@pytest.mark.parametrize(("fields", "status", "words"), [
    ({"nonsense": 1}, 400, "'nonsense' is unknown"),
    ({"model": "other"}, 404, "no model 'other'"),
    ({"store": True}, 400, "store can only be False"),
    ({"temperature": -1}, 400, "temperature must be a number"),
    ({"n": 1000}, 400, "n must be an integer"),
    ({"logit_bias": {"x": 1}}, 400, "logit_bias must be numbers"),
    ({"top_logprobs": 2}, 400, "goes with logprobs"),
    ({"max_tokens": 5000}, 400, "exceed the cache's"),
    ({"messages": []}, 400, "at least one"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "must be text"),
    ({"response_format": {"type": "nothing"}}, 400, "response_format must be"),
    ({"response_format": form({"type": "array", "uniqueItems": True})}, 400, "#: uniqueItems"),
    ({"response_format": form({"description": "x" * 5000})}, 400, "Limits.grammar_bytes"),
    ({"response_format": form(PERSON), "structured_outputs": {"regex": "a"}}, 400,
     "response_format and regex"),
    ({"structured_outputs": {"whitespace_pattern": " "}}, 400, "got {'whitespace_pattern'"),
    ({"response_format": form(PERSON), "stop": "a"}, 400, "would cut a guided output"),
    ({"structured_outputs": {"structural_tag": "{"}}, 400, "structural tag: the text is not JSON"),
    ({"tools": TOOLS * 2}, 400, "two functions are named 'town'"),
    ({"tool_choice": "required"}, 400, "needs tools"),
    ({"messages": [{"role": "user", "content": "x" * 30_000}]}, 413, "longer than 20000 bytes"),
    ({"logit_bias": {str(i): 0 for i in range(1500)}}, 400, "logit_bias has 1500 ids, more than"),
])  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_answered_is_refused_by_status(client, fields, status, words, stream):
    """What is wrong is named; also a stream is refused by its status, before it begins."""
    with pytest.raises(openai.APIStatusError, match=re.escape(words)) as caught:
        ask(client, **fields, stream=stream)
    assert caught.value.status_code == status
    assert caught.value.body["type"] == "invalid_request_error"


def test_prompts_and_samples_are_bounded_together(client):
    """Each of the numbers is small, what one call asks for is not."""
    with pytest.raises(openai.BadRequestError, match="at most 128 answers, got 256"):
        client.completions.create(model="demo", prompt=["a"] * 64, n=4)


def test_doors_and_pages(engine, server, client):
    """The key is asked for, no JSON, no page and too many are refused; pages say how it is."""
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="other").models.list()
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").id == "demo"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    root, key = server.url.removesuffix("/v1"), {"authorization": "Bearer key"}
    for path, status in (("/v1/chat/completions", 405), ("/v2", 404), ("/health", 200)):
        assert WEB.get(root + path).status_code == status
    for body in ("{", "[]", "[" * 10_000, '{"messages": 1e999}'):
        said = WEB.post(f"{server.url}/chat/completions", content=body, headers=key)
        assert said.status_code == 400 and said.json()["error"]["message"]
    with pytest.raises(openai.RateLimitError, match="100 requests are waiting already"):
        ask(client, n=128)
    wait_for(lambda: not engine.busy)
    page = WEB.get(f"{root}/metrics").text
    assert "graft_up 1.0" in page and 'graft_drafts_accepted_total{position="0"}' in page
    assert 'graft_requests_total{reason="refused"}' in page


def test_sixty_four_at_once_are_each_what_they_are_alone(engine, server):
    """Sampled and greedy, guided and free: everybody gets what they would get alone."""
    kinds = [{"seed": i, "temperature": 1.0} for i in range(4)] + [
        {"temperature": 0}, {"response_format": form(PERSON)},
        {"structured_outputs": {"choice": ["red", "green"]}, "seed": 5, "temperature": 2.0}]
    asked = list(itertools.islice(itertools.cycle(kinds), 64))

    async def all_at_once():
        async with openai.AsyncOpenAI(base_url=server.url, api_key="key", max_retries=0) as made:
            return await asyncio.gather(*(ask(made, **fields, max_tokens=24) for fields in asked))

    texts = [said.choices[0].message.content for said in asyncio.run(all_at_once())]
    with openai.OpenAI(base_url=server.url, api_key="key") as made:
        alone = [ask(made, **fields, max_tokens=24).choices[0].message.content for fields in kinds]
    assert texts == list(itertools.islice(itertools.cycle(alone), 64))


@pytest.fixture
def turns(engine, monkeypatch):
    """The engine takes only as many steps as are released."""
    allowed, step = threading.Semaphore(0), engine.step

    def wait_and_step():
        allowed.acquire(timeout=30)
        return step()

    monkeypatch.setattr(engine, "step", wait_and_step)
    return allowed


def test_who_leaves_is_cancelled(server, client, turns):
    """A stream that is closed, and a call that is given up, free their rows."""
    def cancelled():
        page = WEB.get(f"{server.url.removesuffix('/v1')}/metrics").text
        found = re.search(r'reason="cancelled"\} (\d+)', page)
        return int(found[1]) if found else 0

    driver, before = server.service.driver, cancelled()
    turns.release(4)
    stream = client.completions.create(model="demo", stream=True, **LONG)
    next(iter(stream))
    assert driver.open == 1
    stream.close()
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.3).completions.create(model="demo", **LONG)
    wait_for(lambda: server.service.calls == 0)
    assert driver.open == 0
    turns.release(1000)
    wait_for(lambda: cancelled() == before + 2)
    assert driver.open == 0


def test_a_full_house_says_so_and_a_leaving_one_ends_what_runs(engine, turns):
    """One call too many gets a 429; a server that leaves takes no more, and finishes the others."""
    with (serving(engine, waiting=-7) as server,
          openai.OpenAI(base_url=server.url, api_key="-", max_retries=0) as client):
        turns.release(4)
        pieces = iter(client.completions.create(model="demo", stream=True, **LONG))
        next(pieces)
        with pytest.raises(openai.RateLimitError) as full:
            ask(client)
        assert full.value.response.headers["retry-after"] == "1"
        server.drain()
        with pytest.raises(openai.InternalServerError, match="leaving"):
            ask(client)
        assert WEB.get(f"{server.url.removesuffix('/v1')}/health").status_code == 503
        turns.release(1000)
        assert [piece.choices[0].finish_reason for piece in pieces][-1] == "length"


def test_who_is_not_done_when_the_server_leaves_is_told(engine, turns):
    """When the time to drain is up, a stream ends by an error."""
    with (serving(engine, drain_s=0.0) as server,
          openai.OpenAI(base_url=server.url, api_key="-", max_retries=0) as client):
        turns.release(4)
        pieces = iter(client.completions.create(model="demo", stream=True, **LONG))
        next(pieces)
        server.drain()
        wait_for(lambda: server.should_exit)
        turns.release(1000)
        with pytest.raises(openai.APIError, match="the server is leaving"):
            list(pieces)


def test_a_failed_engine_ends_every_call_and_is_told(engine, monkeypatch):
    """Whoever waits gets an error, whoever comes a 503, and the pages say so."""
    def fail():
        raise RuntimeError("the device burns")

    with (serving(engine) as server,
          openai.OpenAI(base_url=server.url, api_key="-", max_retries=0) as client):
        monkeypatch.setattr(engine, "step", fail)
        for _ in range(2):
            with pytest.raises(openai.InternalServerError, match="the device burns") as caught:
                ask(client)
            assert caught.value.status_code == 503
        root = server.url.removesuffix("/v1")
        assert WEB.get(f"{root}/health").json() == {"status": "the device burns"}
        assert "graft_up 0.0" in WEB.get(f"{root}/metrics").text
    monkeypatch.undo()
    while engine.busy:
        [engine.cancel(name) for name in list(engine._scheduler.unfinished)]
        engine.step()


def test_the_command_names_what_it_lacks(monkeypatch, capsys):
    """Without the extra's packages, or with an address that is taken, it is one sentence."""
    with contextlib.closing(bound("127.0.0.1", 0)) as taken:
        taken.listen()
        port = str(taken.getsockname()[1])
        assert cli.main(["serve", "--port", port]) == 2
    assert f"--port {port}: " in capsys.readouterr().err
    monkeypatch.delitem(sys.modules, "graft.tools.serve.server")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert cli.main(["serve"]) == 2
    assert "the package uvicorn: pip install 'graft-cuda[serve]'" in capsys.readouterr().err


@pytest.mark.full
def test_the_bench_hears_whole_answers_of_a_server_that_leaves_when_told(tmp_path, capsys):
    """Every call of every rate is answered whole by ``graft serve``, which SIGTERM ends by 0; what
    is told fits together."""
    assert serving_bench.main(["--rates", "2", "4", "--calls", "6", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "serving.json").read_text())
    assert [(f["rate"], f["whole"], f["calls"]) for f in found] == [(2, 6, 6), (4, 6, 6)]
    for one in found:
        assert 0 < one["first_ms"]["p50"] <= one["first_ms"]["p99"] < one["seconds"] * 1e3
        assert one["goodput"] <= 6 / one["seconds"]
    assert "Goodput" in (tmp_path / "serving.svg").read_text()
    assert "6/6" in capsys.readouterr().out


def held(engine):
    """What a process and an engine hold: files, threads, children, slots and pages; and bytes."""
    engine.settle()
    threads = sorted(thread.name for thread in threading.enumerate())
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    files = len(os.listdir("/proc/self/fd"))
    return (files, threads, engine.counters()["held"]), pages * os.sysconf("SC_PAGESIZE")


@pytest.mark.full
def test_a_thousand_calls_get_what_they_get_alone_and_leave_nothing(engine):
    """32 at once, a tenth given up and a twentieth wrong: every answer is that of its lone run,
    guided ones that ended are valid, and files, threads, slots, pages and memory stay."""
    draw = random.Random(1)
    kinds = [(p, {"messages": [{"role": "user", "content": p.text}], "seed": draw.randrange(99),
                  "temperature": draw.choice([0, 0.7, 1.3]), "max_tokens": 100,
                  **({} if p.grammar is None else {"response_format": form(p.grammar.schema)}
                     if p.grammar.schema else {"structured_outputs": {"regex": p.grammar.text}})})
             for p in demo_prompts() * 4]  # fmt: skip
    wrong = [{"nonsense": 1}, {"temperature": -1}, {"response_format": form({"type": "nothing"})}]

    async def one(client, turns, number):
        fields, stream = kinds[number % len(kinds)][1], number % 10 == 3 or number % 2 == 0
        async with turns:
            if number % 20 == 7:
                with pytest.raises(openai.BadRequestError):
                    await ask(client, **fields | wrong[number % 3])
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

    async def run(url, count):
        turns = asyncio.Semaphore(32)
        async with openai.AsyncOpenAI(base_url=url, api_key="-", max_retries=0) as client:
            return await asyncio.gather(*(one(client, turns, i) for i in range(count)))

    with serving(engine) as server:
        with openai.OpenAI(base_url=server.url, api_key="-") as client:
            alone = [ask(client, **fields).choices[0] for _, fields in kinds]
        asyncio.run(run(server.url, 200))
        wait_for(lambda: server.service.driver.open == 0)
        before, bytes_before = held(engine)
        heard = asyncio.run(run(server.url, 1000))
        wait_for(lambda: server.service.driver.open == 0)
        gc.collect()
        after, bytes_after = held(engine)
    for number, (text, finish) in enumerate(heard):
        prompt, lone = kinds[number % len(kinds)][0], alone[number % len(kinds)]
        if finish == "given up":
            assert lone.message.content.startswith(text)
        elif finish != "wrong":
            assert (text, finish) == (lone.message.content, lone.finish_reason)
            if prompt.grammar is not None and finish == "stop":
                assert is_valid(prompt.grammar, text)
    assert [sum(f == kind for _, f in heard) for kind in ("given up", "wrong")] == [100, 50]
    assert after == before
    assert bytes_after - bytes_before < 24 << 20
