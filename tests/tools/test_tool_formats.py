"""Tests of the notations of calls: grammars, parsers, and their agreement."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
import random

import jsonschema
import pytest

pytest.importorskip("pydantic", reason="the extra serve is not installed")

from request_util import chat_request, chosen_tools, feed_calls

from graft.grammar import GrammarError, GrammarSpec, Vocabulary, make_backend
from graft.models.request import Limits
from graft.tools.serve.errors import ApiError
from graft.tools.serve.grammars import find_grammars
from graft.tools.serve.tool_formats import TOOL_FORMATS, find_tool_format
from graft.tools.serve.tool_formats.arguments import arguments_schema
from graft.tools.serve.tool_formats.parser import ToolCallParser

STOP = 256
BYTES = Vocabulary([bytes([byte]) for byte in range(256)] + [b""], 257, [STOP])

TOWN = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "its name"},
        "limit": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        "unit": {"enum": ["metric", "metric tons"]},
        "size": {"$ref": "#/$defs/size"},
        "exact": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "object"}},
        "code": {"type": "string", "pattern": "^[a-c]+$"},
    },
    "required": ["city", "size"],
    "$defs": {"size": {"type": ["integer", "null"]}},
    "additionalProperties": False,
}
ANY = {"type": "object", "properties": {"first": {"type": "integer"}, "x": {}}}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in (("town", TOWN), ("any", ANY), ("now", None), ("town2", ANY))
]
CITIES = ['a "b" \\ {}', "東京\n第二 😀", "</parameter>", "null", ""]
#: Arguments that a notation can express in only one way.
CALLS = [
    ("town", {"city": city, "size": 12, "tags": [{"a": [1, {"b": "}]"}]}]}) for city in CITIES
] + [
    ("town", {"city": "x", "limit": None, "unit": "metric", "size": None, "exact": True}),
    ("town", {"city": "x", "limit": "n", "unit": "metric tons", "size": 1, "code": "abc"}),
    ("town", {"city": "x", "limit": "nullify", "size": 1, "exact": False}),
    ("any", {"first": 1, "x": [{"y": "</tool_call>"}]}),
    ("any", {"x": False}),
    ("any", {}),
    ("now", {}),
    ("town2", {"x": {"z": None}}),
]
WRONG_CALLS = [
    ("town", {"city": "x"}),
    ("town", {"city": "x", "size": 1.5}),
    ("town", {"city": "x", "size": 1, "exact": 1}),
    ("town", {"city": "x", "unit": "imperial", "size": 1}),
    ("town", {"city": "x", "size": 1, "code": "d"}),
    ("town", {"city": "x", "size": 1, "other": 1}),
    ("any", {"first": 1.5}),
    ("now", {"first": 1}),
    ("unknown", {}),
]


def hermes_object(name, arguments, key="arguments"):
    return f'{{"name": "{name}", "{key}": {json.dumps(arguments, ensure_ascii=False)}}}'


def hermes(name, arguments):
    return f"<tool_call>\n{hermes_object(name, arguments)}\n</tool_call>"


def llama3_json(name, arguments):
    return hermes_object(name, arguments, "parameters")


def llama_function(name, arguments):
    return f"<function={name}>{json.dumps(arguments, ensure_ascii=False)}</function>"


def mistral(name, arguments, marker=""):
    return f"[TOOL_CALLS]{name}{marker}{json.dumps(arguments, ensure_ascii=False)}"


def qwen3_coder(name, arguments):
    text = f"<tool_call>\n<function={name}>\n"
    for key, value in arguments.items():
        if not isinstance(value, str) or key == "code":
            value = json.dumps(value, ensure_ascii=False)
        text += f"<parameter={key}>\n{value}\n</parameter>\n"
    return f"{text}</function>\n</tool_call>"


def pythonic_call(name, arguments, quote='"'):
    constants = {"true": "True", "false": "False", "null": "None"}
    texts = []
    for key, value in arguments.items():
        text = json.dumps(value, ensure_ascii=False)
        if isinstance(value, str) and quote == "'":
            text = f"'{value}'"
        texts.append(f"{key}={constants.get(text, text)}")
    return f"{name}({', '.join(texts)})"


def pythonic(name, arguments):
    return f"[{pythonic_call(name, arguments)}]"


#: Notations with functions that write one call, and several calls, in free text.
NOTATIONS = {
    "hermes": (hermes, "\n".join),
    "llama3_json": (llama3_json, "; ".join),
    "llama3_json/function": (llama_function, "; ".join),
    "llama3_json/python_tag": (
        lambda *call: f"<|python_tag|>{llama3_json(*call)}",
        lambda calls: "; ".join([calls[0], *(call[14:] for call in calls[1:])]),
    ),
    "mistral": (mistral, "".join),
    "mistral/args": (lambda *call: mistral(*call, marker="[ARGS]"), "".join),
    "mistral/array": (
        lambda *call: f"[TOOL_CALLS][{hermes_object(*call)}]",
        lambda calls: f"[TOOL_CALLS][{', '.join(call[13:-1] for call in calls)}]",
    ),
    "mistral/spaced array": (
        lambda *call: f"[TOOL_CALLS] [{hermes_object(*call)}]",
        lambda calls: f"[TOOL_CALLS] [{', '.join(call[14:-1] for call in calls)}]",
    ),
    "mistral/array with ids": (
        lambda *call: f'[TOOL_CALLS] [{hermes_object(*call)[:-1]}, "id": "0aZ123456"}}]',
        lambda calls: f"[TOOL_CALLS] [{', '.join(call[14:-1] for call in calls)}]",
    ),
    "qwen3_coder": (qwen3_coder, "\n".join),
    "pythonic": (pythonic, lambda calls: f"[{', '.join(call[1:-1] for call in calls)}]"),
}


@pytest.fixture(scope="module", params=["llguidance", "xgrammar"])
def backend(request):
    if importlib.util.find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    return make_backend(request.param, BYTES)


@functools.cache
def compiled_grammar(backend, form, fields):
    """Return the grammar of the calls of a request, whose `fields` are JSON."""
    output = TOOL_FORMATS[form].output(chosen_tools(json.loads(fields)))
    return backend.compile(GrammarSpec.structural_format(output))


def accepter(backend, form, **fields):
    """Return a function that returns whether the grammar of a request allows a text or ids."""
    return accepter_of(compiled_grammar(backend, form, json.dumps({"tools": TOOLS, **fields})))


def accepter_of(compiled):
    """Return a function that returns whether a compiled grammar allows a text or ids."""

    def accepts(text):
        matcher = compiled.matcher()
        ids = text.encode() if isinstance(text, str) else text
        return all(map(matcher.accept, ids)) and matcher.accept(STOP)

    return accepts


def parse(form, text, size=10_000, **fields):
    """Return the content and the calls of a text that arrives in pieces of some size."""
    parser = ToolCallParser(chosen_tools({"tools": TOOLS, **fields}), TOOL_FORMATS[form])
    pieces = [text[at : at + size] for at in range(0, len(text), size)] or [""]
    content, calls = feed_calls(parser, pieces)
    assert parser.cut_text == ""
    return content, [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("notation", NOTATIONS)
@pytest.mark.full("xgrammar-mistral/", "xgrammar-llama3_json/")
def test_grammar_of_calls_allows_what_the_schemas_allow(backend, notation):
    form = notation.split("/")[0]
    write, join = NOTATIONS[notation]
    schemas = {"town": TOWN, "any": ANY, "town2": ANY}
    for call in (*CALLS, *WRONG_CALLS[:-2]):
        validator = jsonschema.Draft202012Validator(schemas.get(call[0], {}))
        assert validator.is_valid(call[1]) == (call in CALLS)
    in_text = accepter(backend, form)
    assert [call for call in CALLS if not in_text(write(*call))] == []
    # The call of an unknown function is free text in a notation without a trigger.
    assert [call for call in WRONG_CALLS[:-1] if in_text(write(*call))] == []
    assert in_text(write(*WRONG_CALLS[-1])) == (notation in ("llama3_json", "pythonic"))
    assert in_text(join([write(*call) for call in CALLS]))
    for text in ("", "so it is", '{"name": "Rome", "size": [1]}', "東京 <b>[1, 2]</b>"):
        assert in_text(text)
    one = accepter(backend, form, tool_choice="required", parallel_tool_calls=False)
    several = accepter(backend, form, tool_choice="required")
    for call in CALLS:
        assert one(write(*call))
        assert several(join([write(*call)]))
    assert [call for call in WRONG_CALLS if one(write(*call))] == []
    assert several(join([write(*call) for call in CALLS]))
    assert not one(join([write(*CALLS[0]), write(*CALLS[1])]))
    assert not any(one(text) or several(text) for text in ("", "so", f"so {write(*CALLS[0])}"))


@pytest.mark.parametrize("notation", NOTATIONS)
@pytest.mark.full("xgrammar-mistral", "xgrammar-llama3_json", "xgrammar-pythonic")
def test_grammar_allows_one_call_without_parallel_calls(backend, notation):
    """The call ends the output. Text may precede the call, except in Python's notation."""
    form = notation.split("/")[0]
    write, join = NOTATIONS[notation]
    named = {"type": "function", "function": {"name": "town"}}
    for choice in ("auto", "required", named):
        fields = {"tool_choice": choice, "parallel_tool_calls": False}
        accepts = accepter(backend, form, **fields)
        calls = [write(*call) for call in CALLS[:2]]
        assert all(map(accepts, calls))
        assert accepts(f"so:\n{calls[0]}") == (choice == "auto")
        assert accepts("so it is. {[<") == (choice == "auto")
        assert not accepts(join(calls))
        assert not any(accepts(f"{calls[0]}{text}") for text in (" ", "\n", "; ", calls[1]))
        assert accepts(write(*CALLS[-1])) == (choice != named)


