"""Generate grammar/REFUSALS.md, and test that the page lists every JSON schema keyword.

``python tests/grammar/test_keyword_table.py`` regenerates the page.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from graft.grammar import GrammarSpec
from graft.grammar.automaton.lower import compile_automaton
from graft.grammar.automaton.unique_items import unique_shapes
from graft.grammar.resolve import ResolvedGrammar
from graft.grammar.schema.keyword_support import KEYWORDS
from graft.grammar.schema.name_spelling import with_one_spelling
from graft.grammar.schema.router import automaton_form, route

pytest.importorskip("llguidance")

PAGE = Path(__file__).resolve().parents[2] / "grammar" / "REFUSALS.md"
INTEGER = {"type": "integer"}
STRING = {"type": "string"}
TEXTS = {"enum": ["x", "y"]}
PAIR = {"a": INTEGER, "b": STRING}
REMOTE = "https://example.com/other.json"

#: Examples: keyword, description, schema, and the schema's draft if it is not the latest one.
EXAMPLES: list[tuple[Any, ...]] = [
    ("type", "one or several", {"type": ["integer", "null"]}),
    ("enum", "values of any type", {"enum": [1, "a", None, {"b": [2]}]}),
    ("const", "a value of any type", {"const": {"a": 1}}),
    (
        "properties",
        "in the schema's order, or the required ones first",
        {"type": "object", "properties": PAIR, "required": ["b"]},
    ),
    ("required", "listed or not", {"type": "object", "required": ["c"]}),
    ("additionalProperties", "a schema", {"type": "object", "additionalProperties": INTEGER}),
    (
        "patternProperties",
        "patterns that exclude each other",
        {"type": "object", "patternProperties": {"^a": INTEGER, "^b": STRING}},
    ),
    (
        "patternProperties",
        "patterns that overlap",
        {"type": "object", "patternProperties": {"a": INTEGER, "b": STRING}},
    ),
    (
        "propertyNames",
        "a pattern, a list, lengths or most formats",
        {"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}},
    ),
    ("propertyNames", "other schemas", {"type": "object", "propertyNames": {"format": "email"}}),
    (
        "minProperties",
        "up to 64 combinations",
        {"type": "object", "properties": PAIR, "additionalProperties": False, "minProperties": 1},
    ),
    (
        "minProperties",
        "more combinations",
        {
            "type": "object",
            "properties": {f"p{i}": {} for i in range(12)},
            "additionalProperties": False,
            "minProperties": 4,
        },
    ),
    (
        "maxProperties",
        "up to 64 combinations",
        {"type": "object", "properties": PAIR, "maxProperties": 1},
    ),
    (
        "dependencies",
        "names or a schema",
        {"type": "object", "properties": PAIR, "dependencies": {"a": ["b"]}},
        7,
    ),
    (
        "dependentRequired",
        "names",
        {"type": "object", "properties": PAIR, "dependentRequired": {"a": ["b"]}},
    ),
    (
        "dependentSchemas",
        "a schema",
        {
            "type": "object",
            "properties": PAIR,
            "dependentSchemas": {"a": {"properties": {"b": {"const": "x"}}}},
        },
    ),
    ("items", "a schema", {"type": "array", "items": INTEGER}),
    ("items", "a list of schemas", {"type": "array", "items": [INTEGER, STRING]}, 7),
    (
        "additionalItems",
        "a schema",
        {"type": "array", "items": [INTEGER], "additionalItems": STRING},
        7,
    ),
    ("prefixItems", "a list of schemas", {"type": "array", "prefixItems": [INTEGER]}),
    ("minItems", "a bound", {"type": "array", "minItems": 2}),
    ("maxItems", "a bound", {"type": "array", "maxItems": 9}),
    (
        "uniqueItems",
        "listed values, up to 400 orders",
        {"type": "array", "items": TEXTS, "uniqueItems": True},
    ),
    ("uniqueItems", "any values", {"type": "array", "items": STRING, "uniqueItems": True}),
    (
        "uniqueItems",
        "only in some of the options for an array, or next to contains",
        {"anyOf": [{"type": "array", "items": STRING, "uniqueItems": True}, {"items": INTEGER}]},
    ),
    (
        "contains",
        "up to 64 combinations of positions",
        {"type": "array", "contains": INTEGER, "maxItems": 9},
    ),
    ("contains", "any number of items", {"type": "array", "contains": INTEGER}),
    ("minLength", "a bound", {"type": "string", "minLength": 2}),
    ("maxLength", "a bound", {"type": "string", "maxLength": 2000}),
    (
        "pattern",
        "a regular expression of ECMA-262",
        {"type": "string", "pattern": "^\\S+\\.[a-z]{2,}$"},
    ),
    ("pattern", "look-ahead that is not repeated", {"type": "string", "pattern": "^(?!x)"}),
    (
        "pattern",
        "look-behind, back-references, word boundaries",
        {"type": "string", "pattern": "x(?<!y)"},
    ),
    (
        "format",
        "date, duration, uuid, uuid1 to uuid8, ipv4, ipv6, uri, iri, references and pointers",
        {"type": "string", "format": "ipv6"},
    ),
    (
        "format",
        "time, date-time, email, regex, uri-template",
        {"type": "string", "format": "date-time"},
    ),
    ("format", "hostname up to draft 6", {"type": "string", "format": "hostname"}, 6),
    ("format", "hostname from draft 7", {"type": "string", "format": "hostname"}, 7),
    ("format", "idn-hostname, idn-email", {"type": "string", "format": "idn-email"}),
    (
        "format",
        "other formats, and all formats in schemas that declare 2019-09 or 2020-12",
        {"type": "string", "format": "colour"},
    ),
    ("contentEncoding", "any encoding", {"type": "string", "contentEncoding": "base64"}),
    (
        "contentMediaType",
        "any media type",
        {"type": "string", "contentMediaType": "application/json"},
        7,
    ),
    ("minimum", "a bound", {"type": "number", "minimum": -1.5}),
    ("maximum", "a bound", {"type": "integer", "maximum": 100}),
    ("exclusiveMinimum", "a bound", {"type": "number", "exclusiveMinimum": 0}),
    ("exclusiveMaximum", "a bound", {"type": "integer", "exclusiveMaximum": 7}),
    ("minimum", "beyond 64 bits", {"type": "integer", "minimum": 10**20}),
    ("multipleOf", "of whole numbers", {"type": "integer", "multipleOf": 7}),
    ("allOf", "schemas", {"allOf": [{"type": "integer"}, {"minimum": 3}]}),
    ("anyOf", "schemas", {"anyOf": [INTEGER, STRING]}),
    ("oneOf", "options that exclude each other", {"oneOf": [INTEGER, STRING]}),
    (
        "oneOf",
        "overlaps that can be expanded",
        {"type": "object", "properties": PAIR, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
    ),
    (
        "oneOf",
        "overlaps in the values of a property: avoided",
        {
            "type": "object",
            "oneOf": [
                {"required": ["a"], "properties": {"a": {"type": "array", "items": INTEGER}}},
                {"required": ["b"], "properties": {"b": {"type": "array", "items": STRING}}},
            ],
        },
    ),
    ("oneOf", "overlaps of numbers or items", {"oneOf": [INTEGER, {"type": "number"}]}),
    (
        "oneOf",
        "other overlaps",
        {"type": "string", "oneOf": [{"format": "email"}, {"maxLength": 9}]},
    ),
    (
        "not",
        "types, values, bounds, required properties, and combinations",
        {"type": "string", "not": {"enum": ["x", "y"]}},
    ),
    ("not", "patterns, most formats", {"type": "string", "not": {"pattern": "a+"}}),
    ("not", "items, integers", {"type": "number", "not": INTEGER}),
    ("not", "some formats", {"type": "string", "not": {"format": "email"}}),
    (
        "if",
        "conditions that have a complement",
        {
            "type": "object",
            "properties": PAIR,
            "if": {"required": ["a"]},
            "then": {"required": ["b"]},
        },
    ),
    (
        "if",
        "conditions that have none",
        {
            "type": "object",
            "properties": PAIR,
            "if": {"properties": {"b": {"format": "email"}}},
            "then": {"required": ["a"]},
        },
    ),
    (
        "$ref",
        "a pointer into the schema, possibly recursive",
        {"$ref": "#/$defs/n", "$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}},
    ),
    ("$ref", "another document", {"$ref": REMOTE}),
    (
        "$dynamicRef",
        "with one target",
        {"$dynamicRef": "#n", "$defs": {"n": {"$dynamicAnchor": "n", "type": "null"}}},
    ),
    ("$recursiveRef", "in one document", {"items": {"$recursiveRef": "#"}}, 2019),
    (
        "unevaluatedProperties",
        "determined by the schema alone",
        {"type": "object", "allOf": [{"properties": PAIR}], "unevaluatedProperties": False},
    ),
    (
        "unevaluatedProperties",
        "depending on the value",
        {
            "type": "object",
            "anyOf": [{"properties": PAIR}, {"required": ["x"]}],
            "unevaluatedProperties": False,
        },
    ),
    (
        "unevaluatedItems",
        "determined by the schema alone",
        {"type": "array", "unevaluatedItems": False},
    ),
]

#: Reasons of refusals that replace messages of libraries, by keyword and description.
REASONS = {
    ("minimum", "beyond 64 bits"): "a bound does not fit into 64 bits",
    ("$ref", "another document"): "references to other documents are not fetched",
}

HEAD = """# JSON schema keywords

