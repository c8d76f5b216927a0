"""The endpoint, asked by OpenAI's own client: answers, grammars, tools, refusals, pages."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest

from graft.grammar.statement import GrammarSpec
from graft.models.request import Request
from graft.tools.serve import calls

for package in ("starlette", "uvicorn", "prometheus_client"):
    pytest.importorskip(package, reason="the extra serve is not installed")
openai = pytest.importorskip("openai", reason="the package openai is not installed")
httpx = pytest.importorskip("httpx", reason="the package httpx is not installed")

from serving_util import ASKED, PERSON, ask, form, wait_for  # noqa: E402

WEB = httpx.Client(verify=False)
#: Fields of a call, and the same as the engine is asked.
SAME = [
    ({}, {}),
    ({"response_format": form(PERSON)}, {"grammar": PERSON}),
    (
        {"temperature": None, "seed": -3, "n": 3, "top_p": 0.9, "top_k": 40},
        {
            "temperature": 1.0,
            "seed": 2**64 - 3,
            "n": 3,
            "top_p": 0.9,
            "top_k": 40,
            "verify": "coupled",
        },
    ),
    ({"stop": ["va"], "min_tokens": 5}, {"stop": ["va"], "min_tokens": 5}),
    (
        {
            "logit_bias": {"3": -100},
            "max_tokens": 9,
            "presence_penalty": 1,
            "frequency_penalty": 0.5,
            "repetition_penalty": 1.5,
        },
        {
            "logit_bias": {3: -100.0},
            "max_tokens": 9,
            "presence_penalty": 1.0,
            "frequency_penalty": 0.5,
            "repetition_penalty": 1.5,
        },
    ),
]


@pytest.mark.parametrize(("fields", "same"), SAME)
def test_answers_are_the_engines_own_whole_and_streamed(engine, client, fields, same):
    """Texts, ends, usage and log probabilities are what the engine says of the same request."""
    if "grammar" in same:
        same = {"grammar": GrammarSpec.json_schema(same["grammar"])}
    outputs = engine.generate(
        [Request(**{"prompt": ASKED, "max_tokens": 80, "logprobs": 2} | same)]
    )
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
        [o.text for o in outputs],
        finish,
        whole.usage.total_tokens,
    )
    for output, streamed, choice in zip(outputs, told, whole.choices, strict=True):
        ids = output.tokens[:-1] if output.finished else output.tokens
        assert streamed == choice.logprobs.content
        assert [t.logprob for t in streamed] == [
            pytest.approx(output.logprobs[i].value) for i in range(len(ids))
        ]
        assert b"".join(bytes(t.bytes) for t in streamed).decode() == engine.tokenizer.decode(ids)
        assert all(len(t.top_logprobs) == 2 for t in streamed)


def test_completions_take_several_prompts_of_text_or_ids(engine, client):
    """Prompts stand as they are, without the chat template; columns of log probabilities fit."""
    ids = engine.tokenizer.encode("name: Olga")
    outputs = engine.generate([Request(tokens=ids, max_tokens=5)] * 2)
    for prompt in (["name: Olga"] * 2, [ids, ids]):
        said = client.completions.create(
            model="demo", prompt=prompt, max_tokens=5, temperature=0, logprobs=1
        )
        assert [c.text for c in said.choices] == [o.text for o in outputs]
        told = said.choices[1].logprobs
        assert "".join(told.tokens) == outputs[1].text and told.text_offset[0] == 0
        assert [list(top.values()) for top in told.top_logprobs] == [
            [pytest.approx(p)] for p in told.token_logprobs
        ]
        assert said.usage.prompt_tokens == 2 * len(ids)


TAGS = {
    "type": "structural_tag",
    "triggers": ["<a>"],
    "structures": [{"begin": "<a>", "schema": {"type": "integer"}, "end": "</a>"}],
}


@pytest.mark.parametrize(
    ("fields", "right"),
    [
        (
            {"response_format": {"type": "json_object"}},
            lambda said: isinstance(json.loads(said), dict),
        ),
        (
            {"structured_outputs": {"json": PERSON}},
            lambda said: {*json.loads(said)} == {"name", "age"},
        ),
        ({"structured_outputs": {"regex": "[0-9]{3}x"}}, re.compile("[0-9]{3}x").fullmatch),
        ({"guided_regex": "[0-9]{3}y"}, re.compile("[0-9]{3}y").fullmatch),
        (
            {"structured_outputs": {"choice": ["red, dark", "blue"]}},
            {"red, dark", "blue"}.__contains__,
        ),
        ({"structured_outputs": {"grammar": 'root ::= "e" [0-9]'}}, re.compile("e[0-9]").fullmatch),
        ({"structured_outputs": {"grammar": 'start: "l" /[0-9]/'}}, re.compile("l[0-9]").fullmatch),
        ({"response_format": TAGS}, re.compile("(?!.*<a>).*").fullmatch),
        (
            {"structured_outputs": {"structural_tag": json.dumps(TAGS)}},
            re.compile("[^<]*").fullmatch,
        ),
    ],
)
def test_every_kind_of_grammar_is_obeyed(client, fields, right):
    """Guided answers end by themselves and are what the grammar, in vLLM's words, asks for."""
    choice = ask(client, **fields).choices[0]
    assert choice.finish_reason == "stop" and right(choice.message.content)


