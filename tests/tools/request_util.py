"""Helpers for tests of the fields of requests."""

from graft.models.request import Request
from graft.tools.serve.fields import read_fields
from graft.tools.serve.request_parser import ApiRequest
from graft.tools.serve.requests import ChatRequest
from graft.tools.serve.tool_calls import ToolChoice

#: A schema with a reference to a definition.
TOWN = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/c"}},
    "required": ["city"],
    "$defs": {"c": {"type": "string", "pattern": "^[A-Z][a-z]{2,7}$"}},
    "additionalProperties": False,
}


def chat_request(**fields):
    """Return a chat completion request with the given fields."""
    return read_fields(ChatRequest, fields)


def chosen_tools(fields):
    """Return the functions that the model may call in a request."""
    return chat_request(**fields).chosen_tools


def feed_calls(parser, pieces):
    """Feed the pieces of an output to a tool call parser, and return its content and its calls.

    The calls are pairs of name and arguments. Those of the stream equal those of `parser.calls`.
    """
    content = ""
    streamed = {}
    for i, piece in enumerate(pieces):
        more, deltas = parser.feed(piece, i == len(pieces) - 1)
        content += more
        assert len({delta["index"] for delta in deltas}) == len(deltas)
        for delta in deltas:
            name, arguments = streamed.get(delta["index"], ("", ""))
            function = delta["function"]
            name += function.get("name", "")
            streamed[delta["index"]] = (name, arguments + function["arguments"])
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in parser.calls]
    assert list(streamed.values()) == calls and list(streamed) == list(range(len(calls)))
    return content, calls


def api_request(tools=None, reasoning=None, **fields):
    """Return the API request of a chat with one prompt.

    `tools` is a `ToolChoice`, and `reasoning` says whether the output starts within a reasoning
    section.
    """
    tools = tools or ToolChoice([])
    if tools.functions:
        fields["tools"] = [{"function": function} for function in tools.functions]
        fields["tool_choice"] = "required" if tools.required else "auto"
        fields["parallel_tool_calls"] = tools.parallel
    body = chat_request(**fields)
    return ApiRequest("chatcmpl-1", body, [Request(tokens=[1])], [[1]], reasoning=[reasoning])
