"""Conversion of chat messages from OpenAI's format to the form that chat templates expect."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from graft.sampling.checks import short_repr
from graft.tools.serve.errors import ApiError

_ROLES = ("developer", "system", "user", "assistant", "tool", "function")
_TEXT_KEYS = ("name", "tool_call_id", "reasoning", "reasoning_content", "refusal")
#: Keys that have no meaning in a prompt. Clients send the server's messages back with these keys.
_IGNORED_KEYS = ("annotations", "parsed")
_KEYS = ("role", "content", "tool_calls", *_TEXT_KEYS, *_IGNORED_KEYS)
_CALL_KEYS = ("id", "type", "function", "index")
_FUNCTION_KEYS = ("name", "arguments", "parsed_arguments")


def read_messages(messages: Any, template: str | None = None) -> list[dict[str, Any]]:
    """Convert the messages of a request.

    The content parts of a message are joined into one text, and the arguments of its tool calls
    are parsed from JSON. The role "developer" is replaced by "system" unless the template has this
    role. Keys that are null and empty lists of tool calls are left out, because chat templates test
    whether a key is defined.

    Parameters
    ----------
    messages
        Messages of the request.
    template
        Source of the chat template. Messages can have roles and keys that occur in it.

    Raises
    ------
    ApiError
        If a message is invalid.
    """
    if not isinstance(messages, list) or not messages:
        raise ApiError("messages must be a list of at least one message", param="messages")
    return [_read_message(message, template or "") for message in messages]


def _read_message(message: Any, template: str) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ApiError(
            f"a message must be an object with a role, got {short_repr(message)}", param="messages"
        )
    given = {key: value for key, value in message.items() if value is not None}
    role = given["role"]
    if role not in _ROLES and not _has_role(template, role):
        raise ApiError(
            f"the role of a message must be one of {', '.join(_ROLES)}, got {short_repr(role)}",
            param="messages",
        )
    if role == "developer" and not _has_role(template, role):
        role = "system"
    unknown = [key for key in given if key not in _KEYS and not _has_key(template, key)]
    _refuse_unknown("a message", unknown)
    for key in _TEXT_KEYS:
        if not isinstance(given.get(key, ""), str):
            raise ApiError(
                f"{key} of a message must be a string, got {short_repr(given[key])}",
                param="messages",
            )
    refusal = given.pop("refusal", "")
    calls = given.pop("tool_calls", None)
    converted = {key: value for key, value in given.items() if key not in _IGNORED_KEYS}
    converted["role"] = role
    converted["content"] = _read_content(given.get("content", refusal))
    # The API has two names for reasoning, and templates use either one.
    reasoning = given.get("reasoning_content", given.get("reasoning"))
    if reasoning is not None:
        converted |= {"reasoning": reasoning, "reasoning_content": reasoning}
    if calls:
        if not isinstance(calls, list):
            raise ApiError(f"tool_calls must be a list, got {short_repr(calls)}", param="messages")
        converted["tool_calls"] = [_read_tool_call(call) for call in calls]
    return converted


def _has_role(template: str, role: str) -> bool:
    return f"'{role}'" in template or f'"{role}"' in template


def _has_key(template: str, key: str) -> bool:
    return re.search(rf"\b{re.escape(key)}\b", template) is not None


def _refuse_unknown(where: str, keys: Collection[Any]) -> None:
    if keys:
        raise ApiError(
            f"{where} has the key {short_repr(next(iter(keys)))}, which is unknown, or not "
            "supported",
            param="messages",
        )


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
    """Return a tool call with its arguments parsed from JSON; empty ones and null become ``{}``.

    Arguments that are an object instead of JSON text are not changed, as in vLLM.
    """
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError(
            f"a tool call must have a function with a name, got {short_repr(call)}",
            param="messages",
        )
    _refuse_unknown("a tool call", _unknown_keys(call, _CALL_KEYS))
    _refuse_unknown("the function of a tool call", _unknown_keys(function, _FUNCTION_KEYS))
    arguments = function.get("arguments")
    if not isinstance(arguments, dict):
        try:
            arguments = json.loads(arguments or "{}")
            arguments = {} if arguments is None else arguments
        except (TypeError, ValueError, RecursionError) as error:
            raise ApiError(
                f"the arguments of the tool call {function['name']!r} are not JSON: {error}",
                param="messages",
            ) from error
    converted = {key: call[key] for key in ("id", "type") if call.get(key) is not None}
    return converted | {"function": {"name": function["name"], "arguments": arguments}}


def _unknown_keys(value: Mapping[str, Any], known: Collection[str]) -> list[str]:
    """Return the keys of an object that are unknown and not null."""
    return [key for key in value if key not in known and value[key] is not None]