TOWN = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/c"}},
    "required": ["city"],
    "$defs": {"c": {"type": "string", "pattern": "^[A-Z][a-z]{2,7}$"}},
    "additionalProperties": False,
}
SCHEMAS = {"town": TOWN, "person": PERSON}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "choice", ["required", "auto", {"type": "function", "function": {"name": "town"}}]
)
def test_tools_are_called_as_asked(engine, client, choice, stream):
    """Calls have arguments of their function's schema; where the model may call, it is led to."""
    fields = {"tools": TOOLS, "tool_choice": choice, "stream": stream}
    if choice == "auto":
        tag = engine.tokenizer.encode("<tool_call>")
        fields |= {
            "logit_bias": {str(token): 200 - 10 * i for i, token in enumerate(tag)},
            "repetition_penalty": 100.0,
            "parallel_tool_calls": False,
        }
    said = ask(client, **fields)
    pieces = list(said) if stream else [said]
    parts = [p.choices[0].delta if stream else p.choices[0].message for p in pieces]
    [call] = [call for part in parts for call in part.tool_calls or []]
    jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    assert call.function.name == "town" or not isinstance(choice, dict)
    assert pieces[-1].choices[0].finish_reason == "tool_calls" and call.id.startswith("call_")
    history = [
        {"role": "user", "content": [{"type": "text", "text": ASKED}]},
        {"role": "assistant", "tool_calls": [call.model_dump(exclude={"index"})]},
        {"role": "tool", "tool_call_id": call.id, "content": "name: Olga"},
    ]
    free = ask(client, tools=TOOLS, messages=history).choices[0]
    assert free.finish_reason == "stop" and free.message.content and not free.message.tool_calls


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_calls_are_read_out_of_text_in_any_pieces(size):
    """Text and calls come apart, whatever stands in arguments; what is cut off stays text."""
    arguments = ['{"x": "</tool_call> \\"}"}', "[1, {}]"]
    written = [
        f'<tool_call>\n{{"name": "f{i}", "arguments": {a}}}\n</tool_call>'
        for i, a in enumerate(arguments)
    ]
    text = f"so <tool{written[0]} and {written[1]} <tool_call>\n{{"
    reader = calls.CallReader("auto", 128)
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    said = ""
    found = []
    for i, piece in enumerate(pieces):
        more, new = reader.feed(piece, i == len(pieces) - 1)
        said = said + more
        found = found + new
    assert said == "so <tool and  <tool_call>\n{"
    assert [(c["function"]["name"], c["function"]["arguments"]) for c in found] == [
        ("f0", arguments[0]),
        ("f1", arguments[1]),
    ]
    once = calls.CallReader("auto", 1)
    assert len(once.feed(text, True)[1]) == 1 and once.feed("", True)[1] == []
    cut = calls.CallReader("required", 1)
    assert cut.feed('{"name": "f", "arguments": {', True) == ('{"name": "f", "arguments": {', [])


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"nonsense": 1}, 400, "'nonsense' is unknown"),
        ({"model": "other"}, 404, "no model 'other'"),
        ({"store": True}, 400, "store can only be False"),
        ({"temperature": -1}, 400, "temperature must be a number"),
        ({"priority": "high"}, 400, "priority must be an integer"),
        ({"n": 1000}, 400, "n must be an integer"),
        ({"logit_bias": {"x": 1}}, 400, "logit_bias must be numbers"),
        ({"top_logprobs": 2}, 400, "goes with logprobs"),
        ({"max_tokens": 5000}, 400, "exceed the cache's"),
        ({"messages": []}, 400, "at least one"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "must be text"),
        ({"response_format": {"type": "nothing"}}, 400, "response_format must be"),
        ({"response_format": form({"type": "array", "uniqueItems": True})}, 400, "#: uniqueItems"),
        ({"response_format": form({"description": "x" * 5000})}, 400, "Limits.grammar_bytes"),
        (
            {"response_format": form(PERSON), "structured_outputs": {"regex": "a"}},
            400,
            "response_format and regex",
        ),
        ({"structured_outputs": {}}, 400, "structured_outputs must have one of"),
        ({"structured_outputs": {"json": None}}, 400, "structured_outputs must have one of"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, 400, "got {'whitespace_pattern'"),
        ({"response_format": form(PERSON), "stop": "a"}, 400, "would cut a guided output"),
        (
            {"structured_outputs": {"structural_tag": "{"}},
            400,
            "structural tag: the text is not JSON",
        ),
        ({"tools": TOOLS * 2}, 400, "two functions are named 'town'"),
        ({"tool_choice": "required"}, 400, "needs tools"),
        ({"messages": [{"role": "user", "content": "x" * 30_000}]}, 413, "longer than 20000 bytes"),
        (
            {"logit_bias": {str(i): 0 for i in range(1500)}},
            400,
            "logit_bias has 1500 ids, more than",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_answered_is_refused_by_status(client, fields, status, words, stream):
    """What is wrong is named; also a stream is refused by its status, before it begins."""
    with pytest.raises(openai.APIStatusError, match=re.escape(words)) as caught:
        ask(client, **fields, stream=stream)
    assert caught.value.status_code == status and "partial" not in str(caught.value)
    assert caught.value.body["type"] == "invalid_request_error"


def test_prompts_and_samples_are_bounded_together(client):
    """Each of the numbers is small, what one call asks for is not."""
    with pytest.raises(openai.BadRequestError, match="at most 128 answers, got 256"):
        client.completions.create(model="demo", prompt=["a"] * 64, n=4)


def test_the_lowest_priority_is_the_first(server):
    """vLLM's clients give the urgent the lowest number, the engine the highest."""
    [request] = server.service.front.read({"prompt": "a", "priority": -7}, False, None).requests
    assert request.priority == 7


def test_doors_and_pages(engine, server, client):
    """The key is asked for, no JSON, no page and too many are refused; pages say how it is."""
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="other").models.list()
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").id == "demo"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    root = server.url.removesuffix("/v1")
    key = {"authorization": "Bearer key"}
    for path, status in (("/v1/chat/completions", 405), ("/v2", 404), ("/health", 200)):
        assert WEB.get(root + path).status_code == status
    for body in ("{", "[]", "[" * 10_000, '{"messages": 1e999}'):
        said = WEB.post(f"{server.url}/chat/completions", content=body, headers=key)
        assert said.status_code == 400 and said.json()["error"]["message"]
    with pytest.raises(openai.RateLimitError, match="100 requests are waiting already"):
        ask(client, n=128)
    wait_for(lambda: not engine.busy)
    page = WEB.get(f"{root}/metrics").text
    assert 'graft_up{replica="0"} 1.0' in page
    assert 'graft_drafts_accepted_total{position="0",replica="0"}' in page
    assert 'graft_requests_total{reason="refused"}' in page
