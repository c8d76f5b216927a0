"""What a grammar specification accepts and refuses."""

from __future__ import annotations

import enum
import json
import re
from typing import Any

import jsonschema
import pytest
from guide_util import byte_vocabulary, fits

from graft.grammar import GrammarError, GrammarSpec, StructuralTag, XGrammarBackend, resolved
from graft.native.children import process

ANYTHING: Any = 3  # what a type checker would not let pass
TAG = StructuralTag.of("<f>", {"type": "integer"}, "</f>")
ENDLESS: dict = {"type": "array"}
ENDLESS["items"] = ENDLESS
NO_TAG = StructuralTag("<f>", '{"type": "string", "pattern": "("}', "</f>")
ANY_CONTENT = StructuralTag("<f>", '{"minLength": 5, "maxLength": 3, "type": "string"}', "</f>")


def nested(levels: int) -> dict[str, Any]:
    """A schema of arrays of arrays."""
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


class Raises:
    """What makes no schema."""

    @classmethod
    def model_json_schema(cls) -> Any:
        raise TypeError("no such thing")


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
        (lambda: GrammarSpec.json_schema(nested(600), backend="auto"), "too deeply"),
        (lambda: GrammarSpec.json_schema({"properties": {1.5: {}}}), "key 1.5 is a float"),
        (lambda: GrammarSpec.json_schema({"const": [{None: 1}]}, backend="auto"), "key None"),
        (lambda: GrammarSpec.json_schema({(1, 2): 1}), "key .1, 2. is a tuple"),
        (lambda: GrammarSpec.choice(5), "not int"),
        (lambda: GrammarSpec.choice({"a": 1}), "not dict"),
        (lambda: GrammarSpec.choice(iter(())), "at least one"),
        (lambda: GrammarSpec("prose", "x"), "kind is 'prose'"),
        (lambda: GrammarSpec("regex", None), "regex text: must be a string, not NoneType"),
        (lambda: GrammarSpec("regex", "a", backend=3), "backend is 3"),
        (lambda: GrammarSpec("json_schema", "{bad").schema, "not JSON"),
        (lambda: resolved(GrammarSpec("json_schema", "{bad"), "auto"), "not JSON"),
        (lambda: GrammarSpec.json_schema({"minimum": "5"}), "#: minimum: must be a number"),
        (lambda: GrammarSpec.json_schema({"items": {"type": "foo"}}), "#/items: type: must be"),
        (lambda: GrammarSpec.json_schema({"required": "a"}), "#: required: must be a list"),
        (lambda: GrammarSpec.json_schema({"properties": [1]}), "must be a map of schemas, not"),
        (lambda: GrammarSpec.json_schema({"$ref": "#/nowhere"}), "#: \\$ref: .*nowhere"),
        (lambda: GrammarSpec.json_schema({"type": "string", "pattern": "(a"}), "pattern: .*group"),
        (lambda: GrammarSpec.json_schema({}, whitespace=0), "whitespace 0 is unknown"),
        (lambda: GrammarSpec.json_schema({}, whitespace="tight"), "whitespace 'tight'"),
        (lambda: GrammarSpec.json_schema({}, whitespace=True), "whitespace True"),
        (lambda: GrammarSpec.json_schema({}, assert_formats=1.5), "assert_formats is 1.5"),
        (lambda: GrammarSpec.json_schema({}, key_order="any", whitespace=3), "not a number"),
        (lambda: GrammarSpec.json_schema(int), "class int has neither model_json_schema"),
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
        (lambda: GrammarSpec.regex("a(b"), "regex: .*unclosed group"),
        (lambda: GrammarSpec.regex("[z-a]"), "regex: .*the start must be <= the end"),
        (lambda: GrammarSpec.regex("a(?=b)"), "regex: .*look-around"),
        (lambda: GrammarSpec.regex(r"(a)\1"), "regex: .*backreferences"),
        (lambda: GrammarSpec.ebnf("root ::= x"), 'ebnf: .*"x" is not defined'),
        (lambda: GrammarSpec.ebnf('root ::= "x'), "ebnf: .*string literal"),
        (lambda: GrammarSpec.ebnf('root ::= "x"', root="r"), 'ebnf: .*"r" is not found'),
        (lambda: GrammarSpec.lark("start: x"), 'lark: line 1, column 8: unknown name: "x"'),
        (lambda: GrammarSpec.lark('a: "b"'), "lark: no start rule found"),
        (lambda: GrammarSpec.lark('start: a\na: "b'), "lark: line 2, column 6: lexer error"),
        (lambda: GrammarSpec.lark("start: " + "(" * 50000), "lark: .*too deeply nested"),
        (lambda: GrammarSpec.structural_tag([NO_TAG], ["<f"]), "<f>.*unclosed group"),
        (lambda: GrammarSpec.structural_tag([ANY_CONTENT], ["<f"]), "minLength .5. is greater"),
    ],
)
def test_bad_specs_are_refused_when_made(make, message, capfd):
    """What is no grammar raises GrammarError at once, and says why in one sentence; so does one
    with an error of syntax, without a vocabulary or a model."""
    with pytest.raises(GrammarError, match=message) as caught:
        make()
    assert len(str(caught.value)) < 300 and "\n" not in str(caught.value)
    assert "no_forcing" not in str(caught.value)
    assert capfd.readouterr().err == ""


