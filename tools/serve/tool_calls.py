"""Tool calls: the grammar that enforces their format, and a parser for generated calls.

The model generates a call as ``{"name": ..., "arguments": ...}``. The format of the whole output
depends on the request:

* ``tool_choice`` "auto": free text in which the tags `BEGIN` and `END` enclose each call, as in the
  format of the Hermes models.
* ``tool_choice`` "required": a JSON array of at least one call. If ``parallel_tool_calls`` is
  false, the output is a single call.
* ``tool_choice`` that names a function: a single call.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from graft.sampling.checks import short_repr
from graft.tools.serve.errors import ApiError
from graft.tools.serve.fields import read_bool
from graft.tools.serve.reasoning import partial_tag_length

BEGIN = "<tool_call>"
END = "</tool_call>"
#: Texts around a call in tags.
_TAG_TEXTS = (f"{BEGIN}\n", f"\n{END}")
#: Maximum number of tool calls in one response choice, if parallel calls are allowed.
MAX_TOOL_CALLS = 128
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*(?P<name>"(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*')
#: The beginning of a call, after "[" or "," if the output is an array.
_REQUIRED_HEAD = re.compile(rf"\s*[\[,]?{_HEAD.pattern}")
_TAIL = re.compile(rf"\s*\}}\s*{END}")
_REQUIRED_TAIL = re.compile(r"\s*\}")
#: Fields of a function's definition, with their types.
_FUNCTION_FIELDS: dict[str, tuple[type, str]] = {
    "name": (str, "a string"),
    "description": (str, "a string"),
    "parameters": (dict, "a JSON schema, which is an object"),
    "strict": (bool, "true or false"),
}
_NO_ARGUMENTS = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}


@dataclass(frozen=True)
class ToolChoice:
    """The functions that the model may call in a request.

    Attributes
    ----------
    functions
        Function definitions; empty if no function may be called.
    required
        Whether the output must be a call, or an array of calls.
    parallel
        Whether the output may contain more than one call.
    """

    functions: list[dict[str, Any]]
    required: bool = False
    parallel: bool = True

    @property
    def is_array(self) -> bool:
        """Whether the output is a JSON array of calls."""
        return self.required and self.parallel


def read_tool_choice(fields: Mapping[str, Any]) -> ToolChoice:
    """Return the functions that the model may call in a request.

    Parameters
    ----------
    fields
        Fields of the request without nulls.

    Raises
    ------
    ApiError
        If ``tools``, ``tool_choice`` or ``parallel_tool_calls`` is invalid.
    """
    functions = _read_functions(fields.get("tools", []))
    choice = fields.get("tool_choice", "auto")
    parallel = read_bool(fields, "parallel_tool_calls", True)
    if isinstance(choice, dict) and choice.get("type") == "function":
        return ToolChoice([_named_function(functions, choice)], required=True, parallel=False)
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools")
        mode = allowed.get("mode") if isinstance(allowed, dict) else None
        tools = allowed.get("tools") if isinstance(allowed, dict) else None
        if mode not in ("auto", "required") or not isinstance(tools, list) or not tools:
            raise ApiError(
                "allowed_tools must have the mode auto or required, and tools, got "
                f"{short_repr(allowed)}",
                param="tool_choice",
            )
        names = {_named_function(functions, tool)["name"] for tool in tools}
        allowed_functions = [function for name, function in functions.items() if name in names]
        return ToolChoice(allowed_functions, mode == "required", parallel)
    if choice not in ("none", "auto", "required"):
        raise ApiError(
            "tool_choice must be none, auto, required, a function or allowed_tools, got "
            f"{short_repr(choice)}",
            param="tool_choice",
        )
    if choice == "none":
        return ToolChoice([])
    if "tool_choice" in fields and not functions:
        raise ApiError(f"tool_choice {choice!r} requires tools", param="tool_choice")
    return ToolChoice(list(functions.values()), choice == "required", parallel)


def _named_function(functions: Mapping[str, dict[str, Any]], tool: Any) -> dict[str, Any]:
    """Return the definition of a function that ``tool_choice`` names."""
    named = tool.get("function") if isinstance(tool, dict) else None
    name = named.get("name") if isinstance(named, dict) else None
    if not isinstance(name, str) or name not in functions:
        raise ApiError(
            f"tool_choice names {short_repr(name)}, which is not a function in tools",
            param="tool_choice",
        )
    return functions[name]


def _read_functions(tools: Any) -> dict[str, dict[str, Any]]:
    """Return the function definitions of ``tools`` by name."""
    functions: dict[str, dict[str, Any]] = {}
    if not isinstance(tools, list):
        tools = [tools]
    for tool in tools:
        function = _read_function(tool)
        name = function["name"]
        if name in functions:
            raise ApiError(f"two functions are named {name!r}", param="tools")
        functions[name] = function
    return functions


def _read_function(tool: Any) -> dict[str, Any]:
    """Return the fields of a function's definition that graft knows and that are not null."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict):
        function = {}
    name = function.get("name")
    if not name or not isinstance(name, str):
        raise ApiError("each tool must be a function with a name", param="tools")
    read = {}
    for field, (kind, kind_name) in _FUNCTION_FIELDS.items():
        value = function.get(field)
        if value is None:
            continue
        if not isinstance(value, kind):
            raise ApiError(
                f"function {name!r}: {field} must be {kind_name}, got {short_repr(value)}",
                param="tools",
            )
        read[field] = value
    return read


