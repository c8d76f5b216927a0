"""Tests of GrammarSpec: constructors, check(), equality, and texts that grammars accept."""

from __future__ import annotations

import enum
import json
import re
from typing import Any, Literal

import jsonschema
import numpy as np
import pytest
from guide_util import byte_vocabulary, fits

from graft.grammar import GrammarError, GrammarSpec, StructuralTag, XGrammarBackend, resolve_spec
from graft.grammar.spec import Marker
from graft.native.children import process

ANYTHING: Any = 3  # an argument of the wrong type
TAG = StructuralTag.of("<f>", {"type": "integer"}, "</f>")
ENDLESS: dict = {"type": "array"}
ENDLESS["items"] = ENDLESS
NO_TAG = StructuralTag("<f>", '{"type": "string", "pattern": "("}', "</f>")
ANY_CONTENT = StructuralTag("<f>", '{"minLength": 5, "maxLength": 3, "type": "string"}', "</f>")


def nested(levels: int) -> dict[str, Any]:
    """Return a schema of nested arrays."""
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


class Raises:
    """A model class whose method model_json_schema raises an exception."""

    @classmethod
    def model_json_schema(cls) -> Any:
        raise TypeError("no such thing")


@pytest.fixture
def no_child_process(monkeypatch):
    """Fail the test if a child process is started or called."""

    def fail(*_):
        pytest.fail("a child process was used")

    monkeypatch.setattr(process, "_spawn", fail)
    monkeypatch.setattr(process.ChildProcess, "call", fail)
    monkeypatch.setattr(process.ChildProcess, "start", fail)