#: Texts that are special tokens of the tokenizers of models that write the notation.
SPECIAL_TOKENS = {
    "hermes": ["<tool_call>", "</tool_call>"],
    "llama3_json": ["<|python_tag|>"],
    "mistral": ["[TOOL_CALLS]", "[ARGS]"],
    "qwen3_coder": ["<tool_call>", "</tool_call>"],
    "pythonic": [],
}


@pytest.mark.parametrize("notation", NOTATIONS)
def test_special_tokens_are_legal_instead_of_their_names_in_calls(notation):
    """Each marker of a notation may be a token or be spelled, in calls but not in arguments."""
    form = notation.split("/")[0]
    write, join = NOTATIONS[notation]
    backend, names = backend_with_markers(form)
    markers = SPECIAL_TOKENS[form]
    assert list(names) == markers
    for choice, parallel in itertools.product(("auto", "required"), (True, False)):
        fields = {"tool_choice": choice, "parallel_tool_calls": parallel}
        accepts = accepter(backend, form, **fields)
        calls = [("town", {"city": "x", "size": 1}), ("now", {})]
        text = join([write(*call) for call in calls[: 1 + parallel]])
        used = [name for name in markers if name in text]
        for named in (used, used[:1], used[1:]):
            ids = list(text.encode())
            for name in named:
                ids = replaced(ids, list(name.encode()), [names[name]])
            assert accepts(ids)
        for name in markers:
            call = write("town", {"city": f"x{name}", "size": 1})
            at = call.index(f"x{name}") + 1
            begin, end = call[:at], call[at + len(name) :]
            assert accepts((begin + name + end).encode())
            assert not accepts([*begin.encode(), names[name], *end.encode()])


