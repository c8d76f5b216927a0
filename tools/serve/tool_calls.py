"""Tool calls: the grammar that enforces their format, and a parser for generated calls.

The model generates a call as ``{"name": ..., "arguments": ...}``. If ``tool_choice`` is "required"
or names a function, the whole output is one call. If ``tool_choice`` is "auto", the output is free
text in which the tags `BEGIN` and `END` enclose each call, in the format of the Hermes models.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from graft.tools.serve.errors import ApiError

BEGIN = "<tool_call>"
END = "</tool_call>"
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*')
_DECODER = json.JSONDecoder()
#: Schema keywords whose values are data, so that "$ref" in them is not a reference.
_DATA_KEYWORDS = ("const", "enum", "default", "examples")
_NO_ARGUMENTS = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}


def read_tools(fields: Mapping[str, Any]) -> tuple[list[dict[str, Any]], str]:
    """Return the functions that the model may call, and whether it must call one.

    Parameters
    ----------
    fields
        Fields of the request.

    Returns
    -------
    functions : list of dict
        Function definitions; empty if no function may be called.
    choice : str
        ``"auto"``, ``"required"`` or ``"none"``. If the request names a function, it is the only
        one in `functions`, and `choice` is ``"required"``.

    Raises
    ------
    ApiError
        If ``tools`` or ``tool_choice`` is invalid.
    """
    functions = _read_functions(fields.get("tools", []))
    choice = fields.get("tool_choice", "auto")
    if isinstance(choice, dict) and choice.get("type") == "function":
        named = choice.get("function")
        name = named.get("name") if isinstance(named, dict) else None
        if not isinstance(name, str) or name not in functions:
            raise ApiError(
                f"tool_choice names {name!r}, which is not a function in tools",
                param="tool_choice",
            )
        return [functions[name]], "required"
    if choice not in ("none", "auto", "required"):
        raise ApiError(
            f"tool_choice must be none, auto, required or a function, got {choice!r}",
            param="tool_choice",
        )
    if choice == "required" and not functions:
        raise ApiError("tool_choice 'required' needs tools", param="tool_choice")
    if choice == "none":
        return [], choice
    return list(functions.values()), choice


def _read_functions(tools: Any) -> dict[str, dict[str, Any]]:
    """Return the function definitions of ``tools`` by name."""
    functions: dict[str, dict[str, Any]] = {}
    if not isinstance(tools, list):
        tools = [tools]
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if function is None or not name or not isinstance(name, str):
            raise ApiError("each tool must be a function with a name", param="tools")
        if name in functions:
            raise ApiError(f"two functions are named {name!r}", param="tools")
        functions[name] = function
    return functions


def tool_grammar(functions: Sequence[dict[str, Any]], choice: str) -> tuple[str, Any]:
    """Return the grammar of calls to functions, as a key and a value of structured_outputs.

    Parameters
    ----------
    functions
        Function definitions; at least one.
    choice
        ``"auto"`` for calls in free text, ``"required"`` for a single call.
    """
    schemas = {}
    for function in functions:
        schemas[function["name"]] = function.get("parameters") or _NO_ARGUMENTS
    if choice == "auto":
        tags = []
        for name, schema in schemas.items():
            begin = f'{BEGIN}\n{{"name": {json.dumps(name)}, "arguments": '
            end = f"}}\n{END}"
            tags.append({"begin": begin, "schema": schema, "end": end})
        return "structural_tag", {"tags": tags, "triggers": [BEGIN]}
    if len(schemas) == 1:
        [(name, schema)] = schemas.items()
        return "json", _call_schema(name, schema, "")
    calls: list[dict[str, Any]] = []
    for name, schema in schemas.items():
        pointer = f"/anyOf/{len(calls)}"
        calls.append(_call_schema(name, schema, pointer))
    return "json", {"anyOf": calls}


def _call_schema(name: str, schema: Any, pointer: str) -> dict[str, Any]:
    """Return the JSON schema of a call to a function.

    Parameters
    ----------
    name
        Name of the function.
    schema
        JSON schema of the arguments.
    pointer
        JSON pointer at which the caller embeds the result into a larger schema.
    """
    return {
        "type": "object",
        "required": ["name", "arguments"],
        "additionalProperties": False,
        "properties": {
            "name": {"const": name},
            "arguments": _rebase_references(schema, f"{pointer}/properties/arguments"),
        },
    }


def _rebase_references(schema: Any, pointer: str) -> Any:
    """Adapt the references of a schema that will be embedded into a larger schema.

    A reference such as ``{"$ref": "#/$defs/x"}`` starts at the root of the document. `pointer` is
    the JSON pointer at which the schema is embedded, and is inserted into each reference.
    """
    if isinstance(schema, list):
        return [_rebase_references(part, pointer) for part in schema]
    if not isinstance(schema, dict):
        return schema
    rebased = {}
    for key, part in schema.items():
        rebased[key] = part if key in _DATA_KEYWORDS else _rebase_references(part, pointer)
    target = schema.get("$ref")
    if isinstance(target, str) and (target == "#" or target.startswith("#/")):
        rebased["$ref"] = f"#{pointer}{target[1:]}"
    return rebased


def _partial_tag_length(text: str) -> int:
    """Return the length of the longest suffix of a text that is an incomplete tag `BEGIN`."""
    for length in range(len(BEGIN) - 1, 0, -1):
        if text.endswith(BEGIN[:length]):
            return length
    return 0


class ToolCallParser:
    """Incremental parser that separates generated text into content and tool calls.

    Parameters
    ----------
    choice
        ``"required"`` if the whole output is one call, ``"auto"`` if calls are enclosed in tags.
    max_calls
        Maximum number of calls; further calls are dropped.

    Attributes
    ----------
    calls
        All calls that have been parsed so far, in OpenAI's format.
    """

    def __init__(self, choice: str, max_calls: int):
        self._begin = BEGIN if choice == "auto" else ""
        end = END if choice == "auto" else ""
        self._tail = re.compile(rf"\s*\}}\s*{end}")
        self._max_calls = max_calls
        self._text = ""
        self.calls: list[dict[str, Any]] = []

    def feed(self, text: str, last: bool) -> tuple[str, list[dict[str, Any]]]:
        """Process the next piece of the generated text.

        Parameters
        ----------
        text
            Generated text.
        last
            Whether this is the last piece of the output.

        Returns
        -------
        content : str
            Text that belongs to no call. Text that may be the beginning of a call is held back
            until the parser can decide.
        calls : list of dict
            Calls that are complete with this text.
        """
        self._text += text
        known_calls = len(self.calls)
        content = ""
        while True:
            start = self._text.find(self._begin)
            end = self._parse_call(start) if start >= 0 else None
            if end is None:
                break
            content += self._text[:start]
            self._text = self._text[end:]
        if last:
            start = len(self._text)
        elif start < 0:
            start = len(self._text) - _partial_tag_length(self._text)
        content += self._text[:start]
        self._text = self._text[start:]
        return content, self.calls[known_calls:]

    def _parse_call(self, start: int) -> int | None:
        """Parse the call that begins at `start` and append it to `calls`.

        Returns
        -------
        int or None
            Position after the call; None if the call is not complete.
        """
        head = _HEAD.match(self._text, start + len(self._begin))
        if head is None:
            return None
        try:
            _, arguments_end = _DECODER.raw_decode(self._text, head.end())
        except (ValueError, RecursionError):
            return None
        tail = self._tail.match(self._text, arguments_end)
        if tail is None:
            return None
        if len(self.calls) < self._max_calls:
            name = json.loads(head[1])
            arguments = self._text[head.end() : arguments_end]
            function = {"name": name, "arguments": arguments}
            call_id = f"call_{secrets.token_hex(12)}"
            self.calls.append({"id": call_id, "type": "function", "function": function})
        return tail.end()
