"""Tests of the server's API with OpenAI's client.

The subjects are responses, structured outputs, tool calls, errors, authentication and metrics.
"""

from __future__ import annotations

import importlib.util
import json
import re

import jsonschema
import pytest

pytest.importorskip("pydantic", reason="the extra serve is not installed")

from graft.grammar.grammar_spec import GrammarSpec
from graft.grammar.xgrammar_api import structural_tag_spec
from graft.models.request import Event, Output, Request
from graft.tools.serve.completion_writer import ResponseChoice
from graft.tools.serve.grammars import FoundGrammar, make_grammar_spec
from graft.tools.serve.tool_calls import ToolChoice
from graft.tools.serve.tool_formats import TOOL_FORMATS
from graft.tools.serve.tool_formats.parser import MAX_TOOL_CALLS, ToolCallParser

for package in ("starlette", "uvicorn", "prometheus_client"):
    pytest.importorskip(package, reason="the extra serve is not installed")
openai = pytest.importorskip("openai", reason="the package openai is not installed")
pytest.importorskip("httpx", reason="the package httpx is not installed")

from request_util import TOWN, api_request, feed_calls  # noqa: E402
from serving_util import PERSON, PROMPT, chat, generate, response_format, wait_for  # noqa: E402

from graft.tools.serve.requests import CompletionRequest  # noqa: E402