This page lists how graft enforces each JSON schema keyword in structured output.
`python tests/grammar/test_keyword_table.py` generates the page, and a test checks that it is
current.

Each row of the table is an example of a JSON schema keyword. The column `with` describes the value
of the keyword in the example. The column `why refused` says why graft refuses the example. The
column `auto` shows how graft treats the example with `backend="auto"` if LLGuidance is installed:

* *exact*: The keyword is enforced as written.
* *rewritten*: An equivalent schema is enforced.
* *narrowed*: Every output satisfies the schema, but some valid values are never produced.
  `Route.narrowed` describes these values.
* *automaton*: Only an [automaton](README.md#automata) can enforce an equivalent schema. The schema
  is refused in structural formats, and if the automaton would be too large. With
  `key_order="any"`, only `contains` without a number of items and the exclusion of integers are
  enforced, unless all objects have one order of keys.
* *compared*: A matcher keeps the items of an array and compares them. The schema is refused in
  structural formats.
* *refused*: `GrammarSpec.check()` raises an error that names the JSON pointer and the keyword,
  and the engine ends a request with the same error.
* *annotation*: The JSON Schema standard does not require the keyword to be enforced. It has no
  effect.

The JSON pointers in an error refer to the user's schema. If graft refuses a schema because of
several keywords, the error names at most 5 of them, and says how many others there are. LLGuidance
compiles the schema after graft has rewritten it. If LLGuidance refuses the rewritten schema, graft
searches for the responsible keywords by removing keywords from the user's schema. If the search
finds no keyword within two seconds of processor time, the error contains only LLGuidance's message.

With `partial=True`, a refused schema is accepted, and all parts of the schema except the named
keywords are enforced. Call `graft.grammar.check_output(schema, text)` to check a finished output
against the whole schema. `graft generate --json` writes the result of this check to the field
`valid`.

The last two columns show how XGrammar and LLGuidance treat the keyword in a schema that graft has
not rewritten. They describe the keyword as a whole, so they are the same in all rows of a keyword:

* *exact*: The keyword is enforced.
* *loose*: Outputs may violate the keyword, without an error.
* *dropped*: The keyword is ignored, without an error.
* *refused*: Some or all uses of the keyword are errors.
"""


def without_keyword(schema: dict[str, Any], keyword: str) -> Any:
    rest = {key: value for key, value in schema.items() if key != keyword}
    return with_one_spelling(rest).schema


def has_automaton(schema: Any, draft: int) -> bool:
    """Return whether an automaton enforces a schema."""
    form = automaton_form(schema, draft=draft)
    if form is None:
        return False
    spec = GrammarSpec("json_schema", "{}")
    return compile_automaton(ResolvedGrammar(spec, "llguidance", form.schema)) is not None


def shapes_of(schema: Any) -> Any:
    return unique_shapes(schema, any_order=False)


def table() -> str:
    """Return the table of all examples."""
    lines = ["| keyword | with | auto | why refused | XGrammar | LLGuidance |", "|---" * 6 + "|"]
    for keyword, description, schema, *drafts in EXAMPLES:
        [draft] = drafts or [2020]
        found = route(schema, draft=draft)
        why = ""
        compared = route(schema, draft=draft, unique_items=shapes_of)
        if compared.exact and not found.exact:
            outcome = "compared"
        elif not found.exact and keyword != "uniqueItems" and has_automaton(schema, draft):
            outcome = "automaton"
        elif not found.exact:
            outcome = "refused"
            why = REASONS.get((keyword, description), compared.reasons[0].why)
            why = " ".join(why.replace("|", "\\|").split())
        elif set(found.narrowed) - set(found.ordered):
            outcome = "narrowed"
        elif found.schema == without_keyword(schema, keyword):
            outcome = "annotation"
        elif found.schema != with_one_spelling(schema).schema:
            outcome = "rewritten"
        else:
            outcome = "exact"
        llguidance, xgrammar = KEYWORDS[keyword]
        cells = (f"`{keyword}`", description, outcome, why, xgrammar, llguidance)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def test_keyword_table_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == f"{HEAD}\n{table()}"


def test_keyword_table_has_every_keyword() -> None:
    """Every keyword has an example, except keywords that only modify another keyword."""
    shown: set[Any] = {keyword for keyword, *_ in EXAMPLES}
    assert KEYWORDS.keys() - shown == {"then", "else", "minContains", "maxContains"}


if __name__ == "__main__":
    PAGE.write_text(f"{HEAD}\n{table()}", encoding="utf-8")