def assert_one_sentence(error: BaseException) -> None:
    assert len(str(error)) < 300 and "\n" not in str(error)
    assert "no_forcing" not in str(error)  # from the line that graft adds to Lark grammars


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: GrammarSpec.choice([]), "at least one"),
        (lambda: GrammarSpec.choice("abc"), "list"),
        (lambda: GrammarSpec.choice(["a", ""]), "empty"),
        (lambda: GrammarSpec.choice(["a", None]), "must be a string, not NoneType"),
        (lambda: GrammarSpec.choice([True]), "must be a string, not bool"),
        (lambda: GrammarSpec.choice(["\ud800"]), "not Unicode"),
        (lambda: GrammarSpec.regex(""), "empty"),
        (lambda: GrammarSpec.regex(ANYTHING), "int"),
        (lambda: GrammarSpec.ebnf(""), "empty"),
        (lambda: GrammarSpec.json_schema("{"), "not JSON"),
        (lambda: GrammarSpec.json_schema("[1]"), "not list"),
        (lambda: GrammarSpec.json_schema("7"), "not int"),
        (lambda: GrammarSpec.json_schema(False), "no output"),
        (lambda: GrammarSpec.json_schema({"minimum": float("nan")}), "cannot be read"),
        (lambda: GrammarSpec.json_schema({"enum": [object()]}), "cannot be read"),
        (lambda: GrammarSpec.json_schema('{"items":' * 5000 + "{}" + "}" * 5000), "too deeply"),
        (lambda: GrammarSpec.json_schema(nested(5000)), "too deeply"),
        (lambda: GrammarSpec.json_schema({"properties": {1.5: {}}}), "key 1.5 is a float"),
        (lambda: GrammarSpec.json_schema({"const": [{None: 1}]}, backend="auto"), "key None"),
        (lambda: GrammarSpec.json_schema({(1, 2): 1}), "key .1, 2. is a tuple"),
        (lambda: GrammarSpec.choice(5), "not int"),
        (lambda: GrammarSpec.choice({"a": 1}), "not dict"),
        (lambda: GrammarSpec.choice(iter(())), "at least one"),
        (lambda: GrammarSpec("prose", "x"), "kind is 'prose'"),
        (lambda: GrammarSpec("regex", None), "regex text: must be a string, not NoneType"),
        (lambda: GrammarSpec("regex", "a", backend=3), "backend is 3"),
        (lambda: GrammarSpec(np.array(["regex"]), "a"), "kind is array.*, must be str"),
        (lambda: GrammarSpec("regex", "a", strict=[]), r"strict is \[\], must be bool or None"),
        (lambda: GrammarSpec("regex", "a", partial={}), r"partial is \{\}, must be bool"),
        (lambda: GrammarSpec("regex", "a", backend=[["x"]]), "backend is .*, must be str"),
        (lambda: GrammarSpec("regex", "a", backend=np.int64(3)), r"backend is np.int64\(3\)"),
        (lambda: GrammarSpec("regex", "a", key_order=np.array([1, 2])), "key_order is array"),
        (
            lambda: GrammarSpec("regex", "a", whitespace=nested(1000)),
            "whitespace is .*, must be str or int",
        ),
        (lambda: GrammarSpec("regex", "a", assert_formats=np.True_), "assert_formats is np.True_"),
        (lambda: GrammarSpec("regex", "a", marker="x"), "marker is 'x', must be Marker or None"),
        (
            lambda: GrammarSpec("regex", "a", marker=Marker([])),
            r"marker: text is \[\], must be str",
        ),
        (lambda: GrammarSpec("regex", "a", marker=Marker("x", required=[])), "required is"),
        (
            lambda: GrammarSpec("regex", "a", marker=Marker(token=[1])),
            r"token is \[1\], must be int",
        ),
        (lambda: GrammarSpec("json_schema", "{bad").schema, "not JSON"),
        (lambda: resolve_spec(GrammarSpec("json_schema", "{bad"), "auto"), "not JSON"),
        (lambda: GrammarSpec.json_schema({"minimum": "5"}), "#: minimum: must be a number"),
        (lambda: GrammarSpec.json_schema({"items": {"type": "foo"}}), "#/items: type: must be"),
        (lambda: GrammarSpec.json_schema({"required": "a"}), "#: required: must be a list"),
        (lambda: GrammarSpec.json_schema({"properties": [1]}), "must be a map of schemas, not"),
        (lambda: GrammarSpec.json_schema({"$ref": "#/nowhere"}), "#: \\$ref: .*nowhere"),
        (lambda: GrammarSpec.json_schema({}, whitespace=0), "whitespace 0 is unknown"),
        (lambda: GrammarSpec.json_schema({}, whitespace="tight"), "whitespace 'tight'"),
        (lambda: GrammarSpec.json_schema({}, whitespace=True), "whitespace True"),
        (lambda: GrammarSpec.json_schema({}, assert_formats=1.5), "assert_formats is 1.5"),
        (lambda: GrammarSpec.json_schema({}, key_order="any", whitespace=3), "not a number"),
        (lambda: GrammarSpec.json_schema(int), r"type int .*pass pydantic.TypeAdapter\(int\)"),
        (lambda: GrammarSpec.json_schema(list[int]), r"pass pydantic.TypeAdapter\(list\[int\]\)"),
        (lambda: GrammarSpec.json_schema(int | None), r"pass pydantic.TypeAdapter\(int \| None\)"),
        (lambda: GrammarSpec.json_schema(Raises), "model_json_schema: no such thing"),
        (lambda: GrammarSpec.regex(re.compile(b"a")), "must be a string, not bytes"),
        (lambda: GrammarSpec.structural_tag([TAG], ["<f"], at_least_one=ANYTHING), "be a bool"),
        (lambda: StructuralTag("", "{}", "]"), "tag begin: is empty"),
        (lambda: StructuralTag(ANYTHING, "{}", "]"), "tag begin: must be a string, not int"),
        (lambda: StructuralTag("[", "{bad", "]"), "tag schema: the text is not JSON"),
        (lambda: StructuralTag("[", "[1]", "]"), "tag schema: must be an object"),
        (lambda: StructuralTag("[", {}, "]"), "tag schema: must be JSON text, not dict"),
        (lambda: StructuralTag.of("[", {}, None), "tag end: must be a string, not NoneType"),
        (lambda: GrammarSpec.json_schema({"pattern": "\ud800", "type": "string"}), "not Unicode"),
        (lambda: GrammarSpec.lark(""), "empty"),
        (lambda: GrammarSpec.structural_tag([], ["<f"]), "at least one"),
        (lambda: GrammarSpec.structural_tag([TAG], []), "at least one"),
        (lambda: GrammarSpec.structural_tag([TAG], "<f"), "lists"),
        (lambda: GrammarSpec.structural_tag([TAG], 5), "lists"),
        (lambda: GrammarSpec.json_schema(ENDLESS), "cannot be read: Circular reference"),
        (lambda: GrammarSpec.structural_tag([TAG], ["<g"]), "begins with 0"),
        (lambda: GrammarSpec.structural_tag([TAG], ["<f", "<"]), "begins with 2"),
        (lambda: GrammarSpec.structural_tag([TAG], ["<f", "["]), r"no tag begins.*\["),
        (lambda: GrammarSpec.structural_tag([ANYTHING], ["<f"]), "a tag is a int"),
        (lambda: StructuralTag.of("<f>", False, ""), "schema false"),
        (lambda: GrammarSpec.regex("a").after(""), "marker: is empty"),
        (lambda: GrammarSpec.regex("a").after(-1), "token -1 is negative"),
        (lambda: GrammarSpec.regex("a").after(True), "not bool"),
        (lambda: GrammarSpec.regex("a").after("</a>", opening="\n<a>"), "begins with white space"),
        (lambda: GrammarSpec.regex("a").after("</a>", opening=3), "must be a string"),
    ],
)
def test_grammar_constructor_rejects_invalid_arguments(no_child_process, make, message):
    with pytest.raises(GrammarError, match=message) as caught:
        make()
    assert_one_sentence(caught.value)