@functools.cache
def backend_with_markers(form):
    """Return a backend in whose vocabulary the markers of a notation are tokens, and their ids."""
    names = {name: STOP + 1 + i for i, name in enumerate(TOOL_FORMATS[form].markers)}
    tokens = [bytes([byte]) for byte in range(256)] + [b""] * (len(names) + 1)
    return make_backend("llguidance", Vocabulary(tokens, len(tokens), [STOP], names)), names


def replaced(ids, old, new):
    """Return the list `ids` with each occurrence of the list `old` replaced by `new`."""
    out = []
    at = 0
    while at < len(ids):
        found = ids[at : at + len(old)] == old
        out += new if found else ids[at : at + 1]
        at += len(old) if found else 1
    return out


@pytest.mark.parametrize("size", [1, 3, 10_000])
@pytest.mark.parametrize("notation", NOTATIONS)
def test_parser_returns_the_calls_that_were_written(notation, size):
    form = notation.split("/")[0]
    write, join = NOTATIONS[notation]
    text = join([write(*call) for call in CALLS])
    assert parse(form, text, size) == ("", CALLS)
    assert parse(form, text, size, tool_choice="required") == ("", CALLS)
    for call in CALLS:
        assert parse(form, write(*call), size) == ("", [call])
    for before in ("", "so:\n", "a <tool [TOOL_CALL <|python {"):
        if form != "pythonic" or not before:
            assert parse(form, before + text, size) == (before, CALLS)
        assert parse(form, before, size) == (before, [])
    named = {"type": "function", "function": {"name": "town"}}
    assert parse(form, write(*CALLS[0]), size, tool_choice=named) == ("", CALLS[:1])


