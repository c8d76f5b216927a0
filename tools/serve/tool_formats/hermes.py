"""The notation of the Hermes models, which Qwen2.5 and Qwen3 use too.

A call consists of three lines: ``<tool_call>``, a JSON object with ``name`` and ``arguments``, and
``</tool_call>``. If calls are required, they have no tags: the output is a JSON array of calls, or
a single object if parallel calls are not allowed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graft.tools.serve.tool_calls import ToolChoice
from graft.tools.serve.tool_formats.base import (
    Format,
    ToolFormat,
    arguments_format,
    call_head,
    const,
    read_json_call,
    sequence,
    some_calls,
    tag,
)
from graft.tools.serve.tool_formats.source import Steps, TextSource

__all__ = ["Hermes"]

_BEGIN = "<tool_call>"
_END = "</tool_call>"
_SEPARATOR = "\n"


class Hermes(ToolFormat):
    """Calls as JSON objects between the tags ``<tool_call>`` and ``</tool_call>``."""

    name = "hermes"
    markers = (_BEGIN, _END)

    def text_with_calls(self, tools: ToolChoice) -> Format:
        """Return the structural format of free text with calls, each between the tags."""
        tags = [_tagged(function, tools) for function in tools.functions]
        return {"type": "triggered_tags", "triggers": [_BEGIN], "tags": tags}

    def calls(self, tools: ToolChoice) -> Format:
        """Return the structural format of calls without free text, each between the tags."""
        tags = [_tagged(function, tools) for function in tools.functions]
        return some_calls(tags, _SEPARATOR, tools)

    def required_calls(self, tools: ToolChoice) -> Format:
        """Return the structural format of a JSON array of calls.

        If parallel calls are not allowed, the format is that of a single call without an array.
        """
        calls = some_calls([_object(function, tools) for function in tools.functions], ", ", tools)
        return sequence(const("["), calls, const("]")) if tools.is_array else calls

    def parse(self, source: TextSource, tools: ToolChoice) -> Steps[None]:
        if tools.required:
            yield from _parse_required(source, tools)
            return
        separator = ""
        while True:
            yield from source.content_until([_BEGIN], separator)
            yield from source.expect("\n")
            yield from read_json_call(source, "arguments")
            yield from source.expect(f"\n{_END}")
            separator = _SEPARATOR


def _parse_required(source: TextSource, tools: ToolChoice) -> Steps[None]:
    if tools.is_array:
        yield from source.expect("[")
    while True:
        source.mark()
        yield from read_json_call(source, "arguments")
        if not tools.is_array or (yield from source.expect(", ", "]")) == "]":
            return


def _object(function: Mapping[str, Any], tools: ToolChoice) -> Format:
    return tag(call_head(function, "arguments"), arguments_format(function, tools), "}")


def _tagged(function: Mapping[str, Any], tools: ToolChoice) -> Format:
    head = call_head(function, "arguments")
    return tag(f"{_BEGIN}\n{head}", arguments_format(function, tools), f"}}\n{_END}")