@pytest.mark.parametrize(
    "spec, message",
    [
        (GrammarSpec.json_schema(nested(600), backend="auto"), "too deeply"),
        (GrammarSpec.json_schema({"type": "string", "pattern": "(a"}), "pattern: .*group"),
        (GrammarSpec.regex("a(b"), "regex: .*unclosed group"),
        (GrammarSpec.regex("[z-a]"), "regex: .*the start must be <= the end"),
        (GrammarSpec.regex("a(?=b)"), "regex: .*look-around"),
        (GrammarSpec.regex(r"(a)\1"), "regex: .*backreferences"),
        (GrammarSpec.ebnf("root ::= x"), 'ebnf: .*"x" is not defined'),
        (GrammarSpec.ebnf('root ::= "x'), "ebnf: .*string literal"),
        (GrammarSpec.ebnf('root ::= "x"', root="r"), 'ebnf: .*"r" is not found'),
        (GrammarSpec.lark("start: x"), 'lark: line 1, column 8: unknown name: "x"'),
        (GrammarSpec.lark('a: "b"'), "lark: no start rule found"),
        (GrammarSpec.lark('start: a\na: "b'), "lark: line 2, column 6: lexer error"),
        (GrammarSpec.lark("start: " + "(" * 50000), "lark: .*too deeply nested"),
        (GrammarSpec.structural_tag([NO_TAG], ["<f"]), "<f>.*unclosed group"),
        (GrammarSpec.structural_tag([ANY_CONTENT], ["<f"]), "minLength .5. is greater"),
    ],
)
def test_grammar_check_reports_syntax_errors(spec, message, capfd):
    """check() needs neither a vocabulary nor a model, and the libraries print nothing."""
    with pytest.raises(GrammarError, match=message) as caught:
        spec.check()
    assert_one_sentence(caught.value)
    assert capfd.readouterr().err == ""