def test_grammars_may_come_from_what_states_them():
    """Generators, numbers and enums make choices; models, schemas; compiled patterns, regexes."""
    assert GrammarSpec.choice(c for c in "aba") == GrammarSpec.choice(["a", "b"])
    assert json.loads(GrammarSpec.choice([1, 2.5, "x"]).text) == ["1", "2.5", "x"]
    colours = enum.Enum("colours", {"RED": "r", "TWO": 2})
    assert GrammarSpec.choice(colours) == GrammarSpec.choice(["r", "2"])
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    model = type("Model", (), {"model_json_schema": classmethod(lambda cls: schema)})
    plain = type("Plain", (), {"__json_schema__": schema})
    for maker in (model, model(), plain):
        assert GrammarSpec.json_schema(maker) == GrammarSpec.json_schema(schema)
    assert GrammarSpec.regex(re.compile("a+")) == GrammarSpec.regex("a+")
    assert GrammarSpec.regex(re.compile("a.", re.I | re.S)).text == "(?is)a."


@pytest.mark.parametrize(
    "wrapped, what",
    [
        ({"name": "n", "schema": {"type": "object"}, "strict": True}, "response_format.*'schema'"),
        ({"type": "json_schema", "json_schema": {"name": "n"}}, "response_format.*'json_schema'"),
        ({"name": "n", "description": "d", "input_schema": {}}, "Anthropic's.*'input_schema'"),
        ({"type": "function", "function": {"name": "n"}}, "a tool of OpenAI's.*'function'"),
        ({"name": "n", "parameters": {"type": "object"}}, "function of OpenAI's.*'parameters'"),
    ],
)
def test_descriptions_of_tools_are_not_taken_for_any_json(wrapped, what):
    """What holds a schema, and says nothing else that a schema says, is refused by its name."""
    with pytest.raises(GrammarError, match=what):
        GrammarSpec.json_schema(wrapped)
    GrammarSpec.json_schema({**wrapped, "type": "object", "properties": {}})


def test_a_grammar_that_one_backend_reads_is_taken():
    """Notation that only one backend knows is no error; which one compiles it is known later."""
    for pattern in (r"\p{L}+", "(?i)abc"):
        assert GrammarSpec.regex(pattern).text == pattern
    assert GrammarSpec.lark('start: "a" /[0-9]+/').kind == "lark"


def test_reading_a_huge_grammar_harms_nobody(monkeypatch):
    """Nesting and repetition that exhaust a backend's stack or time are read in another process,
    and no longer than a grammar may take."""
    with pytest.raises(GrammarError, match="ebnf: "):
        GrammarSpec.ebnf("root ::= " + "(" * 5000)
    assert GrammarSpec.regex("a{1,100000}" * 30).kind == "regex"
    monkeypatch.setattr(process, "LIMIT_S", 0.5)
    with pytest.raises(GrammarError, match="regex: "):
        GrammarSpec.regex("(" * 100_000)
    monkeypatch.setattr(process, "LIMIT_S", 0.0)
    wide = {"properties": {str(i): nested(100) for i in range(300)}}  # not answered at once
    for state in (lambda: GrammarSpec.json_schema(wide), lambda: GrammarSpec.regex("a" * 300_000)):
        with pytest.raises(GrammarError, match=r"(JSON schema|regex): took longer than 0 s"):
            state()


def test_specs_are_equal_by_content_and_keep_property_order():
    """Equal specs hash alike; the order of properties is part of a schema's text."""
    a = GrammarSpec.json_schema({"properties": {"x": {}, "y": {}}, "type": "object"})
    b = GrammarSpec.json_schema('{"properties": {"x": {}, "y": {}}, "type": "object"}')
    c = GrammarSpec.json_schema({"properties": {"y": {}, "x": {}}, "type": "object"})
    assert a == b and hash(a) == hash(b)
    assert a != c


TEXTS = ['{"a": [1, 2]}', '{"a":[1,2]}', '{"a":  [1,\n 2]}', '{\n   "a" : [1,\n2]\n}']


