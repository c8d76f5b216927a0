"""Automata of patterns, EBNF grammars and structural formats, compared with LLGuidance."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from mask_walks import compile_both, llguidance_matcher, require_equal_walks
from rule_matcher import RuleMatcher

from graft.grammar import GrammarSpec, StructuralTag, resolve_spec
from graft.grammar.automaton.ebnf import lower_ebnf
from graft.grammar.automaton.lower import lower
from graft.grammar.automaton.schema import Rules
from graft.grammar.automaton.strings import NamePatterns
from graft.grammar.regular.regex import NoAutomaton
from graft.grammar.regular.unicode_classes import category_ranges

PATTERNS = [
    r"\d+",
    r"\w+",
    r"\s",
    r"\D",
    r"\W",
    r"\S{2}",
    r"\w\d?",
    "(?i)abc",
    "(?i)[^k]x",
    "(?i)kiss",
    "(?i:a)b",
    "(?-i)a",
    "(?U)a+",
    "a+?b",
    "a??",
    "a**",
    "^a$",
    "^a|b$",
    r"\A\d\z",
    r"[a-z&&[^b]]+",
    r"[\w--\d]",
    r"[a-f~~c-z]",
    r"[a-cx-z&&b-y]",
    r"\p{L}",
    r"\p{Lu}x",
    r"\P{L}",
    r"\pN",
    r"\pL\p{Letter}",
    r"[[:alpha:]_]+",
    r"[[:^digit:]]",
    "(?s).",
    "(?s:.)x.",
    "(?P<a>x)(?<b>y)",
    r"\x{41}\u{e9}\U0001F600",
    r"\a\f\v",
    r"[]a]+",
    r"[^]a]",
    "[-a]",
    r"[\d-]",
    "(a|b|)",
    r"\%\ \!",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_pattern_automaton_has_masks_of_llguidance(pattern: str):
    require_equal_walks(GrammarSpec.regex(pattern), 10, 6)


def boundaries(every: int) -> Iterator[str]:
    """Yield characters at the boundaries of Unicode's general categories, and unassigned ones."""
    codes = {0x378, 0x1CCF0, 0x10D40, 0x1FAE9, 0x2EBF0, 0x20C1, 0x10FFFF, 0x212A, 0x17F}
    for name in ("L", "M", "N", "P", "S", "Z"):
        ranges = category_ranges(name)
        assert ranges is not None
        for low, high in ranges[::every]:
            codes |= {low - 1, low, high, high + 1}
    return (chr(code) for code in sorted(codes) if code >= 0 and not 0xD800 <= code <= 0xDFFF)


@pytest.mark.parametrize("every", [25, pytest.param(1, marks=pytest.mark.full)])
def test_unicode_classes_have_characters_of_llguidance(every: int):
    for pattern in (r"\d", r"\w", r"\s", r"\p{L}", r"\p{P}", r"\p{N}"):
        compiled = compile_both(GrammarSpec.regex(pattern))
        for character in boundaries(every):
            one, other = compiled.matcher(), llguidance_matcher(compiled)
            for byte in character.encode():
                accepted = one.accept(2 + byte)
                assert accepted == other.accept(2 + byte), (pattern, character)
                if not accepted:
                    break


def test_rule_matcher_accepts_same_texts_as_python():
    """The oracle of the tests agrees with ``re`` on all texts of up to four characters."""
    texts = [""]
    for _ in range(4):
        texts += [text + char for text in texts for char in "ab1-"]
    for pattern in ("(a|b)*abb", "a{2,3}(-1)?", "[^a]*a", "(1|-){2}|b+", "((a?b){2}1?)+"):
        matcher = RuleMatcher(lower(resolve_spec(GrammarSpec.regex(pattern), "llguidance")))
        for text in set(texts):
            assert matcher.accepts(text.encode()) == bool(re.fullmatch(pattern, text)), text


@pytest.mark.parametrize("pattern", ["^a", "b$", "a.b", r"[\d-]+$", "(?i)A", "", "^$"])
def test_matches_name_agrees_with_python(pattern: str):
    for text in ("", "a", "ab", "ba", "a\nb", "axb", "1", "-", "A", "b1"):
        assert NamePatterns().matches(pattern, text) == bool(re.search(pattern, text)), text


def test_matches_name_takes_no_exponential_time():
    """Python's ``re`` would try about 2**60 ways to match the name."""
    assert not NamePatterns().matches("^(a+)+$", "a" * 60 + "b")