def test_grammar_constructors_start_no_child_process(no_child_process):
    """Constructors start no process even for grammars whose check would fail or never end."""
    specs = [
        GrammarSpec.regex("(" * 100_000),
        GrammarSpec.regex("(a|a)*" * 1000),
        GrammarSpec.ebnf("root ::= " + "(" * 5000),
        GrammarSpec.lark("start: x"),
        GrammarSpec.choice(["a"]),
        GrammarSpec.json_object(),
        GrammarSpec.json_schema({"not": {"pattern": "a+"}}),
        GrammarSpec.json_schema({"not": {"pattern": "a+"}}, backend="llguidance", strict=True),
        GrammarSpec.json_schema({"uniqueItems": True}, backend="xgrammar"),
        GrammarSpec.structural_tag([NO_TAG], ["<f"], at_once=True).after("</think>"),
    ]
    assert len({hash(spec) for spec in specs}) == len(specs)
    GrammarSpec.choice(["a"]).check()  # accepted by every backend


def test_grammar_constructors_accept_models_enums_and_patterns():
    assert GrammarSpec.choice(c for c in "aba") == GrammarSpec.choice(["a", "b"])
    assert json.loads(GrammarSpec.choice([1, 2.5, "x"]).text) == ["1", "2.5", "x"]
    colours = enum.Enum("colours", {"RED": "r", "TWO": 2})
    assert GrammarSpec.choice(colours) == GrammarSpec.choice(["r", "2"])
    assert GrammarSpec.choice(Literal["r", 2]) == GrammarSpec.choice(["r", "2"])
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    model = type("Model", (), {"model_json_schema": classmethod(lambda cls: schema)})
    plain = type("Plain", (), {"__json_schema__": schema})
    adapter = type("Adapter", (), {"json_schema": lambda self: schema})
    for provider in (model, model(), adapter(), plain):
        assert GrammarSpec.json_schema(provider) == GrammarSpec.json_schema(schema)
    assert GrammarSpec.regex(re.compile("a+")) == GrammarSpec.regex("a+")
    assert GrammarSpec.regex(re.compile("a.", re.I | re.S)).text == "(?is)a."


@pytest.mark.parametrize(
    "wrapped, what",
    [
        ({"name": "n", "schema": {"type": "object"}, "strict": True}, "response_format.*'schema'"),
        ({"type": "json_schema", "json_schema": {"name": "n"}}, "response_format.*'json_schema'"),
        ({"schema": {"type": "object"}}, "response_format.*'schema'"),
        ({"type": "json_object", "schema": {"type": "object"}}, "response_format.*'schema'"),
        ({"response_schema": {"type": "object"}}, "Gemini's.*'response_schema'"),
        ({"responseSchema": {"type": "object"}}, "Gemini's.*'responseSchema'"),
        ({"name": "n", "description": "d", "input_schema": {}}, "Anthropic's.*'input_schema'"),
        ({"type": "function", "function": {"name": "n"}}, "a tool of OpenAI's.*'function'"),
        ({"name": "n", "parameters": {"type": "object"}}, "function of OpenAI's.*'parameters'"),
    ],
)
def test_json_schema_rejects_tool_descriptions(wrapped, what):
    """If a tool description were used as a schema, its unknown keywords would allow any JSON."""
    with pytest.raises(GrammarError, match=what):
        GrammarSpec.json_schema(wrapped)
    GrammarSpec.json_schema({**wrapped, "type": "object", "properties": {}})


def test_grammar_check_accepts_notation_of_any_backend():
    """A grammar is valid if at least one of the installed backends supports its syntax."""
    for pattern in (r"\p{L}+", "(?i)abc"):
        GrammarSpec.regex(pattern).check()
    GrammarSpec.lark('start: "a" /[0-9]+/').check()


def test_grammar_check_is_limited_in_time_and_stack(monkeypatch):
    """A grammar that exhausts a backend's stack or the time limit affects only a child process."""
    with pytest.raises(GrammarError, match="ebnf: "):
        GrammarSpec.ebnf("root ::= " + "(" * 5000).check()
    GrammarSpec.regex("a{1,100000}" * 30).check()
    monkeypatch.setattr(process, "TIMEOUT_S", 0.5)
    with pytest.raises(GrammarError, match="regex: "):
        GrammarSpec.regex("(" * 100_000).check()
    monkeypatch.setattr(process, "TIMEOUT_S", 0.0)
    # Checking this schema takes longer than the time limit.
    wide = {"properties": {str(i): nested(100) for i in range(300)}}
    for spec in (GrammarSpec.json_schema(wide), GrammarSpec.regex("a" * 300_000)):
        with pytest.raises(GrammarError, match=r"(JSON schema|regex): took longer than 0 s"):
            spec.check()


