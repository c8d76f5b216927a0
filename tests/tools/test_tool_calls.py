"""Tests of tool calls: their grammars, compared with jsonschema, and the tools of a prompt."""

from __future__ import annotations

import json

import jsonschema
import pytest

pytest.importorskip("pydantic", reason="the extra serve is not installed")

from request_util import TOWN, chat_request, chosen_tools

from graft.grammar import GrammarSpec, Vocabulary, make_backend
from graft.tools.serve.errors import ApiError
from graft.tools.serve.tool_calls import template_tools
from graft.tools.serve.tool_formats import TOOL_FORMATS

STOP = 256
BYTES = Vocabulary([bytes([byte]) for byte in range(256)] + [b""], 257, [STOP])


@pytest.fixture(scope="module")
def backend():
    return make_backend("llguidance", BYTES)


def tool(name, parameters=None, **fields):
    return {"type": "function", "function": {"name": name, "parameters": parameters, **fields}}


def call_text(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def accepts(backend, tools, text, **fields):
    """Return whether the grammar of a request with tools allows a text."""
    form = TOOL_FORMATS["hermes"].output(chosen_tools({"tools": tools, **fields}))
    matcher = backend.compile(GrammarSpec.structural_format(form)).matcher()
    return all(map(matcher.accept, text.encode())) and matcher.accept(STOP)


TOWN_VALUES = [{"city": "Rome"}, {"city": "rome"}, {}]
#: Schemas whose references or key names are easily confused, with arguments.
REFERENCE_SCHEMAS = {
    "definition": (TOWN, TOWN_VALUES),
    "property called default": (
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 2},
                "default": {"$ref": "#/properties/name"},
            },
            "required": ["default"],
        },
        [{"default": "ab"}, {"default": "abc"}, {"default": 1}],
    ),
    "definitions called as keywords": (
        {
            "type": "object",
            "properties": {
                name: {"$ref": f"#/$defs/{name}"} for name in ("const", "enum", "examples")
            },
            "required": ["const", "enum", "examples"],
            "$defs": {
                "const": {"$ref": "#/$defs/default"},
                "enum": {"enum": [{"$ref": "#/$defs/none"}]},
                "examples": {"const": {"$ref": "#"}},
                "default": {"type": "boolean"},
            },
        },
        [
            {"const": True, "enum": {"$ref": "#/$defs/none"}, "examples": {"$ref": "#"}},
            {"const": 1, "enum": {"$ref": "#/$defs/none"}, "examples": {"$ref": "#"}},
            {"const": True, "enum": {"$ref": "#/$defs/none"}, "examples": {"$ref": "#/items"}},
        ],
    ),
    "reference to the root": (
        {
            "type": "object",
            "properties": {"size": {"type": "integer"}, "next": {"$ref": "#"}},
            "required": ["size"],
        },
        [{"size": 1, "next": {"size": 2}}, {"size": 1, "next": {}}, {"size": 1, "next": 2}],
    ),
    "anchor": (
        {
            "type": "object",
            "properties": {"size": {"$ref": "#s"}},
            "required": ["size"],
            "$defs": {"size": {"$anchor": "s", "type": "integer"}},
        },
        [{"size": 2}, {"size": "3"}],
    ),
    "dynamic reference": (
        {
            "type": "object",
            "properties": {"size": {"$dynamicRef": "#s"}},
            "required": ["size"],
            "$defs": {"size": {"$dynamicAnchor": "s", "type": "integer"}},
        },
        [{"size": 2}, {"size": "3"}],
    ),
    "identifier": (
        {
            "$id": "https://example.com/town",
            "type": "object",
            "properties": {"size": {"$ref": "#/$defs/size"}},
            "required": ["size"],
            "$defs": {"size": {"enum": [1, 2]}},
        },
        [{"size": 2}, {"size": 3}],
    ),
}


@pytest.mark.parametrize("choice", ["auto", "required", "named"])
@pytest.mark.parametrize("schema, values", REFERENCE_SCHEMAS.values(), ids=REFERENCE_SCHEMAS)
def test_references_of_parameters_keep_their_meaning(backend, schema, values, choice):
    tools = [tool("person", TOWN), tool("f", schema)]
    validator = jsonschema.Draft202012Validator(schema)
    found = []
    for value in values:
        call = call_text("f", json.dumps(value))
        if choice == "auto":
            call = f"so {call}."
        elif choice == "required":
            call = f"{call}\n{call}"
        name = {"type": "function", "function": {"name": "f"}}
        found.append(
            accepts(backend, tools, call, tool_choice=name if choice == "named" else choice)
        )
    assert found == [validator.is_valid(value) for value in values]
    assert set(found) == {True, False}


def test_required_output_consists_of_calls_between_tags(backend):
    tools = [tool("town", TOWN), tool("名", {"type": "object", "properties": {"a": {}}})]
    town = call_text("town", '{"city": "Rome"}')
    other = call_text("名", '{"a": [1, {"b": "}"}]}')
    for text in (town, other):
        assert accepts(backend, tools, text, tool_choice="required")
        assert accepts(backend, tools, text, tool_choice="required", parallel_tool_calls=False)
    text = "\n".join([town, other, town])
    assert accepts(backend, tools, text, tool_choice="required")
    assert not accepts(backend, tools, text, tool_choice="required", parallel_tool_calls=False)
    bare = town.splitlines()[1]
    for text in ("", bare, f"[{bare}]", f"{town}{other}", f"{town} ", f"so {town}", town[:-1]):
        assert not accepts(backend, tools, text, tool_choice="required")


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("strict", [None, True, False])
def test_strict_determines_whether_arguments_have_additional_properties(backend, choice, strict):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    texts = [call_text("f", arguments) for arguments in ('{"a": 1}', '{"a": 1, "b": 2}')]
    tools = [tool("f", schema, strict=strict)]
    found = [accepts(backend, tools, text, tool_choice=choice) for text in texts]
    assert found == [True, strict is False]


def test_prompt_has_only_name_description_and_parameters_of_tools():
    tools = [
        {
            **tool("f", {"type": "object"}, description="d", strict=True, other=1),
            "cache_control": 2,
        },
        tool("g", None, description=None, strict=None),
    ]
    assert template_tools(chat_request(tools=tools).functions_of_tools) == [
        {
            "type": "function",
            "function": {"name": "f", "description": "d", "parameters": {"type": "object"}},
        },
        {"type": "function", "function": {"name": "g"}},
    ]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"strict": 1}, r"tools\[0\].function.strict must be true or false, got 1"),
        ({"strict": "true"}, r"tools\[0\].function.strict must be true or false, got 'true'"),
        ({"description": 1}, r"tools\[0\].function.description must be a string, got 1"),
        ({"parameters": [1]}, r"tools\[0\].function.parameters must be an object, got \[1\]"),
    ],
)
def test_function_with_invalid_field_is_refused(fields, message):
    with pytest.raises(ApiError, match=message):
        chosen_tools({"tools": [tool("f", **fields)]})
