"""Helpers for tests of the fields of requests."""

from graft.models.request import Request
from graft.tools.serve.fields import read_fields
from graft.tools.serve.request_parser import ApiRequest
from graft.tools.serve.requests import ChatRequest
from graft.tools.serve.tool_calls import ToolChoice


def chat_request(**fields):
    """Return a chat completion request with the given fields."""
    return read_fields(ChatRequest, fields)


def chosen_tools(fields):
    """Return the functions that the model may call in a request."""
    return chat_request(**fields).chosen_tools


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