def test_grammar_specs_are_equal_by_content():
    """Schemas that list the same properties in different orders are different specifications."""
    a = GrammarSpec.json_schema({"properties": {"x": {}, "y": {}}, "type": "object"})
    b = GrammarSpec.json_schema('{"properties": {"x": {}, "y": {}}, "type": "object"}')
    c = GrammarSpec.json_schema({"properties": {"y": {}, "x": {}}, "type": "object"})
    assert a == b and hash(a) == hash(b)
    assert a != c


TEXTS = ['{"a": [1, 2]}', '{"a":[1,2]}', '{"a":  [1,\n 2]}', '{\n   "a" : [1,\n2]\n}']


@pytest.mark.parametrize(
    "whitespace, accepted",
    [
        ("line", [True, False, False, False]),
        ("compact", [False, True, False, False]),
        (2, [True, True, True, False]),
        ("any", [True, True, True, True]),
    ],
)
def test_json_schema_whitespace_option(backend, whitespace, accepted):
    """The option `whitespace` applies to JSON schemas and to the content of structural tags."""
    schema = {"type": "object", "properties": {"a": {"type": "array"}}, "required": ["a"]}
    spec = GrammarSpec.json_schema(schema, whitespace=whitespace)
    if (backend.name, whitespace) == ("XGrammar", "compact"):
        with pytest.raises(GrammarError, match="'compact' is not supported by XGrammar"):
            backend.compile(spec)
        return
    assert [fits(backend, spec, text) for text in TEXTS] == accepted
    tag = StructuralTag.of("<t>", schema, "</t>")
    tagged = GrammarSpec.structural_tag([tag], ["<t>"], whitespace=whitespace)
    assert [fits(backend, tagged, f"x<t>{text}</t>") for text in TEXTS] == accepted


def test_ebnf_dot_is_any_character(backend):
    """A dot in a string, a character class or a comment is literal."""
    spec = GrammarSpec.ebnf('root ::= . "." [.] # a comment.')
    for text, accepted in (("\n..", True), ("\u65e5..", True), ("x.x", False), ("xx.", False)):
        assert fits(backend, spec, text) == accepted


def test_json_object_accepts_exactly_json_objects(xgrammar):
    value = {"a": [1, 2.5, None, True, {"b": "\u00e9"}], "": {}}
    assert fits(xgrammar, GrammarSpec.json_object(), json.dumps(value, ensure_ascii=False))
    for other in ("[1]", "1", '"a"', "null"):
        assert not fits(xgrammar, GrammarSpec.json_object(), other)


# Schemas with a keyword that XGrammar ignores without an error, and an instance that violates it.
UNENFORCED = [
    ({"not": {"type": "string"}}, "x"),
    (
        {
            "type": "object",
            "if": {"required": ["a"]},
            "then": {"required": ["b"]},
            "properties": {"a": {}, "b": {}},
        },
        {"a": 1},
    ),
    ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, [1, 1]),
    ({"type": "array", "items": {}, "contains": {"type": "string"}}, [1]),
    (
        {"type": "object", "properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}},
        {"a": 1},
    ),
    ({"type": "object", "properties": {"bb": {}}, "propertyNames": {"enum": ["x"]}}, {"bb": 1}),
    (
        {
            "type": "object",
            "properties": {"ab": {}},
            "patternProperties": {"^a": {"type": "integer"}},
        },
        {"ab": "x"},
    ),
    ({"type": "object", "properties": {"a": {}}, "required": ["c"]}, {"a": 1}),
    ({"minimum": 5}, 3),
    ({"type": ["string", "integer"], "enum": [1.5, "a"]}, 1.5),
    ({"anyOf": [{"type": "string"}, {"type": "integer"}], "minimum": 5}, 3),
    ({"type": "object", "properties": {"a": {}}, "anyOf": [{"required": ["a"]}]}, {}),
    ({"$ref": "#/$defs/d", "minimum": 5, "$defs": {"d": {"type": "integer"}}}, 3),
    ({"enum": [1, 2, 3], "minimum": 2}, 1),
    ({"const": 1, "type": "string"}, 1),
    ({"type": "integer", "allOf": [{"minimum": 5}]}, 3),
    ({"type": "string", "pattern": "^a", "format": "date"}, "2026-11-22"),
]