def cut(form, text, **fields):
    """Return the content, the calls and the text of the last call of an output that was cut."""
    parser = ToolCallParser(chosen_tools({"tools": TOOLS, **fields}), TOOL_FORMATS[form])
    contents = [parser.feed(char, False)[0] for char in text]
    contents.append(parser.feed("", True)[0])
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in parser.calls]
    return "".join(contents), calls, parser.cut_text


@pytest.mark.parametrize("notation", NOTATIONS)
def test_parser_reports_the_call_that_was_cut(notation):
    """A call that is cut before its arguments is content. If it is cut later, it is incomplete."""
    form = notation.split("/")[0]
    write, join = NOTATIONS[notation]
    first, second = CALLS[0], CALLS[-1]
    text = write(*first)
    whole = parse(form, text)[1][0]
    states = set()
    for length in range(len(text)):
        content, calls, cut_text = cut(form, text[:length])
        if cut_text:
            states.add("cut")
            assert content + cut_text == text[:length]
            assert [name for name, _ in calls] == [whole[0]]
        elif calls:
            states.add("complete")
            assert (content, [(n, json.loads(a)) for n, a in calls]) == ("", [whole])
        else:
            states.add("content")
            assert content == text[:length]
    assert {"cut", "content"} <= states
    both = join([text, write(*second)])
    _, calls, cut_text = cut(form, both[:-6])
    assert calls[0][0] == first[0] and calls[1][0] == second[0]
    assert both[:-6].endswith(cut_text)


def test_pythonic_string_in_single_quotes_is_read():
    """Texts in single quotes have no escape sequences."""
    arguments = {"city": "東京 {x}, y", "size": -1.5e3}
    text = f"[{pythonic_call('town', arguments, quote=chr(39))}]"
    assert "city='東京 {x}, y'" in text
    for size in (1, 100):
        assert parse("pythonic", text, size) == ("", [("town", arguments)])


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"anyOf": [{"type": "object"}]}, "the schema of the object has the keyword anyOf"),
        ({"required": ["a"]}, "'a' is required, but is none of the properties"),
        ({"properties": {"a>": {}}}, "a property is named 'a>'"),
        (
            {"properties": {"a": {}, "b": {"items": {"$ref": "#/properties/a"}}}},
            "b: #/items refers to '#/properties/a'",
        ),
    ],
)
@pytest.mark.parametrize("form", ["qwen3_coder", "pythonic"])
def test_schema_that_a_notation_cannot_express_is_refused(form, schema, message):
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    with pytest.raises(ApiError) as error:
        TOOL_FORMATS[form].output(chosen_tools({"tools": tools}))
    assert f"function 'f': parameters: {message}" in str(error.value)
    TOOL_FORMATS["hermes"].output(chosen_tools({"tools": tools}))


@pytest.mark.parametrize("form", TOOL_FORMATS)
def test_function_whose_arguments_cannot_be_an_object_is_refused(form):
    for types in ("array", ["string", "null"]):
        tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": types}}}]
        with pytest.raises(ApiError, match="'f': parameters must be the schema of an obj") as error:
            TOOL_FORMATS[form].output(chosen_tools({"tools": tools}))
        assert error.value.param == "tools"


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "objekt"}, "type: must be a type of JSON"),
        ({"properties": None}, "properties: must be a map of schemas"),
        ({"properties": {"a": "integer"}}, "properties: must be a map of schemas"),
        ({"properties": {"a": {}}, "required": None}, "required: must be a list of names"),
        ({"properties": {"a": {}}, "required": "a"}, "required: must be a list of names"),
        ({"properties": {"a": {"enum": "xyz"}}}, "enum: must be a list"),
        ({"properties": {"a": {"anyOf": 5}}}, "anyOf: must be a list of schemas"),
        ({"properties": {"a": {"$ref": 5}}}, "$ref: must be a string"),
        ({"properties": {"a": {"$ref": "#/$defs/x"}}}, "$ref: '#/$defs/x' points to nothing"),
        ({"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": 5}, "$defs: must be a map"),
    ],
)
@pytest.mark.parametrize("form", TOOL_FORMATS)
def test_parameters_that_are_no_schema_are_refused(form, schema, message):
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    with pytest.raises(ApiError) as error:
        TOOL_FORMATS[form].output(chosen_tools({"tools": tools}))
    assert "function 'f': parameters: JSON schema: #" in str(error.value)
    assert message in str(error.value) and error.value.param == "tools"