def template_tools(tools: Any) -> list[dict[str, Any]]:
    """Return ``tools`` as chat templates expect them: without nulls, and without other fields.

    A field such as ``strict``, which concerns the grammar only, would change the prompt.
    """
    described = []
    for function in _read_functions(tools).values():
        described.append({key: value for key, value in function.items() if key != "strict"})
    return [{"type": "function", "function": function} for function in described]


def shown_schema(tools: ToolChoice) -> dict[str, Any]:
    """Return a JSON schema of required calls, for chat templates that show the output's schema.

    It is no grammar: references in the parameters are not adapted to their place.
    """
    calls = []
    for function in tools.functions:
        properties = {
            "name": {"const": function["name"]},
            "arguments": function.get("parameters") or _NO_ARGUMENTS,
        }
        calls.append({"type": "object", "properties": properties, "required": list(properties)})
    call = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return {"type": "array", "items": call} if tools.is_array else call


def tool_format(tools: ToolChoice) -> dict[str, Any]:
    """Return the structural format of an output in which the model may or must call functions."""
    if tools.required:
        return _required_format(tools)
    tags = [_call_tag(function, *_TAG_TEXTS, strict=True) for function in tools.functions]
    return {"type": "triggered_tags", "triggers": [BEGIN], "tags": tags}


def calls_format(tools: ToolChoice) -> dict[str, Any]:
    """Return the structural format of an output that consists of calls in tags."""
    tags = [_call_tag(function, *_TAG_TEXTS, strict=True) for function in tools.functions]
    return _some_calls(tags, "\n", tools)


def _required_format(tools: ToolChoice) -> dict[str, Any]:
    """Return the structural format of a call, or of a JSON array of calls."""
    tags = [_call_tag(function, "", "", strict=False) for function in tools.functions]
    calls = _some_calls(tags, ", ", tools)
    if not tools.is_array:
        return calls
    brackets = [{"type": "const_string", "value": text} for text in "[]"]
    return {"type": "sequence", "elements": [brackets[0], calls, brackets[1]]}


def _some_calls(tags: list[dict[str, Any]], separator: str, tools: ToolChoice) -> dict[str, Any]:
    """Return the structural format of at least one call."""
    return {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": not tools.parallel,
    }


def _call_tag(
    function: Mapping[str, Any], before: str, after: str, *, strict: bool
) -> dict[str, Any]:
    """Return the tag of a call. Its content is the JSON of the arguments.

    The schema of the arguments stays a document of its own, so that its references keep their
    meaning.

    Parameters
    ----------
    function
        Definition of the function.
    before, after
        Texts around the JSON object of the call.
    strict
        Value of ``strict`` if the definition has none: whether objects of the arguments allow no
        properties that the schema does not mention.
    """
    name = json.dumps(function["name"], ensure_ascii=False)
    content = {
        "type": "json_schema",
        "json_schema": function.get("parameters") or _NO_ARGUMENTS,
        "strict": function.get("strict", strict),
    }
    return {
        "type": "tag",
        "begin": f'{before}{{"name": {name}, "arguments": ',
        "content": content,
        "end": f"}}{after}",
    }


