"""The notations of Llama 3.1, 3.2 and 3.3.

A call is a JSON object with ``name`` and ``parameters``. Several calls are separated by ``; ``. The
special token ``<|python_tag|>`` can precede the first call. Some prompts ask for another notation:
``<function=NAME>``, the arguments as JSON, and ``</function>``.
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
    free_text_with,
    one_of,
    read_json_call,
    sequence,
    some_calls,
    tag,
)
from graft.tools.serve.tool_formats.source import CallBegin, CallEnd, Steps, TextSource

__all__ = ["Llama3Json"]

_PYTHON_TAG = "<|python_tag|>"
_FUNCTION = "<function="
_FUNCTION_END = "</function>"
_SEPARATOR = "; "


class Llama3Json(ToolFormat):
    """Calls as JSON objects without tags."""

    name = "llama3_json"
    markers = (_PYTHON_TAG,)

    def text_with_calls(self, tools: ToolChoice) -> Format:
        """Return the structural format of free text with calls.

        Free text can contain other JSON. An object is a call only if it begins with the name of a
        function in `tools`.
        """
        tags = []
        triggers = [_PYTHON_TAG, _FUNCTION]
        for function in tools.functions:
            head = call_head(function, "parameters")
            arguments = arguments_format(function)
            triggers.append(head)
            tags += [
                tag(head, arguments, "}"),
                tag(f"{_PYTHON_TAG}{head}", arguments, "}"),
                tag(_function_tag(function), arguments, _FUNCTION_END),
            ]
        return free_text_with(triggers, tags, tools)

    def calls(self, tools: ToolChoice) -> Format:
        """Return the structural format of calls that begin with a tag.

        This format is an alternative to the output that the request's own grammar allows, which may
        be JSON too. The tag (``<|python_tag|>`` or ``<function=...>``) at the beginning
        distinguishes calls from such an output.
        """
        tagged = sequence(tag(_PYTHON_TAG, const(""), ""), _objects(tools))
        return one_of([tagged, _function_tags(tools)])

    def required_calls(self, tools: ToolChoice) -> Format:
        """Return the structural format of calls, which can also be JSON objects without a tag."""
        return one_of([_objects(tools), self.calls(tools)])

    def parse(self, source: TextSource, tools: ToolChoice) -> Steps[None]:
        names = {_function_tag(function): function["name"] for function in tools.functions}
        heads = {
            call_head(function, "parameters"): function["name"] for function in tools.functions
        }
        separator = ""
        while True:
            begin = yield from source.content_until([*heads, *names, _PYTHON_TAG], separator)
            if begin == _PYTHON_TAG:
                yield from read_json_call(source, "parameters")
            else:
                yield CallBegin(names.get(begin) or heads[begin])
                yield from source.json_value()
                yield CallEnd()
                yield from source.expect("}" if begin in heads else _FUNCTION_END)
            separator = _SEPARATOR


def _objects(tools: ToolChoice) -> Format:
    """Return the structural format of calls written as JSON objects without a tag."""
    tags = []
    for function in tools.functions:
        head = call_head(function, "parameters")
        tags.append(tag(head, arguments_format(function), "}"))
    return some_calls(tags, _SEPARATOR, tools)


def _function_tags(tools: ToolChoice) -> Format:
    """Return the structural format of calls written as ``<function=NAME>...</function>``."""
    tags = []
    for function in tools.functions:
        arguments = arguments_format(function)
        tags.append(tag(_function_tag(function), arguments, _FUNCTION_END))
    return some_calls(tags, _SEPARATOR, tools)


def _function_tag(function: Mapping[str, Any]) -> str:
    return f"{_FUNCTION}{function['name']}>"