@pytest.mark.parametrize("key", ["a b", "$top", "@type", "x:y", "a/b", "größe", 'a"b'])
def test_tags_of_qwen3_coder_can_contain_any_name(backend, key):
    schema = {"type": "object", "properties": {key: {"type": "string"}}, "required": [key]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    text = qwen3_coder("f", {key: "v"})
    assert accepter(backend, "qwen3_coder", tools=tools)(text)
    for size in (1, 100):
        assert parse("qwen3_coder", text, size, tools=tools) == ("", [("f", {key: "v"})])


#: Schemas that do not say themselves that arguments are an object.
UNTYPED = [
    {"properties": {"a": {"type": "integer"}}, "required": ["a"]},
    {"properties": {"a": {"type": "integer"}}, "required": ["a"], "type": ["object", "null"]},
    {
        "$ref": "#/$defs/x",
        "$defs": {
            "x": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "next": {"$ref": "#/$defs/x"}},
                "required": ["a"],
            }
        },
    },
]


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("notation", NOTATIONS)
def test_arguments_are_an_object_also_if_the_schema_has_no_type(backend, notation, choice):
    form = notation.split("/")[0]
    write, join = NOTATIONS[notation]
    for schema in UNTYPED:
        tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
        accepts = accepter(backend, form, tools=tools, tool_choice=choice)
        assert accepts(join([write("f", {"a": 1})]))
        assert not accepts(join([write("f", {"a": "x"})]))
        if form not in ("qwen3_coder", "pythonic"):  # these two can only express objects
            assert not any(accepts(join([write("f", value)])) for value in ("", 1, [], None))


def test_type_of_arguments_is_added_only_where_it_is_missing():
    """XGrammar refuses a type next to a reference or a union."""
    typed = {"type": "object", "properties": {"a": {"type": "integer"}}}
    untyped = {"properties": {"a": {"type": "integer"}}}
    for target, is_complete in ((typed, True), (untyped, False)):
        reference = {"$ref": "#/$defs/x"}
        for schema in (
            target,
            {"anyOf": [reference, typed]},
            {"oneOf": [typed, reference]},
            {"allOf": [reference]},
        ):
            schema = {**schema, "$defs": {"x": target}}
            found = arguments_schema({"name": "f", "parameters": schema})
            assert found == (schema if is_complete else {**schema, "type": "object"})


@pytest.mark.parametrize("schema", [{"enum": ["a b", True, None, 2, "it's"]}, {"const": "x"}])
def test_values_of_an_enumeration_are_written_as_in_python_or_json(backend, schema):
    parameters = {"type": "object", "properties": {"p": schema}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    accepts = accepter(backend, "pythonic", tools=tools)
    for value in schema.get("enum", ["x"]):
        for text in (repr(value), json.dumps(value)):
            written = f"[f(p={text})]"
            assert accepts(written)
            assert parse("pythonic", written, tools=tools) == ("", [("f", {"p": value})])
    assert not any(accepts(f"[f(p={text})]") for text in ("'y'", "False", "false", "3"))


@pytest.mark.parametrize("form", ["qwen3_coder", "pythonic", "mistral"])
def test_function_name_that_a_notation_cannot_express_is_refused(form):
    tools = [{"type": "function", "function": {"name": "f (x)"}}]
    with pytest.raises(ApiError, match=f"{form} cannot express the function name 'f .x.'"):
        TOOL_FORMATS[form].output(chosen_tools({"tools": tools}))


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (None, "hermes"),
        ("{{ messages }}", "hermes"),
        ('return <tool_call>{"name": ..., "arguments": ...}</tool_call>', "hermes"),
        ("<tool_call>\n<function=example>\n<parameter=a>", "qwen3_coder"),
        ("{{- '[TOOL_CALLS]' + call.name + '[ARGS]' }}", "mistral"),
        ("{{- '<|python_tag|>' + call.name }}", "llama3_json"),
        ('Respond in the format {"name": function name, "parameters": dictionary}.', "llama3_json"),
        ('{"name": "f"}, {"parameters": 1}', "hermes"),
        ("Write calls as [first_name(a=1, b=2), second_name(c=3)].", "pythonic"),
        ("{{ messages[-1].content[f(a) == 1] }}", "hermes"),
    ],
)
def test_chat_template_determines_the_notation(template, name):
    assert find_tool_format(template).name == name


