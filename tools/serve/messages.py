"""Conversion of chat messages from OpenAI's format to the form that chat templates expect."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, FailFast, Field, StrictStr

from graft.native.errors import short_repr
from graft.tools.serve.errors import ApiError
from graft.tools.serve.fields import Fields, read_fields

_ROLES = ("developer", "system", "user", "assistant", "tool", "function")


class _CalledFunction(Fields):
    name: StrictStr
    arguments: Any = None
    parsed_arguments: Any = None


class _ToolCall(Fields):
    id: Any = None
    type: Any = None
    index: Any = None
    function: _CalledFunction

    def converted(self) -> dict[str, Any]:
        """Return the call with its arguments parsed from JSON.

        Empty arguments and null become ``{}``. Arguments that are an object instead of JSON text
        are not changed, as in vLLM.
        """
        arguments = self.function.arguments
        if not isinstance(arguments, dict):
            try:
                arguments = json.loads(arguments or "{}")
                arguments = {} if arguments is None else arguments
            except (TypeError, ValueError, RecursionError) as error:
                raise ApiError(
                    f"the arguments of the tool call {self.function.name!r} are not JSON: {error}",
                    param="messages",
                ) from error
        call = {"function": {"name": self.function.name, "arguments": arguments}}
        return {key: value for key, value in self if key in ("id", "type") and value} | call


class _Message(Fields):
    """A message. Clients may send the keys ``annotations`` and ``parsed``, which are ignored."""

    model_config = ConfigDict(extra="allow")  # for keys in the chat template, see `read_messages`

    role: StrictStr = Field(min_length=1)
    content: Any = None
    tool_calls: Annotated[
        list[_ToolCall], FailFast(), BeforeValidator(lambda calls: calls or [])
    ] = Field(default_factory=list)
    name: StrictStr | None = None
    tool_call_id: StrictStr | None = None
    reasoning: StrictStr | None = None
    reasoning_content: StrictStr | None = None
    refusal: StrictStr | None = None
    annotations: Any = None
    parsed: Any = None


class _Messages(Fields):
    messages: Annotated[list[_Message], FailFast()]


def read_messages(messages: Any, template: str | None = None) -> list[dict[str, Any]]:
    """Convert the messages of a request, or raise ApiError.

    The content parts of a message are joined into one text, and the arguments of its tool calls are
    parsed from JSON. The role "developer" is replaced by "system" unless the template has this
    role. A key whose value is null, and an empty list of tool calls, are left out, because chat
    templates test whether a key is defined. Messages can have roles and keys that occur in
    `template`, which is the source of the chat template.
    """
    if not isinstance(messages, list) or not messages:
        raise ApiError("messages must be a list of at least one message", param="messages")
    read = read_fields(_Messages, {"messages": messages}).messages
    return [_convert(message, template or "") for message in read]


def _convert(message: _Message, template: str) -> dict[str, Any]:
    role = message.role
    if role not in _ROLES and not _has_role(template, role):
        raise ApiError(
            f"the role of a message must be one of {', '.join(_ROLES)}, got {short_repr(role)}",
            param="messages",
        )
    if role == "developer" and not _has_role(template, role):
        role = "system"
    for key in message.model_extra or ():
        if not key or re.search(rf"\b{re.escape(key)}\b", template) is None:
            raise ApiError(
                f"a message has the key {short_repr(key)}, which is unknown, or not supported",
                param="messages",
            )
    converted: dict[str, Any] = {"role": role, "content": _read_content(message)}
    if message.name is not None:
        converted["name"] = message.name
    if message.tool_call_id is not None:
        converted["tool_call_id"] = message.tool_call_id
    converted |= message.model_extra or {}
    # Templates read the reasoning from one of two keys, so the message gets both.
    reasoning = message.reasoning
    if message.reasoning_content is not None:
        reasoning = message.reasoning_content
    if reasoning is not None:
        converted |= {"reasoning": reasoning, "reasoning_content": reasoning}
    if message.tool_calls:
        converted["tool_calls"] = [call.converted() for call in message.tool_calls]
    return converted


def _has_role(template: str, role: str) -> bool:
    return f"'{role}'" in template or f'"{role}"' in template


def _read_content(message: _Message) -> str:
    """Return the content of a message, which may be a list of parts, as one text."""
    content = message.content
    if content is None:
        content = message.refusal or ""
    parts = content if isinstance(content, list) else [{"text": content}]
    texts = []
    for part in parts:
        text = None
        if isinstance(part, dict):
            text = part.get("refusal" if part.get("type") == "refusal" else "text")
        if not isinstance(text, str):
            got = part if isinstance(content, list) else content
            raise ApiError(f"content must be text, got {short_repr(got)}", param="messages")
        texts.append(text)
    return "".join(texts)
