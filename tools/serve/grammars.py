"""Grammars of API requests: response_format, structured_outputs, and fields of vLLM and SGLang."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from graft.grammar.grammar_spec import GrammarSpec
from graft.grammar.spec import JsonValue, parse_json
from graft.models.request import Limits, check_size
from graft.native.errors import short_repr
from graft.tools.grammar_options import make_grammar
from graft.tools.serve.errors import ApiError
from graft.tools.serve.requests import GRAMMAR_FIELDS, ChatRequest, CompletionRequest
from graft.tools.serve.tool_formats import ToolFormat
from graft.tools.serve.tool_formats.base import one_of

_STRUCTURED_KEYS = {"json", "json_object", "regex", "choice", "grammar", "structural_tag"}
#: Options of structured_outputs that have no effect, because JSON is always generated on one line,
#: and no second backend is tried after an error.
_NEUTRAL_OPTIONS = ("disable_fallback", "disable_any_whitespace")

#: Names of grammars, by `FoundGrammar.key`, for error messages about values that JSON cannot
#: express. For all other keys, the name is the key.
_SUBJECTS = {
    "json": "JSON schema",
    "strict_json": "JSON schema",
    "structural_tag": "structural tag",
    "structural_format": "structural format",
}
_STRICT_OPTION = "disable_additional_properties"


class FoundGrammar(NamedTuple):
    """A grammar of a request."""

    #: Name in error messages: the field that defines the grammar, or a key of structured_outputs.
    name: str

    #: Kind of grammar: a key of structured_outputs, ``"ebnf"``, or ``"strict_json"`` (a schema that
    #: allows no additional properties).
    key: str
    value: Any

    def check_size(self, limits: Limits) -> None:
        """Raise RequestError if the grammar is larger than `Limits.grammar_bytes`."""
        check_size(self.name, self.value, "grammar_bytes", limits, param="grammar")


def find_grammars(
    body: ChatRequest | CompletionRequest, limits: Limits, tool_format: ToolFormat
) -> list[FoundGrammar]:
    """Return the grammars that response_format, structured_outputs or tools define.

    The first grammar of the list constrains the output. The caller checks the other ones for errors
    but does not use them. The list is empty if the output is free text.

    If the model may call tools, a request can also have one other grammar. The output is then
    either a sequence of calls or text that matches this grammar. If the model must call a tool, the
    request can also have a response_format, which must be valid but has no effect.

    Raise ApiError or RequestError if the request has more than one grammar, or the grammar is
    too large.
    """
    found = [*_response_format(body), *_structured_outputs(body)]
    unused: list[FoundGrammar] = []
    tools = body.chosen_tools
    if tools.functions:
        check_size("tools", tools.functions, "grammar_bytes", limits)
        form = tool_format.output(tools)
        if len(found) == 1 and not tools.required:
            found[0].check_size(limits)
            form = one_of([tool_format.calls(tools), _as_format(found[0])])
            # Return `found[0]` too, although it has become a part of `form`. The caller then checks
            # this grammar separately, so that an error names the field that contains it.
            unused, found = found, []
        elif tools.required and [grammar.name for grammar in found] == ["response_format"]:
            # The output is a call, so there is no content to which response_format applies.
            unused, found = found, []
        found.append(FoundGrammar("tools", "structural_tag", {"format": form}))
    if len(found) > 1:
        names = " and ".join(grammar.name for grammar in found)
        raise ApiError(f"give at most one grammar, got {names}", param=field_of(found[1], body))
    for grammar in found + unused:
        grammar.check_size(limits)
    return found + unused


def field_of(grammar: FoundGrammar, body: ChatRequest | CompletionRequest) -> str:
    """Return the name of the field that contains a grammar of a request."""
    return grammar.name if grammar.name in body.model_fields_set else "structured_outputs"


def requires_answer(body: ChatRequest | CompletionRequest) -> bool:
    """Return whether an output with a grammar must contain text that matches the grammar.

    This is not the case if the grammar only constrains calls that the model may make, or only
    excludes bad words.
    """
    has_grammar = bool(_response_format(body) or _structured_outputs(body))
    return has_grammar or body.chosen_tools.required


def _response_format(body: ChatRequest | CompletionRequest) -> list[FoundGrammar]:
    """Return the grammar of response_format as a list of at most one grammar."""
    response_format = body.response_format
    if response_format is None:
        return []
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    if kind == "text":
        return []
    is_json = kind in ("json_object", "json_schema")
    if is_json and response_format.get("schema") is not None:  # as in llama.cpp
        return [FoundGrammar("response_format", "json", response_format["schema"])]
    if kind in ("json_object", "structural_tag"):
        return [FoundGrammar("response_format", kind, response_format)]
    if kind == "json_schema":
        definition = response_format.get("json_schema")
        if isinstance(definition, dict) and definition.get("schema") is not None:
            strict = definition.get("strict") or False
            if not isinstance(strict, bool):
                raise ApiError(
                    f"json_schema.strict must be true or false, got {short_repr(strict)}",
                    param="response_format",
                )
            key = "strict_json" if strict else "json"
            return [FoundGrammar("response_format", key, definition["schema"])]
    raise ApiError(
        "response_format must be text, json_object, json_schema with a schema, or "
        f"structural_tag, got {short_repr(response_format)}",
        param="response_format",
    )


def _structured_outputs(body: ChatRequest | CompletionRequest) -> list[FoundGrammar]:
    """Return the grammars of structured_outputs and of the fields in `GRAMMAR_FIELDS`."""
    structured = body.structured_outputs
    found = []
    if structured is not None:
        # Error messages name the key (such as "regex"), not the field structured_outputs.
        for key, value in _read_structured_outputs(structured).items():
            found.append(FoundGrammar(key.removeprefix("strict_"), key, value))
    for name, key in GRAMMAR_FIELDS.items():
        if name in body.model_fields_set:
            found.append(FoundGrammar(name, key, getattr(body, name)))
    return [grammar for grammar in found if _is_enabled(grammar)]


def _is_enabled(grammar: FoundGrammar) -> bool:
    """Return whether a request uses the grammar: false if the grammar's value is null.

    The grammar json_object has the value true or false; raise ApiError if it has another value.
    """
    if grammar.key == "json_object":
        if not isinstance(grammar.value, bool):
            raise ApiError(
                f"{grammar.name} must be true or false, got {short_repr(grammar.value)}",
                param=grammar.name if grammar.name in GRAMMAR_FIELDS else "structured_outputs",
            )
        return grammar.value
    return grammar.value is not None


def _read_structured_outputs(structured: Any) -> dict[str, Any]:
    """Check the field structured_outputs and return the grammars in it, by key.

    Keys with the value null are left out, and so are options such as disable_fallback. The option
    disable_additional_properties changes the key "json" to "strict_json".
    """
    grammars = {}
    if isinstance(structured, dict):
        grammars = {key: value for key, value in structured.items() if value is not None}
    strict = False
    for option in (*_NEUTRAL_OPTIONS, _STRICT_OPTION):
        value = grammars.pop(option, False)
        if not isinstance(value, bool):
            raise ApiError(
                f"{option} must be true or false, got {short_repr(value)}",
                param="structured_outputs",
            )
        strict = option == _STRICT_OPTION and value
    unknown = [key for key in grammars if key not in _STRUCTURED_KEYS]
    if unknown or not grammars:
        got = f"the unknown key {short_repr(unknown[0])}" if unknown else short_repr(structured)
        raise ApiError(
            f"structured_outputs must have one of {', '.join(sorted(_STRUCTURED_KEYS))}, got {got}",
            param="structured_outputs",
        )
    if strict and "json" in grammars:
        grammars["strict_json"] = grammars.pop("json")
    return grammars


def shown_schema(grammar: FoundGrammar) -> Any:
    """Return the JSON schema of a grammar for chat templates that show it; None if it has none."""
    if grammar.key in ("json", "strict_json"):
        return _parsed(grammar.value)
    return {"type": "object"} if grammar.key == "json_object" else None


def make_grammar_spec(grammar: FoundGrammar) -> GrammarSpec | None:
    """Return the grammar of a request; None if it allows any text.

    This function does not check whether a backend can enforce the grammar. That can take long, and
    the engine does it without delaying other requests. Results are cached, because clients often
    send the same grammar in many requests. Raise GrammarError or OptionError if the grammar is
    invalid.
    """
    key = grammar.key
    value = grammar.value
    if key == "structural_tag":
        value = _structural_tag(value)
        if isinstance(value, dict) and value.keys() == {"format"}:
            key = "structural_format"
            value = value["format"]
    if key == "structural_format" and value == {"type": "any_text"}:
        return None
    subject = _SUBJECTS.get(key, key)
    return _make_grammar_spec(key, value if isinstance(value, str) else JsonValue(value, subject))


@functools.lru_cache(64)
def _make_grammar_spec(key: str, document: JsonValue | str) -> GrammarSpec | None:
    if key in ("json", "strict_json"):
        return GrammarSpec.json_schema(document, strict=key == "strict_json" or None)
    if key == "structural_format":
        return GrammarSpec.structural_format(document)
    value = document.value if isinstance(document, JsonValue) else document
    if key == "json_object":
        value = True
    elif key == "grammar":  # only EBNF rules contain "::=", Lark rules do not
        key = "ebnf" if "::=" in str(value) else "lark"
    return make_grammar({key: value}, partial=False, check=False)


def _structural_tag(value: Any) -> Any:
    """Convert the structural tag of a request to the form that `make_grammar` expects.

    The older form of structural tags lists the tags under ``structures``. A tag without a schema,
    or whose schema is null, allows any JSON.
    """
    if isinstance(value, str):
        value = parse_json("structural tag", value)
    if not isinstance(value, dict) or value.get("type", "structural_tag") != "structural_tag":
        return value
    converted = {}
    for key, entry in value.items():
        if key == "structures":
            converted["tags"] = entry
        elif key != "type":
            converted[key] = entry
    tags = converted.get("tags")
    if isinstance(tags, list):
        converted["tags"] = [_with_schema(tag) for tag in tags]
    return converted


def _with_schema(tag: Any) -> Any:
    """Return `tag` with a schema. If it has none, add the schema that allows any JSON value."""
    if isinstance(tag, dict) and tag.get("schema") is None:
        return tag | {"schema": {}}
    return tag


def _as_format(grammar: FoundGrammar) -> dict[str, Any]:
    """Return the structural format of a grammar, or raise ApiError if its kind has none."""
    key, value = grammar.key, grammar.value
    if key == "structural_tag":
        value = _structural_tag(value)
        if isinstance(value, dict) and "format" in value:
            form: dict[str, Any] = value["format"]
            return form
    elif key in ("json", "strict_json"):
        return {"type": "json_schema", "json_schema": _parsed(value)}
    elif key == "json_object":
        return {"type": "json_schema", "json_schema": {"type": "object"}}
    elif key == "regex":
        return {"type": "regex", "pattern": value}
    elif key == "choice" and isinstance(value, list):
        return {"type": "or", "elements": [{"type": "const_string", "value": v} for v in value]}
    elif key in ("grammar", "ebnf"):
        return {"type": "grammar", "grammar": value}
    raise ApiError(f"{grammar.name} cannot be combined with tools", param=grammar.name)


def _parsed(schema: Any) -> Any:
    """Return a JSON schema. If it is given as JSON text, parse the text."""
    return parse_json("JSON schema", schema) if isinstance(schema, str) else schema
