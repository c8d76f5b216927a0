"""The functions that the model may call in a request: ``tools`` and ``tool_choice``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graft.native.errors import short_repr
from graft.tools.serve.errors import ApiError

#: Schema of the arguments of a function without ``parameters``.
NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class ToolChoice:
    """The functions that the model may call in a request."""

    #: Function definitions; empty if no function may be called.
    functions: list[dict[str, Any]]
    #: Whether the output must consist of calls.
    required: bool = False
    #: Whether the output may contain more than one call.
    parallel: bool = True


def choose_tools(definitions: Sequence[dict[str, Any]], choice: Any, parallel: bool) -> ToolChoice:
    """Return the functions that the model may call in a request.

    `definitions` are the function definitions in the request's field ``tools``. `choice` is the
    field ``tool_choice``; None if it is absent. `parallel` is the field ``parallel_tool_calls``.
    Raise ApiError if two functions have the same name, or ``tool_choice`` is invalid.
    """
    functions: dict[str, dict[str, Any]] = {}
    for definition in definitions:
        name = definition["name"]
        if name in functions:
            raise ApiError(f"two functions are named {name!r}", param="tools")
        functions[name] = definition
    if isinstance(choice, dict) and choice.get("type") == "function":
        return ToolChoice([_named_function(functions, choice)], required=True, parallel=False)
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools")
        mode = allowed.get("mode") if isinstance(allowed, dict) else None
        listed = allowed.get("tools") if isinstance(allowed, dict) else None
        if mode not in ("auto", "required") or not isinstance(listed, list) or not listed:
            raise ApiError(
                "allowed_tools must have the mode auto or required, and tools, got "
                f"{short_repr(allowed)}",
                param="tool_choice",
            )
        names = {_named_function(functions, tool)["name"] for tool in listed}
        allowed_functions = [function for name, function in functions.items() if name in names]
        return ToolChoice(allowed_functions, mode == "required", parallel)
    if choice not in (None, "none", "auto", "required"):
        raise ApiError(
            "tool_choice must be none, auto, required, a function or allowed_tools, got "
            f"{short_repr(choice)}",
            param="tool_choice",
        )
    if choice == "none":
        return ToolChoice([])
    if choice is not None and not functions:
        raise ApiError(f"tool_choice {choice!r} requires tools", param="tool_choice")
    return ToolChoice(list(functions.values()), choice == "required", parallel)


def _named_function(functions: Mapping[str, dict[str, Any]], tool: Any) -> dict[str, Any]:
    """Return the definition of the function that `tool`, an entry of ``tool_choice``, names.

    `functions` maps the names of the functions in ``tools`` to their definitions.
    """
    named = tool.get("function") if isinstance(tool, dict) else None
    name = named.get("name") if isinstance(named, dict) else None
    if not isinstance(name, str) or name not in functions:
        raise ApiError(
            f"tool_choice names {short_repr(name)}, which is not a function in tools",
            param="tool_choice",
        )
    return functions[name]


def template_tools(definitions: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return function definitions for chat templates, with only name, description and parameters.

    Another field, such as ``strict``, would change the prompt although it only affects the grammar.
    """
    described = []
    for definition in definitions:
        function = {key: value for key, value in definition.items() if key != "strict"}
        described.append({"type": "function", "function": function})
    return described


def shown_schema(tools: ToolChoice) -> dict[str, Any]:
    """Return a JSON schema of a required call, for chat templates that show the output's schema.

    The schema is for display only. It must not be compiled as a grammar, because references within
    the ``parameters`` of a function are not adapted to the new document.
    """
    calls = []
    for function in tools.functions:
        properties = {
            "name": {"const": function["name"]},
            "arguments": function.get("parameters") or NO_ARGUMENTS,
        }
        calls.append({"type": "object", "properties": properties, "required": list(properties)})
    return calls[0] if len(calls) == 1 else {"anyOf": calls}