@pytest.mark.parametrize(
    "whitespace, taken",
    [
        ("line", [True, False, False, False]),
        ("compact", [False, True, False, False]),
        (2, [True, True, True, False]),
        ("any", [True, True, True, True]),
    ],
)
def test_white_space_is_the_users_choice(backend, whitespace, taken):
    """One line, none, at most so many characters, any: with both backends, and in tags."""
    schema = {"type": "object", "properties": {"a": {"type": "array"}}, "required": ["a"]}
    spec = GrammarSpec.json_schema(schema, whitespace=whitespace)
    if (backend.name, whitespace) == ("XGrammar", "compact"):
        with pytest.raises(GrammarError, match="XGrammar writes spaces"):
            backend.compile(spec)
        return
    assert [fits(backend, spec, text) for text in TEXTS] == taken
    tag = StructuralTag.of("<t>", schema, "</t>")
    tagged = GrammarSpec.structural_tag([tag], ["<t>"], whitespace=whitespace)
    assert [fits(backend, tagged, f"x<t>{text}</t>") for text in TEXTS] == taken


def test_a_dot_in_gbnf_is_any_character(backend):
    """Outside strings and classes, with both backends."""
    spec = GrammarSpec.ebnf('root ::= . "." [.] # a comment.')
    for text, taken in (("\n..", True), ("\u65e5..", True), ("x.x", False), ("xx.", False)):
        assert fits(backend, spec, text) == taken


def test_json_object_is_any_object_and_nothing_else(xgrammar):
    """json_object takes nested values of any kind, and no array or number at the top."""
    value = {"a": [1, 2.5, None, True, {"b": "\u00e9"}], "": {}}
    assert fits(xgrammar, GrammarSpec.json_object(), json.dumps(value, ensure_ascii=False))
    for other in ("[1]", "1", '"a"', "null"):
        assert not fits(xgrammar, GrammarSpec.json_object(), other)


# Schemas with an instance that violates a part XGrammar ignores without a word.
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
def test_what_cannot_be_enforced_is_refused_unless_partial(xgrammar, schema, instance):
    """Each of these lets an invalid instance through XGrammar: refused by name and place."""
    assert not jsonschema.Draft202012Validator(schema).is_valid(instance)
    partial = GrammarSpec.json_schema(schema, partial=True, backend="xgrammar")
    assert fits(xgrammar, partial, json.dumps(instance))  # the reason for the refusal
    with pytest.raises(GrammarError, match=r"cannot be enforced: #: \w+: XGrammar ignores"):
        GrammarSpec.json_schema(schema, backend="xgrammar")
    nested = {"type": "object", "properties": {"p": {"type": "array", "items": schema}}}
    if "$ref" not in schema:
        with pytest.raises(GrammarError, match="#/properties/p/items: "):
            GrammarSpec.json_schema(nested, backend="xgrammar")


def test_harmless_neighbours_are_not_refused():
    """A type that agrees with its enum or branches, and annotations, change nothing."""
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
        GrammarSpec.json_schema(schema)


def test_stop_ids_that_are_text_stay_text(xgrammar):
    """A textual stop id is legal where the grammar has it as text; it cannot end the grammar, of
    which no backend but its own makes a matcher."""
    compiled = xgrammar.compile(GrammarSpec.regex("abc"))
    matcher = compiled.matcher([257, ord("b")])
    assert matcher.stop_ids == (257,)
    assert matcher.accept(ord("a")) and ord("b") in matcher.legal()
    assert matcher.accept(ord("b")) and matcher.accept(ord("c"))
    assert matcher.legal().tolist() == [257]
    with pytest.raises(GrammarError, match=r"all stop ids .* are text"):
        compiled.matcher([ord("b")])
    with pytest.raises(GrammarError, match="stop id 270 is outside"):
        compiled.matcher([270])
    with pytest.raises(GrammarError, match="another vocabulary"):
        XGrammarBackend(byte_vocabulary(300)).matcher(compiled)


@pytest.mark.parametrize("size", [266, 287, 288, 289, 320])
def test_legal_ids_are_text_or_stop_ids_whatever_the_size(size):
    """No bit is set for special ids, holes, or columns beyond the tokens or the vocabulary."""
    backend = XGrammarBackend(byte_vocabulary(size))
    vocabulary = backend.vocabulary
    for spec in (GrammarSpec.json_object(), GrammarSpec.regex("(.|\\n)*")):
        matcher = backend.compile(spec).matcher()
        for byte in b'{"a\xc3':
            assert matcher.accept(byte)
            for token in matcher.legal().tolist():
                assert vocabulary.is_text(token) or token in matcher.stop_ids
