"""Tests of the endpoint /v1/responses, and of the fields that OpenAI's helpers send."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest

from graft.models import Engine
from graft.models.request import Event, Output

for package in ("starlette", "uvicorn", "prometheus_client"):
    pytest.importorskip(package, reason="the extra serve is not installed")
openai = pytest.importorskip("openai", reason="the package openai is not installed")
pydantic = pytest.importorskip("pydantic", reason="the package pydantic is not installed")

from openai.types.responses import Response, ResponseStreamEvent  # noqa: E402
from request_util import api_request, chosen_tools  # noqa: E402
from scripted_model import Script, write_scripted_model  # noqa: E402
from serving_util import PERSON, PROMPT, chat, open_client, response_format, run_server  # noqa: E402

from graft.tools.serve.completion_writer import ResponseChoice  # noqa: E402
from graft.tools.serve.errors import ApiError  # noqa: E402
from graft.tools.serve.responses_request import to_chat  # noqa: E402
from graft.tools.serve.responses_writer import ResponsesWriter  # noqa: E402
from graft.tools.serve.tool_calls import ToolChoice  # noqa: E402


class Person(pydantic.BaseModel):
    """A person."""

    name: str
    age: int


PERSON_TOOL = {
    "type": "function",
    "name": "Person",
    "parameters": openai.pydantic_function_tool(Person)["function"]["parameters"],
    "strict": True,
}
OTHER_TOOL = {"type": "function", "name": "other", "parameters": {"type": "object"}}


def respond(client, **fields):
    """Send a request to /v1/responses. `fields` replace the default values of request fields."""
    extra = {key: fields.pop(key) for key in ("seed", "nonsense") if key in fields}
    defaults = {"model": "demo", "input": PROMPT, "temperature": 0}
    return client.responses.create(**defaults | fields, extra_body=extra)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "chat_options"),
    [
        ({}, {}),
        ({"max_output_tokens": 3}, {"max_tokens": 3}),
        (
            {"temperature": 1.5, "seed": 7, "top_p": 0.9},
            {"temperature": 1.5, "seed": 7, "top_p": 0.9},
        ),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": PERSON}}},
            {"response_format": response_format(PERSON)},
        ),
        (
            {
                "text": {"format": {"type": "json_object"}, "verbosity": "low"},
                "tools": [],
                "tool_choice": "auto",
            },
            {"response_format": {"type": "json_object"}},
        ),
        (
            {"instructions": "Extract.", "input": [{"role": "user", "content": PROMPT}]},
            {
                "messages": [
                    {"role": "system", "content": "Extract."},
                    {"role": "user", "content": PROMPT},
                ]
            },
        ),
    ],
)
def test_responses_equal_chat_completions(client, fields, chat_options, stream):
    """The text, usage and status of a response equal those of the chat completion."""
    expected = chat(client, **{"max_tokens": None} | chat_options)
    response = respond(client, **fields, stream=stream)
    if stream:
        events = list(response)
        response = events[-1].response
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(deltas) == response.output_text
        assert [event.sequence_number for event in events] == list(range(len(events)))
    [choice] = expected.choices
    assert response.output_text == choice.message.content
    assert response.usage.input_tokens == expected.usage.prompt_tokens
    assert response.usage.output_tokens == expected.usage.completion_tokens
    assert response.usage.total_tokens == expected.usage.total_tokens
    is_cut = choice.finish_reason == "length"
    assert response.status == ("incomplete" if is_cut else "completed")
    assert response.output[-1].status == response.status
    assert (response.incomplete_details is not None) == is_cut
    assert response.id.startswith("resp_")


def test_response_of_client_helpers_is_parsed(client):
    """`responses.parse` and `responses.stream` return the instance of a pydantic model."""
    fields = {"model": "demo", "input": PROMPT, "text_format": Person, "temperature": 0}
    expected = Person(name="Olga Novak", age=42)
    assert client.responses.parse(**fields).output_parsed == expected
    with client.responses.stream(**fields) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_parsed == expected
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "name": "Person"},
        {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": "Person"}],
        },
    ],
)
def test_response_has_tool_calls_whose_results_continue_the_conversation(client, choice):
    fields = {
        "model": "demo",
        "temperature": 0,
        "tools": [PERSON_TOOL, OTHER_TOOL],
        "tool_choice": choice,
    }
    with client.responses.stream(input=PROMPT, **fields) as stream:
        deltas = [e.delta for e in stream if e.type == "response.function_call_arguments.delta"]
        streamed = stream.get_final_response().output
    response = client.responses.parse(input=PROMPT, **fields)
    call = response.output[0]
    assert call.name in ("Person", "other")
    if choice != "required":
        assert [item.name for item in response.output] == ["Person"] * len(response.output)
        jsonschema.validate(json.loads(call.arguments), PERSON_TOOL["parameters"])
    assert [item.arguments for item in streamed] == [item.arguments for item in response.output]
    assert "".join(deltas) == "".join(item.arguments for item in streamed)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    turn = [{"role": "user", "content": PROMPT}, *response.output, result]
    assert respond(client, input=turn, max_output_tokens=4).status == "incomplete"


def write_response(parser, pieces, reason, **options):
    """Return the response and the events of its stream for a generated text.

    `options` are arguments of `api_request`.
    """
    request = api_request(stream=True, **options)
    text = "".join(pieces)
    tokens = parser.tokenizer.encode(text, special=False)
    output = Output("x/0", tokens=tokens or [0], text=text, reason=reason)
    writer = ResponsesWriter(request, "demo", ResponseChoice(request, 0, parser))
    messages = []
    for event in [Event("x", (), piece) for piece in pieces] + [Event("x", (), "", output)]:
        messages += writer.messages(0, event)
    messages += writer.last_messages()
    events = []
    for message in messages:
        kind, data = re.fullmatch("event: (.*)\ndata: (.*)\n\n", message).groups()
        events.append(json.loads(data))
        assert events[-1]["type"] == kind
    whole = ResponsesWriter(request, "demo", ResponseChoice(request, 0, parser)).body([output])
    return whole, events


CALL = '<tool_call>\n{"name": "f", "arguments": [1, {}]}\n</tool_call>'
TOOLS = ToolChoice([{"name": "f"}])


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize(
    ("text", "reason", "options", "expected", "status"),
    [
        ("", "stop", {}, [("message", "")], "completed"),
        (" \n", "length", {}, [("message", " \n")], "incomplete"),
        (
            f"so\n{CALL}\n{CALL}\nend",
            "stop",
            {"tools": TOOLS},
            [("message", "so\n"), ("f", "[1, {}]"), ("f", "[1, {}]"), ("message", "\nend")],
            "completed",
        ),
        (f"\n{CALL}\n", "stop", {"tools": TOOLS}, [("f", "[1, {}]")], "completed"),
        (CALL[:43], "length", {"tools": TOOLS}, [("f", "[1, ")], "incomplete"),
        (
            f"<think>a<b</think>\n{CALL}",
            "stop",
            {"tools": TOOLS, "reasoning": False},
            [("reasoning", "a<b"), ("f", "[1, {}]")],
            "completed",
        ),
        (
            "a</think>so",
            "stop",
            {"reasoning": True},
            [("reasoning", "a"), ("message", "so")],
            "completed",
        ),
        ("a<b", "length", {"reasoning": True}, [("reasoning", "a<b")], "incomplete"),
    ],
)
def test_output_items_and_events_follow_from_the_text(
    server, text, reason, options, expected, status, size
):
    """The items of a response and of its stream depend on the text, not on how it is divided.

    OpenAI's client can parse every event, and the deltas of an item concatenate to the item.
    """
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    response, events = write_response(server.service.parser, pieces, reason, **options)
    adapter = pydantic.TypeAdapter(ResponseStreamEvent)
    for event in events:
        adapter.validate_python(event)
    Response.model_validate(response)
    found = []
    for item in response["output"]:
        if item["type"] == "function_call":
            found.append((item["name"], item["arguments"]))
        else:
            found.append((item["type"], item["content"][0]["text"]))
    assert found == expected
    assert response["status"] == status
    assert [item["status"] for item in response["output"]] == (
        ["completed"] * (len(expected) - 1) + [status]
    )
    deltas = [""] * len(expected)
    for event in events:
        if event["type"].endswith(".delta"):
            deltas[event["output_index"]] += event["delta"]
    assert deltas == [text for _, text in expected]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert events[-1]["type"] == f"response.{status}"
    assert events[-1]["response"]["output"] == done

    def without_ids(items):
        return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in items]

    assert without_ids(done) == without_ids(response["output"])


def test_usage_counts_reasoning_tokens(server):
    parser = server.service.parser
    reasoning = len(parser.tokenizer.encode("a b</think>", special=False))
    response, _ = write_response(parser, ["a b</think>so it is"], "stop", reasoning=True)
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == reasoning
    response, _ = write_response(parser, ["so it is"], "stop")
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == 0


def test_log_probabilities_equal_those_of_chat_completions(client):
    expected = chat(client, logprobs=True, top_logprobs=2, max_tokens=4).choices[0].logprobs
    response = respond(
        client, include=["message.output_text.logprobs"], top_logprobs=2, max_output_tokens=4
    )
    [part] = response.output[0].content
    found = [token.model_dump() for token in part.logprobs]
    assert found == [token.model_dump() for token in expected.content]


def test_input_items_become_messages():
    request = to_chat(
        {
            "instructions": "Be brief.",
            "input": [
                {"role": "developer", "content": "Use tools."},
                {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                {
                    "type": "reasoning",
                    "id": "r",
                    "summary": [],
                    "content": [{"type": "reasoning_text", "text": "hm"}],
                },
                {
                    "type": "message",
                    "id": "m",
                    "role": "assistant",
                    "status": "completed",
                    "content": [{"type": "output_text", "text": "so", "annotations": []}],
                },
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "1", "output": "one"},
                {
                    "type": "function_call_output",
                    "call_id": "2",
                    "output": [{"type": "input_text", "text": "two"}],
                },
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
                {"type": "function_call", "call_id": "3", "name": "f", "arguments": "{}"},
            ],
        },
        "demo",
    )
    calls = [
        {"id": str(number), "type": "function", "function": {"name": name, "arguments": "{}"}}
        for number, name in enumerate("fgf", 1)
    ]
    assert request.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": "Use tools."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "so", "reasoning_content": "hm", "tool_calls": calls[:2]},
        {"role": "tool", "tool_call_id": "1", "content": "one"},
        {"role": "tool", "tool_call_id": "2", "content": "two"},
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": calls[2:]},
    ]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"nonsense": 1}, "nonsense", "'nonsense' is unknown"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "stores no responses"),
        ({"store": True}, "store", "store can only be False, got True"),
        ({"background": True}, "background", "background can only be False"),
        ({"truncation": "auto"}, "truncation", "truncation can only be 'disabled'"),
        ({"input": []}, "input", "input must be a string or a list of items"),
        ({"input": [{"type": "item_reference", "id": "1"}]}, "input", "got 'item_reference'"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input",
            "content must be text",
        ),
        ({"input": [{"role": 1, "content": ""}]}, "input", "role"),
        ({"instructions": [1]}, "instructions", "instructions must be a string"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens must be"),
        ({"max_output_tokens": 5000}, "max_output_tokens", "max_output_tokens 5000, but"),
        ({"tools": [{"type": "web_search"}]}, "tools", "tools[0].type must be function, got"),
        ({"tool_choice": "required"}, "tool_choice", "requires tools"),
        (
            {"tools": [{"type": "function", "function": {"name": "f"}}]},
            "tools",
            "tools[0].name is missing",
        ),
        (
            {"tools": [PERSON_TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto"}},
            "tool_choice",
            "allowed_tools must have the mode auto or required, and tools",
        ),
        (
            {"tools": [PERSON_TOOL], "tool_choice": {"type": "function", "name": "x"}},
            "tool_choice",
            "names 'x', which is not a function",
        ),
        ({"text": {"format": {"type": "grammar"}}}, "text", "text.format must be text"),
        (
            {"text": {"format": {"type": "json_schema", "schema": {"type": "no"}, "name": "x"}}},
            "text",
            "must be a type of JSON",
        ),
        ({"text": {"verbosity": "loud"}}, "text", "verbosity must be low, medium, high"),
        (
            {"reasoning": {"level": 1}},
            "reasoning",
            "reasoning has the key 'level', which is unknown",
        ),
        ({"reasoning": {"effort": 1}}, "reasoning", "effort"),
        ({"include": ["file_search_call.results"]}, "include", "file_search_call.results"),
        ({"top_logprobs": 50}, "top_logprobs", "logprobs"),
        (
            {"top_logprobs": 1, "tools": [PERSON_TOOL]},
            "top_logprobs",
            "cannot be combined with tools or reasoning",
        ),
        ({"metadata": "x"}, "metadata", "metadata must be an object"),
    ],
)
def test_responses_refuse_invalid_requests(client, fields, param, words, stream):
    """An invalid request gets status 400, and a message with the names of this endpoint."""
    with pytest.raises(openai.BadRequestError, match=re.escape(words)) as caught:
        respond(client, **fields, stream=stream)
    assert caught.value.body["param"] == param
    assert not re.search("max_completion_tokens|max_tokens|messages", caught.value.body["message"])


NO_SCHEMA = {"type": "object", "properties": {"max_tokens": {"type": "no"}}}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": 5}, "the field 'max_tokens' belongs to chat completions; use max_output_"),
        ({"response_format": {"type": "text"}}, "'response_format' belongs to chat completions"),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": NO_SCHEMA}}},
            "#/properties/max_tokens: type: must be a type",
        ),
    ],
)
def test_responses_name_fields_of_chat_completions_as_given(client, fields, message):
    """Names that the client has written are not replaced with names of the Responses API."""
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="demo", input="x", extra_body=fields)
    assert message in caught.value.body["message"]


def test_input_tokens_are_those_of_the_response(client):
    fields = {"model": "demo", "instructions": "Be brief.", "input": PROMPT, "tools": [PERSON_TOOL]}
    count = client.responses.input_tokens.count(**fields)
    assert count.input_tokens == client.responses.create(**fields).usage.input_tokens
    with pytest.raises(openai.BadRequestError, match=r"got 'item_reference'") as caught:
        client.responses.input_tokens.count(model="demo", input=[{"type": "item_reference"}])
    assert caught.value.body["param"] == "input"


def test_responses_are_not_stored(client):
    for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError, match="the server stores no responses"):
            call("resp_1")
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="other").responses.retrieve("resp_1")


def test_error_during_stream_ends_it_with_failed_response(server):
    request = api_request(stream=True)
    choice = ResponseChoice(request, 0, server.service.parser)
    writer = ResponsesWriter(request, "demo", choice)
    list(writer.messages(0, Event("x", (), "so")))
    [message] = writer.error_messages(ApiError("the engine has failed", 503))
    event = json.loads(message.split("data: ")[1])
    pydantic.TypeAdapter(ResponseStreamEvent).validate_python(event)
    assert event["response"]["status"] == "failed"
    assert event["response"]["error"]["message"] == "the engine has failed"


# Chat completions ---------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools_limit_the_functions(mode):
    names = ["f", "g", "h"]
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    allowed = {"mode": mode, "tools": [tools[2], tools[0]]}
    fields = {"tools": tools, "tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}}
    choice = chosen_tools(fields)
    assert [function["name"] for function in choice.functions] == ["f", "h"]
    assert choice.required == (mode == "required")


def test_chat_accepts_fields_that_change_nothing(client):
    fields = {
        "functions": [],
        "function_call": "none",
        "verbosity": "low",
        "prediction": {"type": "content", "content": "x"},
        "prompt_cache_key": "key",
        "prompt_cache_retention": "24h",
        "safety_identifier": "user",
        "store": True,
        "metadata": {"a": "b"},
    }
    assert chat(client, **fields).choices == chat(client).choices
    for name, value in (
        ("functions", [{"name": "f"}]),
        ("function_call", "auto"),
        ("verbosity", "loud"),
        ("prompt_cache_key", 1),
        ("safety_identifier", ["user"]),
        ("store", "yes"),
    ):
        with pytest.raises(openai.BadRequestError, match=name) as caught:
            chat(client, **{name: value})
        assert caught.value.body["param"] == name


@pytest.mark.parametrize(
    "fields", [{}, {"max_tokens": 1}, {"response_format": response_format(PERSON)}]
)
def test_last_chunk_of_a_chat_has_the_finish_reason_and_no_text(client, fields):
    chunks = [chunk.choices[0] for chunk in chat(client, stream=True, **fields)]
    [choice] = chat(client, **fields).choices
    assert "".join(chunk.delta.content or "" for chunk in chunks[:-1]) == choice.message.content
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].delta.model_dump(exclude_unset=True) == {}
    assert chunks[-1].finish_reason == choice.finish_reason


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
def test_chat_helpers_of_the_client_work_and_their_messages_continue_the_chat(client):
    """Messages that the helpers return have additional fields, such as ``parsed``."""
    tool = openai.pydantic_function_tool(Person)
    user = {"role": "user", "content": PROMPT}
    fields = {"model": "demo", "messages": [user], "temperature": 0}
    expected = Person(name="Olga Novak", age=42)
    with client.chat.completions.stream(**fields, response_format=Person) as stream:
        assert {event.type for event in stream} == {"chunk", "content.delta", "content.done"}
        streamed = stream.get_final_completion().choices[0].message
    parsed = client.chat.completions.parse(**fields, response_format=Person).choices[0].message
    assert streamed.parsed == parsed.parsed == expected
    called = client.chat.completions.parse(**fields, tools=[tool], tool_choice="required")
    with client.chat.completions.stream(**fields, tools=[tool], tool_choice="required") as stream:
        streamed_call = stream.get_final_completion().choices[0].message
    [call] = called.choices[0].message.tool_calls
    assert call.function.parsed_arguments == expected
    assert streamed_call.tool_calls[0].function.parsed_arguments == expected
    result = {"role": "tool", "tool_call_id": call.id, "content": "done"}
    for message in (parsed, streamed, called.choices[0].message, streamed_call):
        results = [result] if message.tool_calls else []
        for form in (message, message.model_dump()):
            assert chat(client, messages=[user, form, *results, user], max_tokens=1).choices


# A reasoning model --------------------------------------------------------------------------------

TOWN = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOWN_TOOL = {"type": "function", "name": "town", "parameters": TOWN, "strict": True}
TOWN_CALL = '<tool_call>\n{"name": "town", "arguments": {"city": "Žilina"}}\n</tool_call>'
SCRIPTS = {
    "text": Script("<think>hm 👍</think>\n\nŽilina, of course"),
    "call": Script(f"<think>hm</think>\n\nWell.\n{TOWN_CALL}"),
    "json": Script('<think>JSON?</think>{"name": "Ève", "age": 7}'),
    "plain": Script("Just text"),
}


@pytest.fixture(scope="module")
def thinker(tmp_path_factory):
    """Return OpenAI's client of a server with a reasoning model, whose drafter is the model."""
    added = dict.fromkeys(("<think>", "</think>", "<tool_call>", "</tool_call>"), False)
    folder = write_scripted_model(tmp_path_factory.mktemp("scripted"), SCRIPTS, added=added)
    with (
        Engine(folder, folder, max_batch_size=2, max_length=512) as engine,
        run_server(engine, reasoning_parser="qwen3") as server,
        open_client(server.url) as client,
    ):
        yield client


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("script", "fields", "expected"),
    [
        ("text", {}, [("reasoning", "hm 👍"), ("message", "Žilina, of course")]),
        ("plain", {}, [("message", "Just text")]),
        (
            "call",
            {"tools": [TOWN_TOOL]},
            [("reasoning", "hm"), ("message", "Well."), ("town", '{"city": "Žilina"}')],
        ),
        (
            "call",
            {"tools": [TOWN_TOOL], "tool_choice": "required"},
            [("reasoning", "hm"), ("town", '{"city": "Žilina"}')],
        ),
        (
            "json",
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": PERSON}}},
            [("reasoning", "JSON?"), ("message", '{"name": "Ève", "age": 7}')],
        ),
        ("text", {"max_output_tokens": 2}, [("reasoning", None)]),
    ],
)
@pytest.mark.full("fields2-expected2-False", "fields3-expected3-False", "fields4-expected4-False")
def test_reasoning_model_has_items_for_reasoning_text_and_calls(
    thinker, script, fields, expected, stream
):
    response = respond(thinker, input=f"<script:{script}>", **fields, stream=stream)
    if stream:
        response = list(response)[-1].response
    found = []
    for item in response.output:
        if item.type == "function_call":
            found.append((item.name, item.arguments))
        else:
            found.append((item.type, item.content[0].text.strip()))
    is_cut = expected[-1][1] is None
    assert [kind for kind, _ in found] == [kind for kind, _ in expected]
    assert is_cut or found == expected
    assert response.status == ("incomplete" if is_cut else "completed")
    details = response.usage.output_tokens_details
    assert (details.reasoning_tokens > 0) == (script != "plain")
    assert details.reasoning_tokens <= response.usage.output_tokens
    # The client sends the output back unchanged as a part of the conversation.
    turn = [{"role": "user", "content": "hi"}, *response.output]
    for item in response.output:
        if item.type == "function_call":
            result = {"type": "function_call_output", "call_id": item.call_id, "output": "done"}
            turn.append(result)
    turn.append({"role": "user", "content": "<script:plain>"})
    assert respond(thinker, input=turn).output_text == "Just text"
