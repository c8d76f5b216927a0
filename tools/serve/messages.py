"""Conversion of chat messages from OpenAI's format to the form that chat templates expect."""

from __future__ import annotations

import json
from typing import Any

from graft.sampling.checks import short_repr
from graft.tools.serve.errors import ApiError


def read_messages(messages: Any) -> list[dict[str, Any]]:
    """Convert the messages of a request.

    The content parts of a message are joined into one text, the arguments of its tool calls are
    parsed from JSON, and the role "developer" is replaced by "system". Fields that are null and
    empty lists of tool calls are left out, because chat templates test whether a field is defined.

    Raises
    ------
    ApiError
        If a message is invalid.
    """
    if not isinstance(messages, list) or not messages:
        raise ApiError("messages must be a list of at least one message", param="messages")
    return [_read_message(message) for message in messages]


def _read_message(message: Any) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ApiError(
            f"a message must be an object with a role, got {short_repr(message)}", param="messages"
        )
    converted = {key: value for key, value in message.items() if value is not None}
    converted["content"] = _read_content(converted.get("content", ""))
    if message["role"] == "developer":
        converted["role"] = "system"
    tool_calls = converted.pop("tool_calls", None)
    if tool_calls:
        try:
            converted["tool_calls"] = [_read_tool_call(call) for call in tool_calls]
        except (TypeError, KeyError, ValueError) as error:
            raise ApiError(f"tool_calls cannot be read: {error}", param="messages") from error
    return converted


def _read_content(content: Any) -> str:
    """Return the content of a message, which may be a list of parts, as one text."""
    if isinstance(content, list):
        texts = []
        for part in content:
            if not isinstance(part, dict) or not isinstance(part.get("text"), str):
                raise ApiError(f"content must be text, got {short_repr(part)}", param="messages")
            texts.append(part["text"])
        return "".join(texts)
    if not isinstance(content, str):
        raise ApiError(f"content must be text, got {short_repr(content)}", param="messages")
    return content


def _read_tool_call(call: Any) -> dict[str, Any]:
    """Return a tool call with its arguments parsed from JSON; empty arguments become ``{}``.

    Arguments that are an object instead of JSON text are not changed, as in vLLM.
    """
    function = call["function"]
    arguments = function["arguments"]
    if not isinstance(arguments, dict):
        arguments = json.loads(arguments or "{}")
    return call | {"function": function | {"arguments": arguments}}