#: Pairs of API fields and the equivalent arguments of `Request`.
EQUAL_REQUESTS = [
    ({}, {}),
    ({"response_format": response_format(PERSON)}, {"grammar": PERSON}),
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


@pytest.mark.parametrize(("fields", "options"), EQUAL_REQUESTS)
def test_server_responses_equal_engine_outputs(engine, client, fields, options):
    """A response has the text, finish reason, token usage and log probabilities of the output.

    The streamed response contains the same values.
    """
    if "grammar" in options:
        options = {"grammar": GrammarSpec.json_schema(options["grammar"])}
    outputs = generate(
        engine, [Request(**{"prompt": PROMPT, "max_tokens": 80, "logprobs": 2} | options)]
    )
    finish_reasons = [{"stop_string": "stop"}.get(o.reason, o.reason) for o in outputs]
    fields = fields | {"logprobs": True, "top_logprobs": 2}
    response = chat(client, **fields)
    assert [c.message.content for c in response.choices] == [o.text for o in outputs]
    assert [c.finish_reason for c in response.choices] == finish_reasons
    assert response.usage.prompt_tokens == outputs[0].prompt_tokens
    assert response.usage.completion_tokens == sum(len(o.tokens) for o in outputs)
    texts = [""] * len(outputs)
    logprobs = [[] for _ in outputs]
    streamed_reasons = [None] * len(outputs)
    for chunk in chat(client, **fields, stream=True, stream_options={"include_usage": True}):
        for c in chunk.choices:
            texts[c.index] += c.delta.content or ""
            logprobs[c.index] += c.logprobs.content if c.logprobs else []
            streamed_reasons[c.index] = c.finish_reason
    assert texts == [o.text for o in outputs]
    assert streamed_reasons == finish_reasons
    assert chunk.usage.total_tokens == response.usage.total_tokens
    for output, streamed, choice in zip(outputs, logprobs, response.choices, strict=True):
        ids = output.tokens[:-1] if output.finished else output.tokens
        assert streamed == choice.logprobs.content
        assert [t.logprob for t in streamed] == [
            pytest.approx(output.logprobs[i].value) for i in range(len(ids))
        ]
        assert b"".join(bytes(t.bytes) for t in streamed).decode() == engine.tokenizer.decode(ids)
        assert all(len(t.top_logprobs) == 2 for t in streamed)


def test_completions_accept_prompts_as_text_or_token_ids(engine, client):
    """The completions endpoint does not apply the chat template.

    Log probabilities have the format of the completions API.
    """
    ids = engine.tokenizer.encode("name: Olga")
    outputs = generate(engine, [Request(tokens=ids, max_tokens=5)] * 2)
    for prompt in (["name: Olga"] * 2, [ids, ids]):
        response = client.completions.create(
            model="demo", prompt=prompt, max_tokens=5, temperature=0, logprobs=1
        )
        assert [c.text for c in response.choices] == [o.text for o in outputs]
        logprobs = response.choices[1].logprobs
        assert "".join(logprobs.tokens) == outputs[1].text
        assert logprobs.text_offset[0] == 0
        assert [list(top.values()) for top in logprobs.top_logprobs] == [
            [pytest.approx(p)] for p in logprobs.token_logprobs
        ]
        assert response.usage.prompt_tokens == 2 * len(ids)


TAGS = {
    "type": "structural_tag",
    "triggers": ["<a>"],
    "structures": [{"begin": "<a>", "schema": {"type": "integer"}, "end": "</a>"}],
}


TRIGGERED_TAGS = {
    "type": "triggered_tags",
    "triggers": ["<a>"],
    "tags": [
        {
            "begin": "<a>",
            "content": {"type": "json_schema", "json_schema": {"type": "integer"}},
            "end": "</a>",
        }
    ],
}


def structural_format(**form):
    """Return the value of response_format for a structural tag in XGrammar's format."""
    return {"type": "structural_tag", "format": form}


AGE = {"type": "integer", "minimum": 0, "maximum": 9}
THOUGHT = {
    "type": "tag",
    "begin": "<think>",
    "content": {"type": "any_text", "max_chars": 8},
    "end": "</think>",
}
ANSWER = {
    "type": "tag",
    "begin": "",
    "content": {
        "type": "or",
        "elements": [
            {"type": "const_string", "value": "yes"},
            {
                "type": "json_schema",
                "json_schema": {"type": "object", "properties": {"age": AGE}, "required": ["age"]},
            },
        ],
    },
    "end": "!",
}
#: Numbers with separators, followed by a call in Qwen's form, which only XGrammar compiles.
REPEATED = {
    "type": "sequence",
    "elements": [
        {
            "type": "repeat",
            "min": 2,
            "max": 2,
            "content": {"type": "regex", "pattern": "[0-9]{2}, "},
        },
        {"type": "regex", "pattern": "[0-9]{2}"},
        {
            "type": "tag",
            "begin": "<p>",
            "content": {
                "type": "qwen_xml_parameter",
                "json_schema": {"type": "object", "properties": {"age": AGE}, "required": ["age"]},
            },
            "end": "</p>",
        },
    ],
}


@pytest.mark.parametrize(
    ("fields", "is_valid"),
    [
        (
            {"response_format": {"type": "json_object"}},
            lambda text: isinstance(json.loads(text), dict),
        ),
        (
            {"response_format": {"type": "json_object", "schema": None}},
            lambda text: isinstance(json.loads(text), dict),
        ),
        (
            {"response_format": {"type": "json_object", "schema": PERSON}},
            lambda text: {*json.loads(text)} == {"name", "age"},
        ),
        (
            {"structured_outputs": {"json": PERSON}},
            lambda text: {*json.loads(text)} == {"name", "age"},
        ),
        ({"structured_outputs": {"regex": "[0-9]{3}x"}}, re.compile("[0-9]{3}x").fullmatch),
        ({"guided_regex": "[0-9]{3}y"}, re.compile("[0-9]{3}y").fullmatch),
        (
            {"structured_outputs": {"choice": ["red, dark", "blue"]}},
            {"red, dark", "blue"}.__contains__,
        ),
        ({"structured_outputs": {"choice": [10, 2.5]}}, {"10", "2.5"}.__contains__),
        ({"structured_outputs": {"grammar": 'root ::= "e" [0-9]'}}, re.compile("e[0-9]").fullmatch),
        ({"structured_outputs": {"grammar": 'start: "l" /[0-9]/'}}, re.compile("l[0-9]").fullmatch),
        ({"regex": "[0-9]{3}z"}, re.compile("[0-9]{3}z").fullmatch),
        ({"ebnf": 'root ::= "f" [0-9]'}, re.compile("f[0-9]").fullmatch),
        ({"response_format": TAGS}, re.compile("(?!.*<a>).*").fullmatch),
        ({"response_format": structural_format(type="const_string", value="Hi.")}, "Hi.".__eq__),
        (
            {"response_format": structural_format(type="json_schema", json_schema=PERSON)},
            lambda text: {*json.loads(text)} == {"name", "age"},
        ),
        (
            {"response_format": structural_format(type="regex", pattern="[0-9]{2}w")},
            re.compile("[0-9]{2}w").fullmatch,
        ),
        (
            {"response_format": structural_format(**TRIGGERED_TAGS)},
            re.compile("(?!.*<a>).*").fullmatch,
        ),
        (
            {"structured_outputs": {"structural_tag": json.dumps(TAGS)}},
            re.compile("[^<]*").fullmatch,
        ),
        (
            {"response_format": structural_format(type="sequence", elements=[THOUGHT, ANSWER])},
            re.compile(r"<think>(?s:.){0,8}</think>(yes|\{\"age\": [0-9]\})!").fullmatch,
        ),
        pytest.param(
            {"structured_outputs": {"structural_tag": structural_format(**REPEATED)}},
            re.compile(
                r"([0-9]{2}, ){2}[0-9]{2}<p>\s?<parameter=age>\s?[0-9]\s?</parameter>\s?</p>"
            ).fullmatch,
            marks=pytest.mark.skipif(
                importlib.util.find_spec("xgrammar") is None, reason="xgrammar is not installed"
            ),
        ),
    ],
)
def test_structured_outputs_satisfy_every_kind_of_grammar(client, fields, is_valid):
    """A grammar can be given in response_format or in any key of vLLM's structured_outputs."""
    choice = chat(client, **fields).choices[0]
    assert choice.finish_reason == "stop"
    assert is_valid(choice.message.content)


@pytest.mark.parametrize("key", ["structures", "tags"])
def test_structural_tag_without_schema_allows_any_json(key):
    """The plug-in for engines written for XGrammar has the same default."""
    specs = []
    for schema in ({"schema": {}}, {"schema": None}, {}):
        tag = {"begin": "<a>", "end": "</a>"} | schema
        value = {key: [tag], "triggers": ["<"]}
        specs.append(make_grammar_spec(FoundGrammar("", "structural_tag", value)))
    assert specs == [structural_tag_spec({"structures": [tag], "triggers": ["<"]})] * 3


SCHEMAS = {"town": TOWN, "person": PERSON}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]