class _ValueScanner:
    """Finds the end of a JSON value in a text that arrives in pieces.

    Attributes
    ----------
    has_begun
        Whether a character of the value has been scanned.
    """

    def __init__(self) -> None:
        self.has_begun = False
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    def feed(self, text: str) -> int | None:
        """Scan the next piece; return the end of the value in it, or None if it has not ended."""
        for position, char in enumerate(text):
            if self._in_string:
                self._scan_string(char)
                if not self._in_string and self._depth == 0:
                    return position + 1
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif self._depth == 0 and self.has_begun and char in ",}] \t\r\n":
                return position  # the end of a number, true, false or null
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return position + 1
            self.has_begun = True
        return None

    def _scan_string(self, char: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            self._in_string = False


class ToolCallParser:
    """Incremental parser that separates generated text into content and tool calls.

    Parameters
    ----------
    tools
        Functions that the model may call. They determine the format of the output.

    Attributes
    ----------
    calls
        All calls that have been parsed so far, in OpenAI's format, without those that exceed the
        maximum number of calls. The arguments of the last call can be incomplete.
    cut_text
        Text of the last call of `calls` if the output has ended within its arguments; otherwise
        empty.
    """

    def __init__(self, tools: ToolChoice):
        self._required = tools.required
        self._max_calls = MAX_TOOL_CALLS if tools.parallel else 1
        self._text = ""
        self._num_calls = 0
        self._scanner: _ValueScanner | None = None
        self._call_text = ""
        self._in_tail = False
        self.calls: list[dict[str, Any]] = []
        self.cut_text = ""

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
        deltas : list of dict
            New parts of calls, at most one for each call, in the format of a streamed response.
            The first delta of a call has its id and name. The arguments of all its deltas together
            are the arguments of the call.
        """
        self._text += text
        content = ""
        deltas: list[dict[str, Any]] = []
        while True:
            if self._in_tail:
                has_advanced = self._read_tail()
            elif self._scanner is not None:
                has_advanced = self._read_arguments(self._scanner, deltas)
            else:
                before, has_advanced = self._read_content(last, deltas)
                content += before
            if not has_advanced:
                break
        if last and self._scanner is not None and self._num_calls <= self._max_calls:
            self.cut_text = self._call_text
        return content, deltas

    def _read_content(self, last: bool, deltas: list[dict[str, Any]]) -> tuple[str, bool]:
        """Read up to the arguments of the next call.

        Returns
        -------
        content : str
            Text before the call.
        has_begun : bool
            Whether a call has begun.
        """
        if self._required:
            start = 0
            head = _REQUIRED_HEAD.match(self._text)
        else:
            start = self._text.find(BEGIN)
            head = _HEAD.match(self._text, start + len(BEGIN)) if start >= 0 else None
        if head is not None:
            content = self._text[:start]
            self._call_text = self._text[start : head.end()]
            self._text = self._text[head.end() :]
            self._begin_call(json.loads(head["name"]), deltas)
            return content, True
        if self._required:
            return "", False
        end = start
        if last:
            end = len(self._text)
        elif start < 0:
            end = len(self._text) - partial_tag_length(self._text, BEGIN)
        content = self._text[:end]
        self._text = self._text[end:]
        return content, False

    def _begin_call(self, name: str, deltas: list[dict[str, Any]]) -> None:
        self._scanner = _ValueScanner()
        self._num_calls += 1
        if self._num_calls > self._max_calls:
            return
        call_id = f"call_{secrets.token_hex(12)}"
        call = {"id": call_id, "type": "function"}
        function = {"name": name, "arguments": ""}
        deltas.append({"index": len(self.calls), **call, "function": dict(function)})
        self.calls.append({**call, "function": function})

    def _read_arguments(self, scanner: _ValueScanner, deltas: list[dict[str, Any]]) -> bool:
        """Read arguments; return whether they have ended."""
        if not scanner.has_begun:
            self._text = self._text.lstrip()
        end = scanner.feed(self._text)
        piece = self._text if end is None else self._text[:end]
        self._text = self._text[len(piece) :]
        self._call_text += piece
        if piece and self._num_calls <= self._max_calls:
            index = len(self.calls) - 1
            self.calls[index]["function"]["arguments"] += piece
            if not deltas or deltas[-1]["index"] != index:
                deltas.append({"index": index, "function": {"arguments": ""}})
            deltas[-1]["function"]["arguments"] += piece
        if end is None:
            return False
        self._scanner = None
        self._in_tail = True
        return True

    def _read_tail(self) -> bool:
        """Read the text that closes a call; return whether it is complete."""
        tail = (_REQUIRED_TAIL if self._required else _TAIL).match(self._text)
        if tail is None:
            return False
        self._text = self._text[tail.end() :]
        self._in_tail = False
        return True
