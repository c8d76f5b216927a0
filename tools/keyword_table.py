"""Writes down what becomes of every JSON schema keyword: enforced, rewritten or refused.

Every row of the table is an example that is routed when the table is made; the second table is
the official test suite of draft 7, if its groups are at hand. Usage::

    python -m graft.tools.keyword_table --suite draft7.jsonl.gz --write grammar/REFUSALS.md
"""

from __future__ import annotations

import argparse
import collections
import gzip
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from graft.grammar.schema.enforcement import ENFORCEMENT
from graft.grammar.schema.router import Route, route

_INTEGER, _STRING, _TEXTS = {"type": "integer"}, {"type": "string"}, {"enum": ["x", "y"]}
_PAIR = {"a": _INTEGER, "b": _STRING}
_REMOTE = "https://example.com/other.json"

#: Keyword, what its example shows, the example, and the draft to read it in.
EXAMPLES: list[tuple[str, str, Any, int]] = [
    ("type", "one or several", {"type": ["integer", "null"]}, 2020),
    ("enum", "values of any type", {"enum": [1, "a", None, {"b": [2]}]}, 2020),
    ("const", "a value of any type", {"const": {"a": 1}}, 2020),
    ("properties", "in the schema's order, or the required ones first",
     {"type": "object", "properties": _PAIR, "required": ["b"]}, 2020),
    ("required", "listed or not", {"type": "object", "required": ["c"]}, 2020),
    ("additionalProperties", "a schema", {"type": "object", "additionalProperties": _INTEGER},
     2020),
    ("patternProperties", "patterns that exclude each other",
     {"type": "object", "patternProperties": {"^a": _INTEGER, "^b": _STRING}}, 2020),
    ("patternProperties", "patterns that overlap",
     {"type": "object", "patternProperties": {"a": _INTEGER, "b": _STRING}}, 2020),
    ("propertyNames", "a pattern, a list or lengths",
     {"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}}, 2020),
    ("propertyNames", "other schemas",
     {"type": "object", "propertyNames": {"format": "date"}}, 2020),
    ("minProperties", "up to 64 combinations",
     {"type": "object", "properties": _PAIR, "additionalProperties": False, "minProperties": 1},
     2020),
    ("minProperties", "more",
     {"type": "object", "properties": {f"p{i}": {} for i in range(12)},
      "additionalProperties": False, "minProperties": 4}, 2020),
    ("maxProperties", "up to 64 combinations",
     {"type": "object", "properties": _PAIR, "maxProperties": 1}, 2020),
    ("dependencies", "names or a schema",
     {"type": "object", "properties": _PAIR, "dependencies": {"a": ["b"]}}, 7),
    ("dependentRequired", "names",
     {"type": "object", "properties": _PAIR, "dependentRequired": {"a": ["b"]}}, 2020),
    ("dependentSchemas", "a schema",
     {"type": "object", "properties": _PAIR,
      "dependentSchemas": {"a": {"properties": {"b": {"const": "x"}}}}}, 2020),
    ("items", "a schema", {"type": "array", "items": _INTEGER}, 2020),
    ("items", "a list of schemas", {"type": "array", "items": [_INTEGER, _STRING]}, 7),
    ("additionalItems", "a schema",
     {"type": "array", "items": [_INTEGER], "additionalItems": _STRING}, 7),
    ("prefixItems", "a list of schemas", {"type": "array", "prefixItems": [_INTEGER]}, 2020),
    ("minItems", "a bound", {"type": "array", "minItems": 2}, 2020),
    ("maxItems", "a bound", {"type": "array", "maxItems": 9}, 2020),
    ("uniqueItems", "few values, up to 400 orders",
     {"type": "array", "items": _TEXTS, "uniqueItems": True}, 2020),
    ("uniqueItems", "any values",
     {"type": "array", "items": _STRING, "uniqueItems": True}, 2020),
    ("contains", "a schema", {"type": "array", "contains": _INTEGER}, 2020),
    ("minLength", "a bound", {"type": "string", "minLength": 2}, 2020),
    ("maxLength", "a bound", {"type": "string", "maxLength": 2000}, 2020),
    ("pattern", "a regular expression of ECMA-262",
     {"type": "string", "pattern": "^\\S+\\.[a-z]{2,}$"}, 2020),
    ("pattern", "look-around, back-references, word boundaries",
     {"type": "string", "pattern": "^(?!x)"}, 2020),
    ("format", "date, time, date-time, duration, email, uuid, ipv4, ipv6, uri, iri, their "
     "references and templates, JSON pointers", {"type": "string", "format": "date-time"}, 2020),
    ("format", "hostname up to draft 6", {"type": "string", "format": "hostname"}, 6),
    ("format", "hostname from draft 7", {"type": "string", "format": "hostname"}, 7),
    ("format", "idn-hostname, idn-email, regex", {"type": "string", "format": "regex"}, 2020),
    ("format", "others are annotations", {"type": "string", "format": "colour"}, 2020),
    ("contentEncoding", "an annotation", {"type": "string", "contentEncoding": "base64"}, 2020),
    ("contentEncoding", "base64 in draft 7", {"type": "string", "contentEncoding": "base64"}, 7),
    ("contentMediaType", "in draft 7",
     {"type": "string", "contentMediaType": "application/json"}, 7),
    ("minimum", "a bound", {"type": "number", "minimum": -1.5}, 2020),
    ("maximum", "a bound", {"type": "integer", "maximum": 100}, 2020),
    ("exclusiveMinimum", "a bound", {"type": "number", "exclusiveMinimum": 0}, 2020),
    ("exclusiveMaximum", "a bound", {"type": "integer", "exclusiveMaximum": 7}, 2020),
    ("minimum", "beyond 64 bits", {"type": "integer", "minimum": 10**20}, 2020),
    ("multipleOf", "of whole numbers", {"type": "integer", "multipleOf": 7}, 2020),
    ("allOf", "schemas", {"allOf": [{"type": "integer"}, {"minimum": 3}]}, 2020),
    ("anyOf", "schemas", {"anyOf": [_INTEGER, _STRING]}, 2020),
    ("oneOf", "options that exclude each other", {"oneOf": [_INTEGER, _STRING]}, 2020),
    ("oneOf", "overlaps that can be spelled out",
     {"type": "object", "properties": _PAIR, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
     2020),
    ("oneOf", "overlaps in the values of a property: kept clear of",
     {"type": "object", "oneOf": [
         {"required": ["a"], "properties": {"a": {"type": "array", "items": _INTEGER}}},
         {"required": ["b"], "properties": {"b": {"type": "array", "items": _STRING}}}]}, 2020),
    ("oneOf", "other overlaps", {"oneOf": [_INTEGER, {"type": "number"}]}, 2020),
    ("not", "types, values, bounds, what is there, and combinations",
     {"type": "string", "not": {"enum": ["x", "y"]}}, 2020),
    ("not", "patterns, items, formats", {"type": "string", "not": {"pattern": "a+"}}, 2020),
    ("if", "conditions that have a complement",
     {"type": "object", "properties": _PAIR, "if": {"required": ["a"]},
      "then": {"required": ["b"]}}, 2020),
    ("if", "conditions that have none",
     {"type": "object", "properties": _PAIR, "if": {"properties": {"b": {"pattern": "a+"}}},
      "then": {"required": ["a"]}}, 2020),
    ("$ref", "a pointer into the schema, recursive ones too",
     {"$ref": "#/$defs/n", "$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}},
     2020),
    ("$ref", "another document", {"$ref": _REMOTE}, 2020),
    ("$dynamicRef", "any", {"$dynamicRef": "#n", "$defs": {"n": {"$dynamicAnchor": "n"}}}, 2020),
    ("unevaluatedProperties", "a schema",
     {"type": "object", "unevaluatedProperties": False}, 2020),
    ("unevaluatedItems", "a schema", {"type": "array", "unevaluatedItems": False}, 2020),
]  # fmt: skip

_HEAD = """# What becomes of every JSON schema keyword

Made by `python -m graft.tools.keyword_table`; a test keeps it current. `auto` stands for
`backend="auto"`: *exact* as it stands, *rewritten* into an equivalent schema, *narrowed* (every
output satisfies the schema; some values that do, or some orders of their keys, are not produced, as
`Route.narrowed` says), or
*refused*, by JSON pointer and keyword, before a token is made. With `partial=True` a refused
schema runs without the part that is named, and every output is checked and marked.
XGrammar and LLGuidance stand for these libraries when they are given the schema as it is: *loose*
means that they may let violations through without a word, *refused* that they refuse some of its
uses or all.
"""


def outcome(found: Route) -> str:
    """One word of what became of an example."""
    if not found.exact:
        return "refused"
    return "narrowed" if found.narrowed else "rewritten" if found.rewritten else "exact"


def _alone(keyword: str, backend: str) -> str:
    for level, keywords in ENFORCEMENT[backend].items():
        if keyword in keywords:
            return level
    return "-"


def examples_table() -> str:
    """Every example, routed."""
    lines = ["| keyword | with | auto | why refused | XGrammar | LLGuidance |", "|---" * 6 + "|"]
    for keyword, shows, schema, draft in EXAMPLES:
        found = route(schema, ("llguidance", "xgrammar"), draft=draft)
        why = "" if found.exact else _cell(found.reasons[0].why)
        lines.append(
            f"| `{keyword}` | {shows} | {outcome(found)} | {why} | "
            f"{_alone(keyword, 'xgrammar')} | {_alone(keyword, 'llguidance')} |"
        )
    return "\n".join(lines)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())[:110]


def suite_table(path: Path) -> str:
    """The official suite's groups that are refused, by keyword and reason."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        groups = [json.loads(line) for line in file]
    refused: dict[str, list[str]] = collections.defaultdict(list)
    narrowed = 0
    for group in groups:
        found = route(group["schema"], ("llguidance", "xgrammar"), draft=7)
        narrowed += bool(found.exact and found.narrowed)
        if not found.exact:
            what = found.reasons[0].keyword
            if what == "schema":
                what = "the schema allows nothing"
            refused[what].append(f"{group['id'].removeprefix('draft7/')} ({group['description']})")
    total = sum(map(len, refused.values()))
    lines = [
        "## The official test suite, draft 7", "",
        f"Of {len(groups)} groups {len(groups) - total} are enforced, {narrowed} of them narrowed, "
        f"and {total} refused:", "", "| refused for | groups | which |", "|---|--:|---|",
    ]  # fmt: skip
    for keyword, ids in sorted(refused.items(), key=lambda item: -len(item[1])):
        lines.append(f"| {keyword} | {len(ids)} | {_listed(ids)} |")
    return "\n".join(lines)


def _listed(ids: list[str]) -> str:
    return "; ".join(_cell(name) for name in ids)


def document(suite: Path | None) -> str:
    """The whole text; without the suite its part is left out."""
    parts = [_HEAD, examples_table()]
    if suite is not None:
        parts += ["", suite_table(suite)]
    return "\n".join(parts) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the document, or write it."""
    parser = argparse.ArgumentParser(prog="python -m graft.tools.keyword_table",
                                     description=(__doc__ or "").split("\n\n")[0])  # fmt: skip
    parser.add_argument("--suite", type=Path, help="groups of the official suite, .jsonl.gz")
    parser.add_argument("--write", type=Path, help="file to write; default: standard output")
    options = parser.parse_args(arguments)
    text = document(options.suite)
    if options.write is None:
        print(text, end="")
    else:
        options.write.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