def call_bias(engine):
    """Return fields that make the model begin a call in tags."""
    tag = engine.tokenizer.encode("<tool_call>")
    return {
        "logit_bias": {str(token): 200 - 10 * i for i, token in enumerate(tag)},
        "repetition_penalty": 100.0,
    }


FORMATS = {
    "schema": (response_format(PERSON), lambda text: {*json.loads(text)} == {"name", "age"}),
    "tag": (structural_format(**THOUGHT), re.compile("<think>(?s:.){0,8}</think>").fullmatch),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("form, is_valid", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("choice", ["auto", "required", "none", "biased"])
def test_tools_can_be_combined_with_response_format(engine, client, choice, form, is_valid, stream):
    """The output consists of calls, or its text satisfies response_format."""
    fields = {"tools": TOOLS, "tool_choice": choice, "response_format": form, "stream": stream}
    if choice == "biased":
        fields |= call_bias(engine) | {"tool_choice": "auto", "parallel_tool_calls": False}
    response = chat(client, **fields)
    chunks = list(response) if stream else [response]
    messages = [c.choices[0].delta if stream else c.choices[0].message for c in chunks]
    calls = [call for message in messages for call in message.tool_calls or []]
    text = "".join(message.content or "" for message in messages)
    if choice in ("required", "biased"):
        arguments = calls[0].function.arguments
        if stream:
            arguments = "".join(call.function.arguments for call in calls if call.index == 0)
        jsonschema.validate(json.loads(arguments), SCHEMAS[calls[0].function.name])
        assert not text and chunks[-1].choices[0].finish_reason == "tool_calls"
    else:
        assert is_valid(text) and not calls
        assert chunks[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "choice", ["required", "auto", {"type": "function", "function": {"name": "town"}}]
)
def test_tool_calls_satisfy_function_schemas(engine, client, choice, stream):
    """The arguments of a generated call satisfy the function's schema.

    The messages of the next request can contain the call. With tool_choice "auto", a logit bias
    makes the model begin a call.
    """
    fields = {"tools": TOOLS, "tool_choice": choice, "stream": stream}
    if choice == "auto":
        fields |= call_bias(engine) | {"parallel_tool_calls": False}
    response = chat(client, **fields)
    chunks = list(response) if stream else [response]
    messages = [c.choices[0].delta if stream else c.choices[0].message for c in chunks]
    deltas = [call for message in messages for call in message.tool_calls or []]
    call = deltas[0].model_copy(deep=True)
    call.function.arguments = "".join(delta.function.arguments for delta in deltas)
    jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    assert call.function.name == "town" or not isinstance(choice, dict)
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert call.id.startswith("call_")
    if stream:
        assert len(deltas) > 1 and not messages[-1].tool_calls
        assert all(not message.content for message in messages)
    history = [
        {"role": "user", "content": [{"type": "text", "text": PROMPT}]},
        {"role": "assistant", "tool_calls": [call.model_dump(exclude={"index"})]},
        {"role": "tool", "tool_call_id": call.id, "content": "name: Olga"},
    ]
    answer = chat(client, tools=TOOLS, messages=history).choices[0]
    assert answer.finish_reason == "stop"
    assert answer.message.content and not answer.message.tool_calls


HERMES = TOOL_FORMATS["hermes"]
ARGUMENTS = ['{"x": "</tool_call> \\"}"}', "[1, {}]", "12", '"a}"']
CALLS = [f'{{"name": "f{i}", "arguments": {one}}}' for i, one in enumerate(ARGUMENTS)]
TAGGED_CALLS = " and ".join(f"<tool_call>\n{call}\n</tool_call>" for call in CALLS)


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize(
    ("text", "required", "expected_content"),
    [
        (
            f"so <tool{TAGGED_CALLS} <tool_call>\n{{",
            False,
            "so <tool and  and  and  <tool_call>\n{",
        ),
        ("\n".join(TAGGED_CALLS.split(" and ")), True, ""),
    ],
)
def test_tool_call_parser_separates_calls_from_content(size, text, required, expected_content):
    """The parser returns the same calls and content for any division of the text into pieces."""
    parser = ToolCallParser(ToolChoice([{}], required), HERMES)
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    calls = [(f"f{i}", arguments) for i, arguments in enumerate(ARGUMENTS)]
    assert feed_calls(parser, pieces) == (expected_content, calls)
    assert parser.cut_text == ""


def test_tool_call_parser_limits_calls_and_reports_cut_call():
    many = ToolCallParser(ToolChoice([{}]), HERMES)
    assert len(many.feed(TAGGED_CALLS * 40, True)[1]) == MAX_TOOL_CALLS == len(many.calls)
    cut = ToolCallParser(ToolChoice([{}], required=True), HERMES)
    text = '<tool_call>\n{"name": "f", "arguments": {"a'
    content, [delta] = cut.feed(text, True)
    assert (content, delta["function"]["arguments"]) == ("", '{"a')
    assert cut.cut_text == text
    assert cut.feed("", True) == ("", [])


def split_response(parser, pieces, reason, stream, **options):
    """Return content, reasoning, calls and finish reason of a response to generated text.

    The calls are a list of pairs of name and arguments. `options` are arguments of `api_request`.
    """
    request = api_request(stream=stream, **options)
    choice = ResponseChoice(request, 0, parser)
    output = Output("x", tokens=[0], text="".join(pieces), reason=reason)
    if not stream:
        body = choice.complete(output)
        messages = [body["message"]]
    else:
        events = [Event("x", (), piece) for piece in pieces] + [Event("x", (), "", output)]
        chunks = [chunk for event in events for chunk in choice.chunks(event)]
        body = chunks[-1]
        messages = [chunk["delta"] for chunk in chunks]
    calls = {}
    for i, call in enumerate(one for message in messages for one in message.get("tool_calls", [])):
        name, arguments = calls.get(call.get("index", i), ("", ""))
        function = call["function"]
        calls[call.get("index", i)] = (
            name + function.get("name", ""),
            arguments + function["arguments"],
        )
    content = "".join(message.get("content") or "" for message in messages)
    reasoning = "".join(message.get("reasoning") or "" for message in messages)
    return content, reasoning, list(calls.values()), body["finish_reason"]


TAGGED = [f"<tool_call>\n{call}\n</tool_call>" for call in (CALLS[1], CALLS[0])]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "reason", "options", "expected_calls", "finish_reason"),
    [
        (TAGGED[0], "stop", {}, [("f1", "[1, {}]")], "tool_calls"),
        (TAGGED[0][:45], "stop_string", {}, [], "stop"),
        (TAGGED[0][:45], "length", {}, [], "length"),
        (TAGGED[0] + TAGGED[1][:50], "stop_string", {}, [("f1", "[1, {}]")], "stop"),
        (TAGGED[0][:45], "stop_string", {"required": True}, [], "stop"),
    ],
)
def test_response_has_complete_calls_only(
    server, text, reason, options, expected_calls, finish_reason, stream
):
    """A stream also contains the beginning of a cut call, because that was sent before the cut."""
    tools = ToolChoice([{"name": "f1"}], **options)
    pieces = [text[at : at + 3] for at in range(0, len(text), 3)]
    _, _, calls, found_reason = split_response(
        server.service.parser, pieces, reason, stream, tools=tools, reasoning=None
    )
    if stream:
        calls = calls[: len(expected_calls)]
    assert calls == expected_calls
    assert found_reason == finish_reason


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("options", [{"required": True, "parallel": False}, {"required": True}, {}])
@pytest.mark.parametrize("separate", [False, True])
def test_tool_calls_are_parsed_after_reasoning(server, options, separate, stream):
    """Without ``separate_reasoning``, the reasoning section is content. Calls in it are text."""
    section = f"<think>maybe {TAGGED[1]}</think>"
    text = section + TAGGED[0]
    pieces = [text[at : at + 3] for at in range(0, len(text), 3)]
    content, reasoning, calls, finish_reason = split_response(
        server.service.parser,
        pieces,
        "stop",
        stream,
        tools=ToolChoice([{"name": "f1"}], **options),
        reasoning=False,
        separate_reasoning=separate,
    )
    if separate:
        assert (content, reasoning) == ("", f"maybe {TAGGED[1]}")
    else:
        assert (content, reasoning) == (section, "")
    assert calls == [("f1", "[1, {}]")]
    assert finish_reason == "tool_calls"


