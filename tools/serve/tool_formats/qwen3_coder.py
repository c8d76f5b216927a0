"""The notation of Qwen3-Coder: XML tags for the function and for each of its arguments.

Strings are written between the tags without quotes or escapes, all other values as JSON. A string
that must satisfy keywords such as ``pattern`` is written as JSON, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from graft.tools.serve.tool_calls import ToolChoice
from graft.tools.serve.tool_formats.base import (
    Format,
    ToolFormat,
    check_names,
    const,
    free_text_with,
    json_format,
    one_of,
    sequence,
    some_calls,
    tag,
)
from graft.tools.serve.tool_formats.parameters import Parameter, is_plain, read_parameters
from graft.tools.serve.tool_formats.source import Arguments, CallBegin, CallEnd, Steps, TextSource

__all__ = ["Qwen3Coder"]

_BEGIN = "<tool_call>"
_END = "</function>\n</tool_call>"
_VALUE_END = "\n</parameter>"
_SEPARATOR = "\n"
#: Names of parameters that can be written in a tag.
_KEY = re.compile(r"[^<>\r\n]+")


class Qwen3Coder(ToolFormat):
    """Calls in XML tags."""

    name = "qwen3_coder"
    markers = (_BEGIN, "</tool_call>")

    def text_with_calls(self, tools: ToolChoice) -> Format:
        return free_text_with([_BEGIN], _calls(tools), tools)

    def calls(self, tools: ToolChoice) -> Format:
        return some_calls(_calls(tools), _SEPARATOR, tools)

    def parse(self, source: TextSource, tools: ToolChoice) -> Steps[None]:
        functions = {f"\n<function={function['name']}>\n": function for function in tools.functions}
        separator = ""
        while True:
            yield from source.content_until([_BEGIN], separator)
            function = functions[(yield from source.expect(*functions))]
            yield CallBegin(function["name"])
            yield from _parse_arguments(source, read_parameters(function, self.name, _KEY))
            yield CallEnd()
            separator = _SEPARATOR


def _calls(tools: ToolChoice) -> list[Format]:
    check_names(tools, Qwen3Coder.name)
    return [_call(function) for function in tools.functions]


def _call(function: Mapping[str, Any]) -> Format:
    begin = f"{_BEGIN}\n<function={function['name']}>\n"
    parameters = []
    for parameter in read_parameters(function, Qwen3Coder.name, _KEY):
        value = tag(_value_begin(parameter), _value_format(parameter), _VALUE_END)
        section = sequence(value, const("\n"))
        if not parameter.required:
            section = {"type": "optional", "content": section}
        parameters.append(section)
    return tag(begin, sequence(*parameters) if parameters else const(""), _END)


def _value_begin(parameter: Parameter) -> str:
    return f"<parameter={parameter.key}>\n"


def _is_text(parameter: Parameter) -> bool:
    """Return whether a parameter's schema allows all strings, and no other value but possibly null.

    Any text is then a valid value. If null is allowed, the text ``null`` means null.
    """
    types = parameter.alternatives
    texts = [one for one in types if is_plain(one, "string")]
    return bool(texts) and all(one in texts or is_plain(one, "null") for one in types)


def _texts(parameter: Parameter) -> list[str] | None:
    """Return the strings that a parameter's ``enum`` lists, which are written without quotes.

    Return None if the schema is not an enumeration of strings, or if one of them contains the tag
    that ends a value.
    """
    texts = parameter.texts
    return None if texts is None or any(_VALUE_END in text for text in texts) else texts


def _value_format(parameter: Parameter) -> Format:
    if _is_text(parameter):
        return {"type": "any_text"}
    texts = _texts(parameter)
    if texts is not None:
        return one_of([const(text) for text in texts])
    return json_format(parameter.schema, parameter.place, strict=parameter.strict)


def _parse_arguments(source: TextSource, parameters: list[Parameter]) -> Steps[None]:
    by_begin = {_value_begin(parameter): parameter for parameter in parameters}
    separator = "{"
    while (begin := (yield from source.expect(*by_begin, _END))) != _END:
        parameter = by_begin[begin]
        yield Arguments(f"{separator}{json.dumps(parameter.key, ensure_ascii=False)}: ")
        separator = ", "
        is_text = _is_text(parameter)
        is_nullable = is_text and len(parameter.alternatives) > 1
        if is_nullable and (yield from source.match(f"null{_VALUE_END}")):
            yield Arguments("null")
        elif is_text or _texts(parameter) is not None:
            yield from source.quoted_text(_VALUE_END)
        else:
            yield from source.json_value()
            yield from source.expect(_VALUE_END)
        yield from source.expect("\n")
    yield Arguments("{}" if separator == "{" else "}")