JSON_GRAMMAR = r"""
root ::= object
value ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= "-"? ([0-9] | [1-9] [0-9]*) ("." [0-9]+)? ([eE] [-+]? [0-9]+)? ws
ws ::= ([ \t\n] ws)?
"""
GRAMMARS = {
    "texts": 'root ::= "a" | "ab"',
    "greedy": 'root ::= [0-9]+ "0"',
    "overlap": 'root ::= ("list" | "listen") "ed"',
    "rules": 'root ::= a b\na ::= "x"*\nb ::= a | "é"',
    "expression": 'root ::= e\ne ::= t ("+" t)*\nt ::= [0-9]+ | "(" e ")"',
    "right_recursion": 'root ::= "a" root | "b"',
    "list": 'root ::= "[" xs "]"\nxs ::= x | x "," xs\nx ::= [0-9] | root',
    "json": JSON_GRAMMAR,
}


@pytest.mark.parametrize("name", GRAMMARS)
def test_ebnf_automaton_has_masks_of_llguidance(name: str):
    pieces = ["{", "}", "[", "]", "(", ")", '"a"', ": ", ",", "1", "+"]
    require_equal_walks(GrammarSpec.ebnf(GRAMMARS[name]), 12, 30, pieces)


@pytest.mark.parametrize("rule", ['root "a" | "b"', '"a" root "b" | "c"', '"(" root | "c"'])
def test_ebnf_recursion_without_brackets_is_refused(rule: str):
    with pytest.raises(NoAutomaton, match="recursive without brackets"):
        lower_ebnf(f"root ::= {rule} root?", "root", Rules())


def const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def tag(begin: str, content: Any, end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def any_text(**fields: Any) -> dict[str, Any]:
    return {"type": "any_text", **fields}


def sequence(*elements: Any) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


def closed(name: str, schema: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {name: schema},
        "required": [name],
        "additionalProperties": False,
    }


OBJECT = {"type": "json_schema", "json_schema": closed("a", {"enum": ["x", 1]})}
TAGS = [tag("<a>", OBJECT, "</a>"), tag("<ab>", const("é"), ["</a>", "</b>"])]
TRIGGERED = {"type": "triggered_tags", "triggers": ["<a"], "tags": TAGS}
FORMATS = {
    "reasoning": sequence(tag("<think>", any_text(), "</think>"), OBJECT),
    "excludes": any_text(excludes=["ab", "b{"]),
    "max_chars": any_text(max_chars=3),
    "excluded_starts": any_text(excluded_starts=["{", "<a"]),
    "text_then_end": sequence(const("x"), any_text(excludes=["!"]), const("!")),
    "optional_reasoning": {
        "type": "or",
        "elements": [tag("<think>", any_text(), "</think>"), const("ok")],
    },
    "triggered": TRIGGERED,
    "triggered_at_least_one": {**TRIGGERED, "at_least_one": True},
    "triggered_once": {**TRIGGERED, "stop_after_first": True, "excludes": ["zz"]},
    "triggered_first": {**TRIGGERED, "stop_after_first": True, "at_least_one": True},
    "triggered_in_tag": tag("<t>", TRIGGERED, "</t>"),
    "dispatch_once": {"type": "dispatch", "rules": [["<x>", const("q")]], "loop": False},
    "object_or_text": {"type": "or", "elements": [OBJECT, any_text(excluded_starts=["{"])]},
    "tool_calls": {
        "type": "tags_with_separator",
        "tags": [tag('<c>{"name": "f", "arguments": ', OBJECT, "}</c>")],
        "separator": "\n",
        "at_least_one": True,
    },
}
PIECES = """\
<a>|<ab>|</a>|</b>|<think>|</think>|é|<x>|<y>|<f=x>|<f=y>|</f>|[g]|null|[/g]|[null]|q|x|!|<|<a|ok
<t>|</t>|zz|ab|,|{"a": "x"}|{"a": 1}|{"a": 1}}</c>|<c>{"name": "f", "arguments": """
PIECES = PIECES.replace("\n", "|").split("|")


@pytest.mark.parametrize("name", FORMATS)
def test_format_automaton_has_masks_of_llguidance(name: str):
    require_equal_walks(GrammarSpec.structural_format(FORMATS[name]), 30, 12, PIECES)


@pytest.mark.parametrize("option", [None, "at_least_one", "at_once"])
def test_structural_tag_automaton_has_masks_of_llguidance(option: str | None):
    tags = [
        StructuralTag("<f=x>", json.dumps(closed("a", {"type": "integer"})), "</f>"),
        StructuralTag("<f=y>", '{"type": "array", "items": {"type": "null"}}', "</f>"),
        StructuralTag("[g]", '{"type": "null"}', "[/g]"),
    ]
    options = {} if option is None else {option: True}
    spec = GrammarSpec.structural_tag(tags, ["<f=", "[g]"], **options)
    require_equal_walks(spec, 30, 12, PIECES)