def json_schema(**schema):
    return {"response_format": response_format(schema)}


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"nonsense": 1}, 400, "'nonsense' is unknown"),
        ({"model": "other"}, 404, "no model 'other'"),
        ({"use_beam_search": True}, 400, "use_beam_search can only be False"),
        ({"skip_special_tokens": 2}, 400, "skip_special_tokens must be True or False, got 2"),
        ({"seed": 2**63}, 400, "seed must be an integer from -9223372036854775808"),
        ({"seed": 1.5}, 400, "seed must be an integer"),
        ({"tool_choice": "auto"}, 400, "tool_choice 'auto' requires tools"),
        ({"prompt_logprobs": -1}, 400, "prompt_logprobs must be an integer from 0 to 20"),
        (
            {"response_format": structural_format(type="sequence", elements=[])},
            400,
            "structural format: format.elements: must have at least one element",
        ),
        (
            {"response_format": structural_format(type="any_tokens")},
            400,
            "format.type: must be one of any_text, const_string,",
        ),
        (
            {"structured_outputs": {"regex": "a"}, "tools": TOOLS, "tool_choice": "required"},
            400,
            "regex and tools",
        ),
        (
            {
                "response_format": response_format({"type": "nothing"}),
                "tools": TOOLS,
                "tool_choice": "required",
            },
            400,
            "type: must be a type of JSON",
        ),
        (
            {
                "response_format": response_format({"description": "x" * 5000}),
                "tools": TOOLS,
                "tool_choice": {"type": "function", "function": {"name": "town"}},
            },
            400,
            "Limits.grammar_bytes",
        ),
        ({"temperature": -1}, 400, "temperature must be a number"),
        ({"priority": "high"}, 400, "priority must be an integer"),
        ({"n": 1000}, 400, "n must be an integer"),
        ({"logit_bias": {"x": 1, "3": 1, "y": 1}}, 400, "numbers, got the keys ['x', 'y']"),
        ({"logit_bias": [1]}, 400, "logit_bias must map token ids to numbers, got [1]"),
        ({"logit_bias": {"2049": 1}}, 400, "logit_bias contains 2049, which is out of vocabulary"),
        ({"stop_token_ids": [-1]}, 400, "stop_token_ids contains -1"),
        ({"allowed_token_ids": [5000]}, 400, "from 0 to 2047 (2048 tokens)"),
        ({"top_logprobs": 2}, 400, "top_logprobs requires logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs must be an integer from 0 to"),
        ({"max_tokens": 5000}, 400, "context length: 19 tokens of the prompt and"),
        ({"messages": []}, 400, "at least one"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "must be text"),
        ({"response_format": {"type": "nothing"}}, 400, "response_format must be"),
        ({"response_format": {"schema": PERSON}}, 400, "response_format must be"),
        ({"response_format": response_format(None)}, 400, "json_schema with a schema"),
        (
            {"structured_outputs": {"json_object": "no"}},
            400,
            "json_object must be true or false, got 'no'",
        ),
        ({"structured_outputs": {"json_object": 0}}, 400, "json_object must be true or false"),
        ({"guided_json_object": "false"}, 400, "guided_json_object must be true or false"),
        ({"guided_json": {"schema": PERSON}}, 400, "this is OpenAI's response_format"),
        (
            {"response_format": response_format({"type": "string", "not": {"format": "email"}})},
            400,
            "#: not",
        ),
        (
            {"response_format": response_format({"description": "x" * 5000})},
            400,
            "Limits.grammar_bytes",
        ),
        (
            {"response_format": response_format(PERSON), "structured_outputs": {"regex": "a"}},
            400,
            "response_format and regex",
        ),
        ({"structured_outputs": {}}, 400, "structured_outputs must have one of"),
        ({"structured_outputs": {"json": None}}, 400, "structured_outputs must have one of"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, 400, "key 'whitespace_pattern'"),
        (
            {"structured_outputs": {"structural_tag": "{"}},
            400,
            "structural tag: the text is not JSON",
        ),
        ({"tools": TOOLS * 2}, 400, "two functions are named 'town'"),
        (
            {"tools": [*TOOLS, {"type": "custom", "custom": {"name": "x"}}]},
            400,
            "tools[2].type must be function, got 'custom'",
        ),
        ({"enable_thinking": False}, 400, "must be a key of chat_template_kwargs, got False"),
        ({"functions": [{"name": "f"}]}, 400, "functions can only be [] (use tools), got"),
        ({"tool_choice": "required"}, 400, "requires tools"),
        ({"messages": [{"role": "user", "content": "x" * 30_000}]}, 413, "longer than 20000 bytes"),
        (
            {"logit_bias": {str(i): 0 for i in range(1500)}},
            400,
            "logit_bias has 1500 ids, more than",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_server_rejects_invalid_requests(client, fields, status, words, stream):
    """An invalid request gets an HTTP error status and a message that names the invalid field.

    This also applies if a streamed response is requested.
    """
    with pytest.raises(openai.APIStatusError, match=re.escape(words)) as caught:
        chat(client, **fields, stream=stream)
    assert caught.value.status_code == status
    assert "partial" not in str(caught.value)
    assert caught.value.body["type"] == "invalid_request_error"
    assert status == 413 or caught.value.body["param"] in fields


def test_completions_limit_number_of_prompts_times_samples(client):
    with pytest.raises(openai.BadRequestError, match="at most 128 choices, got 256"):
        client.completions.create(model="demo", prompt=["a"] * 64, n=4)


def test_api_priority_is_inverted_for_the_engine(server):
    """In the API, as in vLLM, the lowest value runs first; in the engine, the highest value."""
    body = CompletionRequest(prompt="a", priority=-7)
    [request] = server.service.parser.parse(body, None).requests
    assert request.priority == 7


def test_server_authentication_models_health_and_metrics(engine, server, client, http):
    """The server refuses requests with a wrong key, an unknown path or invalid JSON.

    It also refuses requests above the queue limit. The metrics count refused requests and drafts.
    """
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="other").models.list()
    assert [model.id for model in client.with_options(api_key="other key").models.list()] == [
        "demo"
    ]
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").id == "demo"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    root = server.url.removesuffix("/v1")
    key = {"authorization": "Bearer key", "content-type": "application/json"}
    for path, status in (("/v1/chat/completions", 405), ("/v2", 404), ("/health", 200)):
        assert http.get(root + path).status_code == status
    for body in ("{", "[]", "[" * 10_000, '{"messages": 1e999}'):
        response = http.post(f"{server.url}/chat/completions", content=body, headers=key)
        assert response.status_code == 400
        assert response.json()["error"]["message"]
    with pytest.raises(openai.RateLimitError, match="100 requests are already waiting"):
        chat(client, n=128)
    wait_for(lambda: not engine.busy)
    page = http.get(f"{root}/metrics").text
    assert 'graft_up{replica="0"} 1.0' in page
    assert 'graft_pages{replica="0"} 0.0' in page
    descriptions = re.findall(r"^# HELP (\w+) (.*)", page, re.M)
    assert len(descriptions) > 15
    assert all(text.endswith(".") and " " in text for _, text in descriptions)
    assert 'graft_drafts_accepted_total{position="0",replica="0"}' in page
    assert 'graft_rounds_by_kind_total{kind="host",replica="0"}' in page
    assert 'graft_requests_total{reason="refused"}' in page
