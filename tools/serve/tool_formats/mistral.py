"""The notations of Mistral's models.

There are two notations:

* ``[TOOL_CALLS]`` and a JSON array of objects with ``name`` and ``arguments``. A space may precede
  the array. An object may also have an ``id`` of nine letters and digits, because the chat template
  of Mistral 7B v0.3 renders earlier calls with their ids.
* For each call, ``[TOOL_CALLS]``, the name of the function, and the arguments. ``[ARGS]`` may
  precede the arguments. Models since 2025 use this notation.

``[TOOL_CALLS]`` and ``[ARGS]`` are special tokens of the models.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import Any

from graft.tools.serve.tool_calls import ToolChoice
from graft.tools.serve.tool_formats.base import (
    Format,
    ToolFormat,
    arguments_format,
    call_head,
    check_names,
    const,
    free_text_with,
    one_of,
    read_json_call,
    sequence,
    some_calls,
    tag,
)
from graft.tools.serve.tool_formats.source import CallBegin, CallEnd, Mismatch, Steps, TextSource

__all__ = ["Mistral"]

_BEGIN = "[TOOL_CALLS]"
_ARGUMENTS = "[ARGS]"
_ID = ', "id": "'
_ARRAYS = (f"{_BEGIN}[", f"{_BEGIN} [")


class Mistral(ToolFormat):
    """Calls after ``[TOOL_CALLS]``."""

    name = "mistral"
    markers = (_BEGIN, _ARGUMENTS)

    def text_with_calls(self, tools: ToolChoice) -> Format:
        return free_text_with([_BEGIN], [*_arrays(tools), *_named_calls(tools)], tools)

    def calls(self, tools: ToolChoice) -> Format:
        return one_of([*_arrays(tools), some_calls(_named_calls(tools), "", tools)])

    def parse(self, source: TextSource, tools: ToolChoice) -> Steps[None]:
        names = [function["name"] for function in tools.functions]
        while True:
            yield from source.content_until([_BEGIN])
            following = yield from source.match("[", " [", *names)
            if following.endswith("["):
                yield from _parse_array(source)
            elif following:
                yield from source.match(_ARGUMENTS)
                yield CallBegin(following)
                yield from source.json_value()
                yield CallEnd()
            else:
                raise Mismatch

    def call_id(self, random_hex: str) -> str:
        """Return an id of nine letters and digits; Mistral's chat templates refuse all other ids.

        `random_hex` has 24 random hexadecimal digits.
        """
        return random_hex[:9]


def _parse_array(source: TextSource) -> Steps[None]:
    separator = ""
    while separator != "]":
        if separator:
            source.mark()
        end = yield from read_json_call(source, "arguments", ends=("}", _ID))
        if end == _ID:  # the response has another id, because a model may repeat ids
            while not (yield from source.match('"}')):
                source.take(1)
        separator = yield from source.expect(", ", "]")


def _arrays(tools: ToolChoice) -> list[Format]:
    # A pattern instead of the `or` would be refused: LLGuidance could not see where it ends.
    character = one_of([const(character) for character in string.ascii_letters + string.digits])
    call_id = {"type": "repeat", "min": 9, "max": 9, "content": character}
    end = one_of([const("}"), tag(_ID, call_id, '"}')])
    objects = []
    for function in tools.functions:
        content = sequence(arguments_format(function), end)
        objects.append(tag(call_head(function, "arguments"), content, ""))
    return [tag(begin, some_calls(objects, ", ", tools), "]") for begin in _ARRAYS]


def _named_calls(tools: ToolChoice) -> list[Format]:
    check_names(tools, Mistral.name)
    return [_named_call(function) for function in tools.functions]


def _named_call(function: Mapping[str, Any]) -> Format:
    marker = {"type": "optional", "content": tag(_ARGUMENTS, const(""), "")}
    content = sequence(marker, arguments_format(function))
    return tag(f"{_BEGIN}{function['name']}", content, "")
