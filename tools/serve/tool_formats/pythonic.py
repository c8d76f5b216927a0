"""The notation of Llama 3.2 and Llama 4 models that write calls as a list in Python.

The output is ``[name(key=value, ...), ...]``. The values ``True``, ``False``, ``None`` and strings
that need no escapes are written as in Python. All other values are written as JSON, including the
elements of arrays and objects.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from graft.tools.serve.tool_calls import ToolChoice
from graft.tools.serve.tool_formats.arguments import constraints
from graft.tools.serve.tool_formats.base import (
    Format,
    ToolFormat,
    check_names,
    const,
    json_format,
    one_of,
    sequence,
    some_calls,
    tag,
)
from graft.tools.serve.tool_formats.parameters import Parameter, is_plain, read_parameters, union
from graft.tools.serve.tool_formats.source import (
    Arguments,
    CallBegin,
    CallEnd,
    Content,
    Steps,
    TextSource,
)

__all__ = ["Pythonic"]

_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
#: Characters, besides the quote, that would need an escape in single quotes. A string with one of
#: them is generated as JSON.
_ESCAPED = ["\\", "\n", "\r"]


class Pythonic(ToolFormat):
    """Tool calls that the model writes as a Python list of function calls, such as ``[f(x=1)]``."""

    name = "pythonic"

    def text_with_calls(self, tools: ToolChoice) -> Format:
        """Return a structural format that allows calls, or text that begins differently."""
        begins = [f"[{begin}" for begin in _begins(tools)]
        return one_of([self.calls(tools), {"type": "any_text", "excluded_starts": begins}])

    def calls(self, tools: ToolChoice) -> Format:
        check_names(tools, self.name)
        calls = [_call(function) for function in tools.functions]
        return sequence(const("["), some_calls(calls, ", ", tools), const("]"))

    def parse(self, source: TextSource, tools: ToolChoice) -> Steps[None]:
        functions = _begins(tools)
        source.mark()
        begin = yield from source.match(*(f"[{begin}" for begin in functions))
        if not begin:
            source.call_text = None
            while True:
                if source.text:
                    yield Content(source.take(len(source.text)))
                yield from source.wait()
        begin = begin[1:]
        while True:
            function = functions[begin]
            yield CallBegin(function["name"])
            yield from _parse_arguments(source, read_parameters(function, self.name))
            yield CallEnd()
            if (yield from source.expect(", ", "]")) == "]":
                return
            source.mark()
            begin = yield from source.expect(*functions)


def _begins(tools: ToolChoice) -> dict[str, Mapping[str, Any]]:
    """Return a map from the text with which a call begins to the function that it calls."""
    return {f"{function['name']}(": function for function in tools.functions}


def _call(function: Mapping[str, Any]) -> Format:
    parameters = read_parameters(function, Pythonic.name)
    return tag(f"{function['name']}(", _arguments(parameters), ")")


def _arguments(parameters: list[Parameter]) -> Format:
    """Return the format of keyword arguments in the order of the parameters.

    No comma precedes the first argument of a call. Optional parameters can be missing, so the
    format has one alternative for each parameter that can come first.
    """
    alternatives = []
    for index, first in enumerate(parameters):
        rest = []
        for parameter in parameters[index + 1 :]:
            following = _argument(parameter, ", ")
            if not parameter.required:
                following = {"type": "optional", "content": following}
            rest.append(following)
        alternatives.append(sequence(_argument(first, ""), *rest))
        if first.required:
            return one_of(alternatives)
    if not alternatives:
        return const("")
    return {"type": "optional", "content": one_of(alternatives)}


def _argument(parameter: Parameter, separator: str) -> Format:
    return sequence(const(f"{separator}{parameter.key}="), _value(parameter))


def _value(parameter: Parameter) -> Format:
    """Return the format of an argument's value: a constant of Python, a text in quotes, or JSON."""
    options = []
    as_json = []
    for schema in parameter.alternatives:
        if is_plain(schema, "boolean"):
            options += [const("True"), const("False")]
        elif is_plain(schema, "null"):
            options.append(const("None"))
        else:
            as_json.append(schema)
            options += [const(text) for text in _listed_texts(schema)]
            if not constraints(schema):
                options += [const(text) for text in _CONSTANTS]
            if not constraints(schema) or is_plain(schema, "string"):
                options.append(tag("'", {"type": "any_text", "excludes": _ESCAPED}, "'"))
    if as_json:
        whole = len(as_json) == len(parameter.alternatives)
        schema = parameter.schema if whole else union(as_json)
        options.append(json_format(schema, parameter.place, strict=parameter.strict))
    return one_of(options)


def _listed_texts(schema: Mapping[str, Any]) -> list[str]:
    """Return the strings, booleans and nulls in ``enum`` or ``const`` as Python literals.

    Strings that would need escapes in a Python literal are left out. `_value` also allows every
    value of the schema as JSON, so the model can write these strings as JSON.
    """
    keywords = constraints(schema)
    keyword = "const" if "const" in keywords else "enum"
    is_text = schema.get("type") == "string"
    if keywords - {"type"} != {keyword} or ("type" in keywords and not is_text):
        return []
    values = [schema["const"]] if keyword == "const" else schema["enum"]
    texts = []
    for value in values if isinstance(values, list) else []:
        if isinstance(value, str) and not any(char in value for char in (*_ESCAPED, "'")):
            texts.append(f"'{value}'")
        elif not is_text and (value is None or isinstance(value, bool)):
            texts.append(str(value))
    return texts


def _parse_arguments(source: TextSource, parameters: list[Parameter]) -> Steps[None]:
    keys = {f"{parameter.key}=": parameter.key for parameter in parameters}
    separator = "{"
    key = yield from source.expect(*keys, ")")
    while key != ")":
        yield Arguments(f"{separator}{json.dumps(keys[key], ensure_ascii=False)}: ")
        separator = ", "
        first = yield from source.peek()
        if first in "TFN":
            yield Arguments(_CONSTANTS[(yield from source.expect(*_CONSTANTS))])
        elif first == "'":
            source.take(1)
            yield from source.quoted_text("'")
        else:
            yield from source.json_value()
        if (yield from source.expect(", ", ")")) == ")":
            break
        key = yield from source.expect(*keys)
    yield Arguments("{}" if separator == "{" else "}")
