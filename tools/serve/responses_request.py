"""Requests of ``/v1/responses``, and their conversion to chat completions.

A request is converted to the fields of a chat completion, so that prompts, grammars and tools work
in the same way. The server stores no responses.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, FailFast, Field, StrictBool, StrictInt, StrictStr

from graft.native.errors import short_repr
from graft.tools.serve.errors import ApiError
from graft.tools.serve.fields import Fields, only, read_fields, rule_error
from graft.tools.serve.requests import ChatRequest, GenerationFields, TemplateFields

_INCLUDE_LOGPROBS = "message.output_text.logprobs"
#: Values of the field ``include``. A request for encrypted reasoning has no effect, because
#: reasoning is always returned as plain text.
_Included = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]
_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
#: Maps fields of chat completions to the fields of ``/v1/responses`` with the same meaning.
_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "verbosity": "text.verbosity",
    "reasoning_effort": "reasoning.effort",
}
#: Matches names of fields in error messages, but not in quotes or in the path of a schema.
_NAME_IN_MESSAGE = re.compile(
    r"(?<![\w'\"/])(?:max_completion_tokens|max_tokens|response_format|reasoning_effort)(?![\w'\"/])"
)


class _TextOptions(Fields):
    format: Any = None
    verbosity: Any = None


class _ReasoningOptions(Fields):
    effort: Any = None
    summary: Any = None
    generate_summary: Any = None


class _StreamOptions(Fields):
    include_obfuscation: StrictBool = False  # has no effect


class _FunctionTool(Fields):
    model_config = ConfigDict(extra="allow")  # name, parameters, ...: see `requests.Function`

    type: Literal["function"]


def _not_stored(_value: Any) -> None:
    raise rule_error(
        "is not supported, because the server stores no responses; send the whole conversation in "
        "input"
    )


class ResponsesRequest(GenerationFields, TemplateFields):
    """A request of ``/v1/responses``.

    Values of type ``Any`` are checked when the request is converted to a chat completion.
    """

    input: Any = None
    instructions: StrictStr | None = None
    max_output_tokens: Any = None
    text: _TextOptions = _TextOptions()
    tools: Annotated[list[_FunctionTool] | None, FailFast()] = None
    tool_choice: Any = None
    reasoning: _ReasoningOptions = _ReasoningOptions()
    include: Annotated[list[_Included], FailFast()] = Field(default_factory=list)
    top_logprobs: Any = None
    stream_options: _StreamOptions | None = None
    #: Has no effect, because it limits only calls of OpenAI's built-in tools.
    max_tool_calls: StrictInt | None = Field(None, ge=0, le=2**63 - 1)
    background: Annotated[Any, only(False)] = False
    store: Annotated[Any, only(False)] = False
    truncation: Annotated[Any, only("disabled")] = "disabled"
    previous_response_id: Annotated[Any, BeforeValidator(_not_stored)] = None
    conversation: Annotated[Any, BeforeValidator(_not_stored)] = None
    prompt: Annotated[Any, BeforeValidator(_not_stored)] = None


_SHARED_FIELDS = GenerationFields.model_fields.keys() | TemplateFields.model_fields.keys()


def to_chat(fields: Mapping[str, Any], served: str) -> ChatRequest:
    """Convert a request for the language model `served` to a chat completion, or raise ApiError."""
    for name, name_here in _NAMES.items():
        if fields.get(name) is not None:
            raise ApiError(
                f"the field {name!r} belongs to chat completions; use {name_here}", param=name
            )
    given = read_fields(ResponsesRequest, fields, served)
    chat = {name: fields[name] for name in _SHARED_FIELDS & given.model_fields_set}
    chat["messages"] = _read_input(given.input, given.instructions)
    chat["max_completion_tokens"] = given.max_output_tokens
    if given.text.format is not None:
        chat["response_format"] = _response_format(given.text.format)
    chat["verbosity"] = given.text.verbosity
    if given.tools is not None:
        tools = []
        for tool in given.tools:
            tools.append({"type": "function", "function": tool.model_extra})
        chat["tools"] = tools
    if given.tools or given.tool_choice != "auto":  # some clients send auto without tools
        chat["tool_choice"] = _read_tool_choice(given.tool_choice)
    chat["reasoning_effort"] = given.reasoning.effort
    if _INCLUDE_LOGPROBS in given.include or given.top_logprobs:
        chat |= {"logprobs": True, "top_logprobs": given.top_logprobs}
    return read_fields(ChatRequest, chat, served)


def rename_error(error: ApiError) -> ApiError:
    """Return an error that names fields of ``/v1/responses`` instead of a chat completion."""
    message = _NAME_IN_MESSAGE.sub(lambda found: _NAMES[found[0]], str(error))
    message = re.sub(r"^(tools\[\d+\])\.function\b", r"\1", message)
    param = error.param and _NAMES.get(error.param, error.param).partition(".")[0]
    return ApiError(message, error.status, param=param, code=error.code)


def _response_format(form: Any) -> dict[str, Any]:
    """Convert ``text.format`` to ``response_format``."""
    kind = form.get("type") if isinstance(form, dict) else None
    if kind == "json_schema":
        definition = {key: value for key, value in form.items() if key != "type"}
        return {"type": kind, "json_schema": definition}
    if kind in ("text", "json_object"):
        return {"type": kind}
    raise ApiError(
        f"text.format must be text, json_object or json_schema, got {short_repr(form)}",
        param="text",
    )


def _read_tool_choice(choice: Any) -> Any:
    """Convert ``tool_choice`` to the form of chat completions.

    Chat completions nest the name of a function in an object ``function``; ``/v1/responses`` does
    not.
    """
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if choice.get("type") == "allowed_tools":
        tools = choice.get("tools")
        if isinstance(tools, list):
            tools = [_read_tool_choice(tool) for tool in tools]
        allowed = {"mode": choice.get("mode"), "tools": tools}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    return choice


# Input items --------------------------------------------------------------------------------------


def _read_input(items: Any, instructions: Any) -> list[dict[str, Any]]:
    """Return the messages of a chat for the fields ``input`` and ``instructions``."""
    messages: list[dict[str, Any]] = []
    if instructions is not None:
        if not isinstance(instructions, str):
            raise ApiError(
                f"instructions must be a string, got {short_repr(instructions)}",
                param="instructions",
            )
        messages.append({"role": "system", "content": instructions})
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    if not isinstance(items, list) or not items:
        raise ApiError(
            f"input must be a string or a list of items, got {short_repr(items)}", param="input"
        )
    reasoning = ""
    for item in items:
        if not isinstance(item, dict):
            raise ApiError(
                f"an input item must be an object, got {short_repr(item)}", param="input"
            )
        kind = item.get("type", "message")
        if kind == "reasoning":
            reasoning += _read_reasoning(item)
            continue
        if kind == "function_call":
            _append_call(messages, item, reasoning)
        elif kind == "function_call_output":
            if item.get("call_id") is not None:
                _check_strings(item, "call_id")
            output = _read_texts(item.get("output"))
            tool = {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
            messages.append(tool)
        elif kind == "message":
            _check_strings(item, "role")
            message = {"role": item.get("role"), "content": _read_texts(item.get("content"))}
            if item.get("role") == "assistant" and reasoning:
                message["reasoning_content"] = reasoning
            messages.append(message)
        else:
            raise ApiError(
                "an input item must be a message, function_call, function_call_output or "
                f"reasoning, got {short_repr(kind)}",
                param="input",
            )
        reasoning = ""
    return messages


def _check_strings(item: Mapping[str, Any], *keys: str) -> None:
    for key in keys:
        if not isinstance(item.get(key), str):
            kind = item.get("type", "message")
            raise ApiError(
                f"a {kind} must have the string {key}, got {short_repr(dict(item))}", param="input"
            )


def _append_call(messages: list[dict[str, Any]], item: Mapping[str, Any], reasoning: str) -> None:
    """Add a function call to the message of the assistant that precedes it, or to a new message."""
    _check_strings(item, "call_id", "name", "arguments")
    if reasoning or not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
        if reasoning:
            messages[-1]["reasoning_content"] = reasoning
    function = {"name": item["name"], "arguments": item["arguments"]}
    call = {"id": item["call_id"], "type": "function", "function": function}
    messages[-1].setdefault("tool_calls", []).append(call)


def _read_reasoning(item: Mapping[str, Any]) -> str:
    """Return the text of a reasoning item: its content, or its summary if it has no content."""
    for key in ("content", "summary"):
        if item.get(key):
            return _read_texts(item[key])
    return ""


def _read_texts(content: Any) -> str:
    """Return the text of the field ``content``, which is a string or a list of parts."""
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type") if isinstance(part, dict) else None
        text = None
        if kind in _TEXT_PARTS:
            text = part.get("text")
        elif kind == "refusal":
            text = part.get("refusal")
        if not isinstance(text, str):
            raise ApiError(f"content must be text, got {short_repr(part)}", param="input")
        texts.append(text)
    return "".join(texts)