@pytest.mark.parametrize("schema, instance", UNENFORCED)
def test_xgrammar_schema_with_ignored_keyword_is_refused_unless_partial(xgrammar, schema, instance):
    """The error names the keyword and its JSON pointer."""
    assert not jsonschema.Draft202012Validator(schema).is_valid(instance)
    partial = GrammarSpec.json_schema(schema, partial=True, backend="xgrammar")
    assert fits(xgrammar, partial, json.dumps(instance))  # the reason for the refusal
    with pytest.raises(GrammarError, match=r"cannot be enforced: #: \w+: XGrammar ignores"):
        GrammarSpec.json_schema(schema, backend="xgrammar").check()
    nested = {"type": "object", "properties": {"p": {"type": "array", "items": schema}}}
    if "$ref" not in schema:
        with pytest.raises(GrammarError, match="#/properties/p/items: "):
            GrammarSpec.json_schema(nested, backend="xgrammar").check()


def test_grammar_check_accepts_redundant_keywords_and_annotations():
    """A type next to an enum, for example, is redundant if all values of the enum have the type."""
    for schema in (
        {"type": "string", "enum": ["a", "b"], "title": "t", "description": "d", "default": "a"},
        {"type": ["integer", "null"], "const": None},
        {"type": "object", "anyOf": [{"type": "object"}, {"type": "object", "properties": {}}]},
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "$ref": "#/definitions/x",
            "minimum": 3,
            "definitions": {"x": {"type": "integer"}},
        },
        {"type": "array", "items": {"type": "integer"}, "minItems": 2, "uniqueItems": False},
        {"type": "object", "properties": {"not": {"type": "string"}, "if": {}}, "required": ["if"]},
        {"enum": [{"not": 1}]},
    ):
        GrammarSpec.json_schema(schema).check()


def test_matcher_treats_textual_stop_ids_as_text(xgrammar):
    """A stop id with text does not terminate the matcher.

    The test also checks that a backend rejects grammars that another backend compiled.
    """
    compiled = xgrammar.compile(GrammarSpec.regex("abc"))
    matcher = compiled.matcher([257, ord("b")])
    assert matcher.stop_ids == (257,)
    assert matcher.accept(ord("a")) and ord("b") in matcher.legal()
    assert matcher.accept(ord("b")) and matcher.accept(ord("c"))
    assert matcher.legal().tolist() == [257]
    with pytest.raises(GrammarError, match=r"all stop ids .* have text"):
        compiled.matcher([ord("b")])
    with pytest.raises(GrammarError, match="stop id 270 is outside"):
        compiled.matcher([270])
    with pytest.raises(GrammarError, match="another vocabulary"):
        XGrammarBackend(byte_vocabulary(300)).matcher(compiled)


@pytest.mark.parametrize("size", [266, 287, 288, 289, 320])
def test_bitmask_sets_only_text_and_stop_ids(size):
    """The bits of special ids, unused ids and columns beyond the vocabulary are never set."""
    backend = XGrammarBackend(byte_vocabulary(size))
    vocabulary = backend.vocabulary
    for spec in (GrammarSpec.json_object(), GrammarSpec.regex("(.|\\n)*")):
        matcher = backend.compile(spec).matcher()
        for byte in b'{"a\xc3':
            assert matcher.accept(byte)
            for token in matcher.legal().tolist():
                assert vocabulary.is_text(token) or token in matcher.stop_ids
