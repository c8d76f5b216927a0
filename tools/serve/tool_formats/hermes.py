"""The notation of the Hermes models, which Qwen2.5 and Qwen3 use too.

A call consists of three lines: ``<tool_call>``, a JSON object with ``name`` and ``arguments``, and
``</tool_call>``.
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
    free_text_with,
    read_json_call,
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
        return free_text_with([_BEGIN], _calls(tools), tools)

    def calls(self, tools: ToolChoice) -> Format:
        return some_calls(_calls(tools), _SEPARATOR, tools)

    def parse(self, source: TextSource, tools: ToolChoice) -> Steps[None]:
        separator = ""
        while True:
            yield from source.content_until([_BEGIN], separator)
            yield from source.expect("\n")
            yield from read_json_call(source, "arguments")
            yield from source.expect(f"\n{_END}")
            separator = _SEPARATOR


def _calls(tools: ToolChoice) -> list[Format]:
    return [_call(function) for function in tools.functions]


def _call(function: Mapping[str, Any]) -> Format:
    head = call_head(function, "arguments")
    return tag(f"{_BEGIN}\n{head}", arguments_format(function), f"}}\n{_END}")
