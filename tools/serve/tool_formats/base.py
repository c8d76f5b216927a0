"""Base class of tool formats, and functions that build the structural formats they share."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from graft.tools.serve.errors import ApiError
from graft.tools.serve.tool_calls import ToolChoice
from graft.tools.serve.tool_formats.arguments import arguments_schema
from graft.tools.serve.tool_formats.source import CallBegin, CallEnd, Steps, TextSource

__all__ = [
    "NAME",
    "Format",
    "ToolFormat",
    "arguments_format",
    "call_head",
    "check_names",
    "const",
    "free_text_with",
    "is_strict",
    "json_format",
    "one_of",
    "read_json_call",
    "sequence",
    "some_calls",
    "tag",
]

#: A structural format: the ``format`` of XGrammar's structural tags, a JSON object that describes a
#: set of texts; see `graft.grammar.structural.formats`.
Format = dict[str, Any]
#: Function names that can be written without quotes.
NAME = re.compile(r"[\w.-]+")


class ToolFormat(ABC):
    """The notation in which a model writes calls.

    Each notation has a structural format, which constrains the output, and a parser of that output.

    Attributes
    ----------
    name
        Name of vLLM's parser of the notation.
    markers
        Texts of the notation that are special tokens of some tokenizers. By default, the engine
        omits special tokens from the text of an output. It includes these, so that the parser sees
        them.
    """

    name: ClassVar[str]
    markers: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def text_with_calls(self, tools: ToolChoice) -> Format:
        """Return the structural format of an output in which the model may call functions.

        The output is free text with any number of calls in it or, in some notations, either free
        text or calls. If parallel calls are not allowed, there is at most one call, and it ends the
        output.
        """

    @abstractmethod
    def calls(self, tools: ToolChoice) -> Format:
        """Return the structural format of calls without free text.

        If the model may call tools and the request also has a grammar, the output matches either
        this format or the grammar.
        """

    def required_calls(self, tools: ToolChoice) -> Format:
        """Return the structural format of an output that must consist of calls.

        No free text precedes the calls: a model that wants to end its text without a call would
        have to continue this text up to the maximum length.
        """
        return self.calls(tools)

    def output(self, tools: ToolChoice) -> Format:
        """Return the structural format of an output.

        The output consists of calls only if `tools` requires a call; otherwise, it is text that may
        contain calls.
        """
        return self.required_calls(tools) if tools.required else self.text_with_calls(tools)

    @abstractmethod
    def parse(self, source: TextSource, tools: ToolChoice) -> Steps[None]:
        """Yield the content and the calls of an output as events (`Content`, `CallBegin`, ...).

        Raise Mismatch if the output ends early, or matches neither the format that `output` returns
        nor the one that `calls` returns.
        """

    def call_id(self, random_hex: str) -> str:
        """Return the id of a call, given 24 random hexadecimal digits."""
        return f"call_{random_hex}"


def const(text: str) -> Format:
    """Return the structural format of the constant `text`."""
    return {"type": "const_string", "value": text}


def sequence(*elements: Format) -> Format:
    """Return the structural format of text that matches several formats one after the other."""
    return elements[0] if len(elements) == 1 else {"type": "sequence", "elements": [*elements]}


def one_of(elements: Sequence[Format]) -> Format:
    """Return the structural format of text that matches at least one of several formats."""
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": [*elements]}


def tag(begin: str, content: Format, end: str) -> Format:
    """Return the structural format of the text `begin`, the content, and the text `end`."""
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def free_text_with(triggers: Sequence[str], tags: Sequence[Format], tools: ToolChoice) -> Format:
    """Return the structural format of free text in which each trigger begins one of the calls.

    `tags` are the formats of a call to each function. If parallel calls are not allowed, the output
    ends after the first call.
    """
    return {
        "type": "triggered_tags",
        "triggers": [*triggers],
        "tags": [*tags],
        "stop_after_first": not tools.parallel,
    }


def some_calls(tags: Sequence[Format], separator: str, tools: ToolChoice) -> Format:
    """Return the structural format of one call, or of several if parallel calls are allowed.

    `tags` are the formats of a call to each function. `separator` is the text between two calls.
    """
    return {
        "type": "tags_with_separator",
        "tags": [*tags],
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": not tools.parallel,
    }


def is_strict(function: Mapping[str, Any]) -> bool:
    """Return whether objects in a call's arguments may only have properties that the schema lists.

    Otherwise, they may have further properties unless the schema forbids them.
    """
    return bool(function.get("strict", True))


def arguments_format(function: Mapping[str, Any]) -> Format:
    """Return the structural format of a function's arguments as JSON.

    The schema of the arguments stays a separate document, so its references keep their meaning.
    """
    place = f"function {function['name']!r}: parameters"
    return json_format(arguments_schema(function), place, strict=is_strict(function))


def json_format(schema: Mapping[str, Any], place: str, *, strict: bool) -> Format:
    """Return the structural format of the JSON values that satisfy a schema.

    `place` names the schema in error messages.
    """
    return {"type": "json_schema", "json_schema": schema, "place": place, "strict": strict}


def call_head(function: Mapping[str, Any], arguments_key: str) -> str:
    """Return the text before the arguments in a call that is written as a JSON object."""
    name = json.dumps(function["name"], ensure_ascii=False)
    return f'{{"name": {name}, "{arguments_key}": '


def read_json_call(
    source: TextSource, arguments_key: str, ends: Sequence[str] = ("}",)
) -> Steps[str]:
    """Consume a call, a JSON object with name and arguments; yield both as events.

    One of `ends` follows the arguments; consume and return it.
    """
    yield from source.expect('{"name": ')
    name = yield from source.json_string()
    yield from source.expect(f', "{arguments_key}": ')
    yield CallBegin(name)
    yield from source.json_value()
    yield CallEnd()
    return (yield from source.expect(*ends))


def check_names(tools: ToolChoice, format_name: str) -> None:
    """Raise ApiError if the name of a function cannot be written without quotes.

    `format_name` is the name of the notation in the error message.
    """
    for function in tools.functions:
        if not NAME.fullmatch(function["name"]):
            raise ApiError(
                f"the tool-call format {format_name} cannot express the function name "
                f"{function['name']!r}: use letters, digits, '_', '.' and '-'",
                param="tools",
            )
