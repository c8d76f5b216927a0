"""Calls of functions: the grammar that a request's tools make, and the calls in an answer's text.

A call is written as ``{"name": ..., "arguments": ...}``. Where a call is asked for, that is the
whole answer; where the model may call, calls stand in free text between `BEGIN` and `END`, as
models after Hermes write them.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from graft.tools.serve.errors import WireError

BEGIN = "<tool_call>"
END = "</tool_call>"
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*')
_DECODER = json.JSONDecoder()
_DATA = ("const", "enum", "default", "examples")  # what no reference stands in


def chosen(fields: Mapping[str, Any]) -> tuple[list[dict[str, Any]], str]:
    """The functions that the answer may call, and "auto" or "required".

    Raises
    ------
    WireError
        Naming what of ``tools`` or ``tool_choice`` does not fit.
    """
    tools = fields.get("tools", [])
    choice = fields.get("tool_choice", "auto")
    functions: dict[str, dict[str, Any]] = {}
    for tool in tools if isinstance(tools, list) else [tools]:
        function = tool.get("function") if isinstance(tool, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if function is None or not name or not isinstance(name, str):
            raise WireError("each tool must be a function with a name", param="tools")
        if name in functions:
            raise WireError(f"two functions are named {name!r}", param="tools")
        functions[name] = function
    if isinstance(choice, dict) and choice.get("type") == "function":
        wanted = choice.get("function")
        choice = wanted.get("name") if isinstance(wanted, dict) else None
        if not isinstance(choice, str) or choice not in functions:
            raise WireError(f"there is no tool {choice!r}", param="tool_choice")
        return [functions[choice]], "required"
    if choice not in ("none", "auto", "required"):
        raise WireError(f"tool_choice cannot be {choice!r}", param="tool_choice")
    if choice == "required" and not functions:
        raise WireError("tool_choice 'required' needs tools", param="tool_choice")
    return [] if choice == "none" else list(functions.values()), choice


def grammar(functions: Sequence[dict[str, Any]], choice: str) -> tuple[str, Any]:
    """Key and value of the grammar, as structured_outputs has them."""
    schemas = {f["name"]: _arguments(f) for f in functions}
    if choice == "auto":
        tags = [
            {
                "begin": f'{BEGIN}\n{{"name": {json.dumps(name)}, "arguments": ',
                "schema": schema,
                "end": f"}}\n{END}",
            }
            for name, schema in schemas.items()
        ]
        return "structural_tag", {"tags": tags, "triggers": [BEGIN]}
    one = len(schemas) == 1
    parts = [
        {
            "type": "object",
            "required": ["name", "arguments"],
            "additionalProperties": False,
            "properties": {
                "name": {"const": name},
                "arguments": _moved(schema, f"{'' if one else f'/anyOf/{i}'}/properties/arguments"),
            },
        }
        for i, (name, schema) in enumerate(schemas.items())
    ]
    return "json", parts[0] if one else {"anyOf": parts}


def _arguments(function: dict[str, Any]) -> Any:
    nothing = {"type": "object", "properties": {}, "additionalProperties": False}
    return function.get("parameters") or nothing


def _moved(schema: Any, place: str) -> Any:
    """A schema whose references point into itself, to stand at a place of another one."""
    if isinstance(schema, list):
        return [_moved(part, place) for part in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: part if key in _DATA else _moved(part, place) for key, part in schema.items()}
    to = schema.get("$ref")
    if isinstance(to, str) and (to == "#" or to.startswith("#/")):
        moved["$ref"] = f"#{place}{to[1:]}"
    return moved


class CallReader:
    """Parts a growing answer into text for people and calls.

    Parameters
    ----------
    choice : "required": the whole answer is one call; "auto": calls stand in tags.
    most : calls that are taken; further ones are left out.
    """

    def __init__(self, choice: str, most: int):
        self._begin, end = (BEGIN, END) if choice == "auto" else ("", "")
        self._tail = re.compile(rf"\s*\}}\s*{end}")
        self._most = most
        self._text = ""
        self.calls: list[dict[str, Any]] = []

    def feed(self, text: str, last: bool) -> tuple[str, list[dict[str, Any]]]:
        """Go on by a piece; text that is no call's, and the calls that it completes."""
        self._text += text
        known = len(self.calls)
        said = ""
        while (at := self._text.find(self._begin)) >= 0 and (end := self._take(at)):
            said = said + self._text[:at]
            self._text = self._text[end:]
        if last:
            at = len(self._text)
        elif at < 0:  # the beginning of a tag may be the end of the text
            most = range(len(BEGIN))
            at = len(self._text) - max(n for n in most if self._text.endswith(BEGIN[:n]))
        said = said + self._text[:at]
        self._text = self._text[at:]
        return said, self.calls[known:]

    def _take(self, at: int) -> int | None:
        """Take the call that begins at a place; where it ends, or None while it does not."""
        head = _HEAD.match(self._text, at + len(self._begin))
        if head is None:
            return None
        try:
            _, over = _DECODER.raw_decode(self._text, head.end())
        except (ValueError, RecursionError):
            return None
        tail = self._tail.match(self._text, over)
        if tail is None:
            return None
        if len(self.calls) < self._most:
            self.calls.append(
                {
                    "id": f"call_{secrets.token_hex(12)}",
                    "type": "function",
                    "function": {
                        "name": json.loads(head[1]),
                        "arguments": self._text[head.end() : over],
                    },
                }
            )
        return tail.end()
