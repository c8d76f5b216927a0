r"""Escapes such as ``\u00fc`` in JSON strings. The oracles are ``json`` and jsonschema."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from mask_walks import require_oracle_walks
from router_util import Grammar

from graft.grammar import GrammarSpec
from graft.grammar.schema.router import automaton_form

CHARACTERS = ["a", "Z", "5", " ", "/", "&", '"', "\\", "\n", "\x00", "\x1f", "\x7f", "\x80"]
CHARACTERS += ["ü", "\u07ff", "日", "\ud7ff", "\ue000", "\uffff", "\U00010000", "😀", "\U0010ffff"]

#: Schemas of strings in which each character may be written as an escape.
STRINGS: dict[str, dict[str, Any]] = {
    "any": {"type": "string"},
    "no type": {},
    "short": {"type": "string", "minLength": 2, "maxLength": 3},
    "counted": {"type": "string", "minLength": 2, "maxLength": 400},
    "pattern": {"type": "string", "pattern": "^[^&]{1,3}$"},
    "search": {"type": "string", "pattern": "[ü-\uffff]{2}"},
    "words": {"type": "string", "pattern": "^([^ü]+ü)*[^ü]*$"},
    "pattern and length": {"type": "string", "pattern": "^[^5]+[^a]$", "maxLength": 300},
    "not pattern": {"type": "string", "not": {"pattern": "[aü日😀]"}},
    "enum": {"enum": ["ü", "日😀", "\n\x00", "日", ""]},
}


def spellings(char: str) -> list[str]:
    """Return the JSON spellings of a character; hexadecimal digits have random cases."""
    found = {json.dumps(char, ensure_ascii=False)[1:-1]} - {"\x7f"}
    if char == "/":
        found.add("\\/")
    units = char.encode("utf-16-be").hex()
    for digits in (units, units.upper(), units.title()):
        found.add("".join(f"\\u{digits[at : at + 4]}" for at in range(0, len(digits), 4)))
    return sorted(found)


def random_texts(count: int, seed: str) -> list[str]:
    """Return random strings in random JSON spellings."""
    generator = random.Random(seed)
    texts = []
    for _ in range(count):
        chars = generator.choices(CHARACTERS, k=generator.randrange(5))
        texts.append('"' + "".join(generator.choice(spellings(char)) for char in chars) + '"')
    return texts


@pytest.mark.parametrize("name", STRINGS)
def test_string_may_contain_any_spelling_of_its_characters(name: str):
    schema = STRINGS[name]
    grammar = Grammar(spec=GrammarSpec.json_schema(schema))
    valid = jsonschema.Draft202012Validator(schema)
    texts = [*random_texts(600, name), r'"\u65e5\uD83D\uDE00"', r'"\u00fc"', r'"\u000a\u0000"']
    # For jsonschema, unlike for the standard, "$" matches before a line feed at the end.
    texts = [text for text in texts if not json.loads(text).endswith("\n")]
    accepted = 0
    for text in texts:
        expected = valid.is_valid(json.loads(text))
        assert grammar.accepts(text) == expected, text
        accepted += expected
    assert accepted > 0 and (accepted < len(texts) or name in ("any", "no type"))


@pytest.mark.parametrize("name", ["short", "counted", "pattern", "words", "not pattern", "enum"])
def test_masks_of_strings_with_escapes_equal_those_of_rules(name: str):
    require_oracle_walks(GrammarSpec.json_schema(STRINGS[name]), 3, 16)


@pytest.mark.parametrize("schema", [{}, {"maxLength": 300}, {"pattern": "^.*$"}], ids=str)
def test_lone_surrogates_are_illegal(schema: dict[str, Any]):
    """Many parsers refuse or replace them, because no Unicode text contains them."""
    grammar = Grammar(spec=GrammarSpec.json_schema({"type": "string", **schema}))
    for escapes in (r"\ud83d", r"\ude00", r"\ud83d\ud83d", r"\ud83d\u00fc", r"\ude00\ud83d"):
        assert not grammar.accepts(f'"{escapes}"')
    assert legal_after(grammar, r'"\ud83d') == {"\\"}
    assert legal_after(grammar, r'"\ud83d\u') == {"d", "D"}
    assert legal_after(grammar, r'"\ud83d\ud') == set("cdefCDEF")


def legal_after(grammar: Grammar, text: str) -> set[str]:
    """Return the legal characters after a text, as far as they are ASCII."""
    matcher = grammar.matcher()
    assert all(map(matcher.accept, text.encode()))
    return {chr(token) for token in matcher.legal().tolist() if token < 0x80}


HEX = set("0123456789abcdefABCDEF")


def test_escape_is_legal_only_if_a_character_is():
    """No escape begins that could only end as another character than the schema allows."""
    string = Grammar(spec=GrammarSpec.json_schema({"type": "string"}))
    assert legal_after(string, '"\\') == set('"\\/bfnrtu')
    assert legal_after(string, r'"\u00') == legal_after(string, r'"\u00f') == HEX

    def pattern(text: str) -> Grammar:
        return Grammar(spec=GrammarSpec.json_schema({"type": "string", "pattern": text}))

    assert "\\" not in legal_after(pattern("^[a-z]+$"), '"a')
    assert legal_after(pattern('^["a]+$'), '"\\') == {'"'}
    assert legal_after(pattern("^[äöü]$"), r'"\u00') == set("efEF")
    assert legal_after(pattern("^[äöü]$"), r'"\u00f') == set("6cC")
    assert "\\" not in legal_after(Grammar(spec=GrammarSpec.json_schema({"enum": ["ab"]})), '"a')
    enum = Grammar(spec=GrammarSpec.json_schema({"enum": ["Zürich"]}))
    assert enum.accepts('"Zürich"') and enum.accepts(r'"Z\u00fcrich"')
    assert legal_after(enum, r'"Z\u00') == {"f", "F"}


INTEGER, NULL = {"type": "integer"}, {"type": "null"}
NAMES: dict[str, dict[str, Any]] = {
    "no names": {"additionalProperties": NULL},
    "names": {"properties": {"id": INTEGER, "größe": INTEGER, "a\n": INTEGER, "": INTEGER}},
    "schema of others": {"properties": {"id": INTEGER, "ü": NULL}, "additionalProperties": NULL},
    "closed": {"properties": {"ü": INTEGER, "a": NULL}, "additionalProperties": False},
    "required": {"required": ["ü"], "properties": {"ü": INTEGER}},
    "patterns": {"patternProperties": {"^[a-ü]$": INTEGER, "日": NULL}},
    "patterns and names": {
        "properties": {"&": NULL, "日": INTEGER},
        "patternProperties": {"^[aü]": INTEGER},
        "additionalProperties": NULL,
    },
    "names of names": {"propertyNames": {"pattern": "^[^&a]*$"}},
}


@pytest.mark.parametrize("name", NAMES)
def test_names_are_compared_by_value(name: str):
    """Escapes neither turn a listed name into another one, nor evade a pattern of names."""
    schema = {"type": "object", **NAMES[name]}
    grammar = Grammar(spec=GrammarSpec.json_schema(schema))
    valid = jsonschema.Draft202012Validator(schema)
    listed = [*NAMES[name].get("properties", {}), "id", "größe", "a\n", "ü", "日x", "a", "&", "b"]
    generator = random.Random(name)
    accepted = set()
    for _ in range(600):
        key = generator.choice([generator.choice(listed), generator.choice(CHARACTERS)])
        if key.endswith("\n") and name == "patterns":
            continue  # see above
        spelled = [generator.choice(spellings(char)) for char in key]
        text = '{"' + "".join(spelled) + '": ' + generator.choice(["null", "1"]) + "}"
        is_valid = valid.is_valid(json.loads(text))
        # Names that a schema compares have ASCII letters and digits without escapes.
        plain = all(
            part == char or not char.isascii() for part, char in zip(spelled, key, strict=True)
        )
        if grammar.accepts(text):
            assert is_valid, text
            accepted.add(text)
        else:
            assert not is_valid or not plain, text
    assert any("\\u00fc" in text for text in accepted)
    if name in ("no names", "names"):  # not a character of a listed name
        assert any("\\u0026" in text for text in accepted)


@pytest.mark.parametrize("name", ["schema of others", "closed"])
def test_masks_of_names_with_escapes_equal_those_of_rules(name: str):
    require_oracle_walks(GrammarSpec.json_schema({"type": "object", **NAMES[name]}), 1, 10)


def test_control_characters_are_legal_next_to_compared_names():
    """LLGuidance's form of the schema excludes them."""
    schema = {"patternProperties": {"^x": INTEGER}, "additionalProperties": {"type": "string"}}
    form = automaton_form(schema)
    assert form is not None and form.narrowed == ()
    grammar = Grammar(spec=GrammarSpec.json_schema({"type": "object", **schema}))
    assert grammar.accepts(r'{"\u0001": "\u001b", "x\u0001": 1}')
    listed = {"type": "object", "properties": {"a": {"enum": ["\x1b"]}}, **schema}
    assert Grammar(spec=GrammarSpec.json_schema(listed)).accepts(r'{"a": "\u001b"}')


def test_distance_within_escapes_is_known():
    grammar = Grammar(spec=GrammarSpec.json_schema({"type": "string", "minLength": 3}))
    matcher = grammar.matcher()
    distances = []
    for byte in rb'"\u65e5\ud83d\ude00a"':
        assert matcher.accept(byte)
        distances.append(matcher.distance())
    assert distances[0] == 5  # three characters, a quotation mark and the stop id
    assert distances[1:7] == [5, 8, 7, 6, 5, 4]  # a character after the backslash, or four digits
    assert distances[7:19] == [4, 7, 6, 11, 10, 9, 8, 7, 6, 5, 4, 3]
    assert distances[19:] == [2, 1]
