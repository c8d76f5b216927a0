"""The functions that the model may call in a request: ``tools`` and ``tool_choice``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from graft.sampling.checks import short_repr
from graft.tools.serve.errors import ApiError
from graft.tools.serve.fields import read_bool

#: Fields of a function's definition, with their types.
_FUNCTION_FIELDS: dict[str, tuple[type, str]] = {
    "name": (str, "a string"),
    "description": (str, "a string"),
    "parameters": (dict, "a JSON schema, which is an object"),
    "strict": (bool, "true or false"),
}
#: Schema of the arguments of a function without ``parameters``.
NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


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
    """Return the fields of a function's definition that graft uses and that are not null."""
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
    """Return ``tools`` for chat templates, with only name, description and parameters.

    Another field, such as ``strict``, would change the prompt although it only affects the grammar.
    """
    described = []
    for function in _read_functions(tools).values():
        described.append({key: value for key, value in function.items() if key != "strict"})
    return [{"type": "function", "function": function} for function in described]


def shown_schema(tools: ToolChoice) -> dict[str, Any]:
    """Return a JSON schema of required calls for chat templates that show the output's schema.

    The schema must not be compiled: references within the parameters are not adapted to the new
    document.
    """
    calls = []
    for function in tools.functions:
        properties = {
            "name": {"const": function["name"]},
            "arguments": function.get("parameters") or NO_ARGUMENTS,
        }
        calls.append({"type": "object", "properties": properties, "required": list(properties)})
    call = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return {"type": "array", "items": call} if tools.is_array else call