@pytest.mark.parametrize(
    ("template", "warns"),
    [
        (None, False),
        ("{% for tool in tools %}{{ tool }}{% endfor %}", False),
        ("{% for c in m.tool_calls %}<|call|>{{ c.name }}<|sep|>{{ c.arguments }}", True),
        ("{% for c in m.tool_calls %}<tool_call>{{ c.name }}<key>{{ c.arguments }}", True),
        ('{% for c in m.tool_calls %}<tool_call>\n{"name": 1, "arguments": 2}', False),
        ("{% for c in m.tool_calls %}{{ '<tool_call>{\\\"arguments\\\": ' }}", False),
    ],
)
def test_unknown_notation_of_a_chat_template_is_logged(template, warns, caplog):
    assert find_tool_format(template).name == "hermes"
    assert ["--tool-call-parser" in record.message for record in caplog.records] == [True] * warns


#: Schemas of parameters, with a value.
PARAMETERS = [
    ({"type": "string"}, "a,b"),
    ({"type": "integer"}, -12),
    ({"type": "boolean"}, True),
    ({"enum": ["fast", "fast 2"]}, "fast"),
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
    ({}, {"a": [1.5]}),
    ({"type": ["number", "null"]}, 2.5),
]


@pytest.mark.parametrize("count", [15, pytest.param(600, marks=pytest.mark.full)])
@pytest.mark.parametrize("form", ["qwen3_coder", "pythonic"])
def test_optional_parameters_can_be_combined_in_any_way(form, count):
    """LLGuidance's lexer sees where each of the arguments ends."""
    backend = make_backend("llguidance", BYTES)
    rng = random.Random(count)
    write = {"qwen3_coder": qwen3_coder, "pythonic": pythonic}[form]
    for _ in range(count):
        chosen = rng.choices(PARAMETERS, k=rng.randint(1, 5))
        values = {f"p{i}": value for i, (_, value) in enumerate(chosen)}
        schema = {
            "type": "object",
            "properties": {f"p{i}": schema for i, (schema, _) in enumerate(chosen)},
            "required": [key for key in values if rng.random() < 0.3],
        }
        tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
        for choice in ("auto", "required"):
            tool_choice = chosen_tools({"tools": tools, "tool_choice": choice})
            spec = GrammarSpec.structural_format(TOOL_FORMATS[form].output(tool_choice))
            compiled = backend.compile(spec)
            for _ in range(4):
                arguments = {key: value for key, value in values.items() if rng.random() < 0.6}
                text = write("f", arguments)
                matcher = compiled.matcher()
                found = all(map(matcher.accept, text.encode())) and matcher.accept(STOP)
                assert found == (set(schema["required"]) <= set(arguments)), (schema, text)


@pytest.mark.parametrize("form", TOOL_FORMATS)
def test_error_names_the_function_whose_schema_cannot_be_enforced(form):
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    tools = [*TOOLS, {"type": "function", "function": {"name": "f", "parameters": schema}}]
    spec = GrammarSpec.structural_format(TOOL_FORMATS[form].output(chosen_tools({"tools": tools})))
    place = "parameter 'a': JSON schema: cannot be enforced: #: uniqueItems"
    if form not in ("qwen3_coder", "pythonic"):
        place = "parameters: JSON schema: cannot be enforced: #/properties/a: uniqueItems"
    with pytest.raises(GrammarError, match=f"structural format: function 'f': {place}"):
        spec.check()


@functools.cache
def grammar_with_response_format(form, parallel):
    """Return the grammar of a request that has tools and a response format."""
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    fields = {
        "tools": TOOLS,
        "parallel_tool_calls": parallel,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    }
    found, _ = find_grammars(chat_request(**fields), Limits(), TOOL_FORMATS[form])
    spec = GrammarSpec.structural_format(found.value["format"])
    return make_backend("llguidance", BYTES).compile(spec)


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("notation", NOTATIONS)
def test_output_consists_of_calls_or_satisfies_response_format(notation, parallel):
    write, join = NOTATIONS[notation]
    accepts = accepter_of(grammar_with_response_format(notation.split("/")[0], parallel))
    calls = [write(*CALLS[0]), write(*CALLS[-1])]
    assert accepts('{"name": "town"}')
    assert accepts(calls[0]) == (notation != "llama3_json")
    assert accepts(join(calls)) == (parallel and notation != "llama3_json")
    assert not any(map(accepts, ["", "so", f"so {calls[0]}", '{"name": 1}']))
