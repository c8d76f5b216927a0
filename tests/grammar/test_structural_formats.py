"""Tests of structural formats: both backends allow the texts that XGrammar's own matcher allows."""

from __future__ import annotations

import importlib.util
import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from guide_util import THINK, accepts, byte_vocabulary

from graft.grammar import GrammarError, GrammarService, GrammarSpec, StructuralTag
from graft.grammar.backends.llguidance import LLGuidanceBackend
from graft.grammar.backends.xgrammar import XGrammarBackend, new_compiler
from graft.grammar.structural.formats import TriggerLookup, parse_format
from graft.grammar.structural.lark import lark_text

pytest.importorskip("llguidance")
if importlib.util.find_spec("xgrammar") is None:
    pytest.skip("xgrammar is not installed", allow_module_level=True)

TOKENS = byte_vocabulary(names={"<think>": THINK})
CLOSED = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def form(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, **fields}


def const(value: str) -> dict[str, Any]:
    return form("const_string", value=value)


def sequence(*elements: Any) -> dict[str, Any]:
    return form("sequence", elements=list(elements))


def tag(begin: Any, content: Any, end: Any) -> dict[str, Any]:
    return form("tag", begin=begin, content=content, end=end)


def token(value: int | str) -> dict[str, Any]:
    return form("token", token=value)


FREE = form("any_text")
JSON = form("json_schema", json_schema=CLOSED)
THOUGHT = tag("<think>", FREE, "</think>")
CALLS = [tag("<f=1>", JSON, "</f>"), tag("<f=2>", FREE, ["</f>", "</g>"])]
#: Formats, each with texts that fit and texts that do not. Both backends must support them.
FORMATS: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "sequence": (
        sequence(const("Answer: "), JSON),
        ['Answer: {"a": 1}'],
        ["Answer: ", '{"a": 1}', 'Answer: {"a": "1"}', 'Answer: {"a": 1}.'],
    ),
    "or": (form("or", elements=[const("no"), JSON]), ["no", '{"a": 2}'], ["", "yes", 'no{"a": 2}']),
    "tag": (
        THOUGHT,
        ["<think></think>", "<think>a</thin</think>"],
        ["<think>a", "a</think>", "<think>a</think></think>"],
    ),
    "several ends": (
        tag("<a>", FREE, ["</a>", "</b>"]),
        ["<a>x</a>", "<a>x</b>"],
        ["<a>x</a></b>", "<a>x</c>"],
    ),
    "nested tags": (
        tag("<a>", sequence(tag("<b>", FREE, "</b>"), const("!")), "</a>"),
        ["<a><b>x</a></b>!</a>"],
        ["<a><b>x</b></a>", "<a><b>x</b>!"],
    ),
    "free text before a tag": (
        sequence(form("any_text", excludes=["<"]), THOUGHT),
        ["<think>é</think>", "abc<think></think>"],
        ["a<b<think></think>", "abc"],
    ),
    "triggered_tags": (
        form("triggered_tags", triggers=["<f="], tags=CALLS, excludes=["stop"]),
        ["", "hi", "<f", 'a<f=1>{"a": 1}</f>b<f=2>x</g>c', "<f=2>stop</f>"],
        ["<f=3>", 'a<f=1>{"a": 1}', "a stop", "<f=1>x</f>"],
    ),
    "at least one": (
        form("triggered_tags", triggers=["<f="], tags=CALLS, at_least_one=True),
        ["<f=2></f>", "<f=2></f> and <f=2></f>."],
        ["", "hi", "hi<f=2></f>"],
    ),
    "stop after first": (
        form("triggered_tags", triggers=["<f="], tags=CALLS, stop_after_first=True),
        ["", "hi", "hi<f=2></f>"],
        ["<f=2></f>hi", "<f=2></f><f=2></f>"],
    ),
    "triggered_tags in a tag": (
        tag("<o>", form("triggered_tags", triggers=["<f="], tags=CALLS), "</o>"),
        ["<o>a</o>", '<o>a<f=1>{"a": 1}</f>b</o>', "<o><f=2></o></f></o>"],
        ["<o>a</o>b</o>", "<o><f=2></o>"],
    ),
    "tags_with_separator": (
        form("tags_with_separator", tags=CALLS, separator=", "),
        ["", '<f=1>{"a": 1}</f>', '<f=2>x</g>, <f=1>{"a": 1}</f>'],
        ["<f=2>x</g>, ", "<f=2>x</g><f=2>x</g>", "x"],
    ),
    "one tag": (
        form("tags_with_separator", tags=CALLS, separator="", at_least_one=True),
        ["<f=2>x</g>", "<f=2>x</g><f=2>x</g>"],
        ["", "<f=2>x</g>x"],
    ),
    "repetition": (
        sequence(
            form("optional", content=THOUGHT),
            form("repeat", min=1, max=2, content=const("ab")),
            form("star", content=const(".")),
        ),
        ["ab", "<think>x</think>abab..."],
        ["", "<think>x</think>", "ababab", "ab.ab"],
    ),
    "plus": (form("plus", content=JSON), ['{"a": 1}{"a": 2}'], ["", '{"a": 1},{"a": 2}']),
    "dispatch": (
        form("dispatch", rules=[["<f>", JSON], ["<g>", const("ab")]], excludes=["no"]),
        ["", "hi<g>ab", '<f>{"a": 1}<g>ab!'],
        ["<g>b", "no", "<g>abno"],
    ),
    "dispatch once": (
        form("dispatch", rules=[["<g>", const("ab")]], loop=False),
        ["", "hi<g>ab"],
        ["<g>ab!", "<g>ab<g>ab"],
    ),
    "text that begins with neither of two texts": (
        form(
            "or",
            elements=[
                sequence(const("[f("), JSON, const(")")),
                form("any_text", excluded_starts=["[f(", "[go("]),
            ],
        ),
        ["", "[", "[f", "[f]", "[g", "[go", "[go)x", "x[f(", "é", "é\n", '[f({"a": 1})'],
        ["[f(", "[f()", '[f({"a": "1"})', "[go(", "[go(x)"],
    ),
    "escaped line feed": (
        sequence(form("regex", pattern="a\\\n+/"), const("x")),
        ["a\n/x", "a\n\n/x"],
        ["a\\n/x", "a\\\n/x", "an/x", "a/x"],
    ),
    "regex": (sequence(form("regex", pattern="[a-z]+/"), const("x")), ["ab/x"], ["ab/", "/x"]),
}
#: Formats that LLGuidance's greedy lexer would read differently, or cannot express.
ONLY_XGRAMMAR: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "free text before JSON": (sequence(FREE, JSON), ['a{"a": 1}'], ["a", 'a{"a": 1}b']),
    "grammar": (
        sequence(form("grammar", grammar='root ::= "a" . b\nb ::= "c"'), const("!")),
        ["axc!"],
        ["ac!", "axc"],
    ),
    "qwen_xml_parameter": (
        form("qwen_xml_parameter", json_schema=CLOSED),
        ["<parameter=a>1</parameter>"],
        ["<parameter=a>x</parameter>", "<parameter=b>1</parameter>", ""],
    ),
    "glm_xml": (
        form("json_schema", json_schema=CLOSED, style="glm_xml"),
        ["<arg_key>a</arg_key><arg_value>1</arg_value>"],
        ["<arg_key>a</arg_key><arg_value>x</arg_value>"],
    ),
    "any_order": (
        form(
            "json_schema",
            json_schema=CLOSED | {"properties": {"a": {"type": "integer"}, "b": {"const": 1}}},
            any_order=True,
        ),
        ['{"b": 1, "a": 2}'],
        ['{"b": 2, "a": 2}', "{}"],
    ),
    "white space": (
        form("json_schema", json_schema=CLOSED, max_whitespace_cnt=2),
        ['{"a":1}', '{  "a": 1}'],
        ['{   "a": 1}'],
    ),
}


@pytest.fixture(scope="module")
def service():
    service = GrammarService(TOKENS, "auto")
    yield service
    service.close()


@pytest.fixture(scope="module")
def backends():
    return LLGuidanceBackend(TOKENS), XGrammarBackend(TOKENS)


def check(compiled: Any, good: list[str], bad: list[str]) -> None:
    assert [accepts(compiled, text) for text in good] == [True] * len(good)
    assert [accepts(compiled, text) for text in bad] == [False] * len(bad)


@pytest.mark.parametrize("format_, good, bad", FORMATS.values(), ids=FORMATS)
def test_structural_format_has_the_same_texts_in_both_backends(backends, format_, good, bad):
    for backend in backends:
        check(backend.compile(GrammarSpec.structural_format(format_)), good, bad)


@pytest.mark.parametrize("format_, good, bad", ONLY_XGRAMMAR.values(), ids=ONLY_XGRAMMAR)
def test_structural_format_that_llguidance_cannot_read_uses_xgrammar(
    service, backends, format_, good, bad
):
    spec = GrammarSpec.structural_format(json.dumps(format_))
    spec.check()
    compiled = service.submit(spec).result(timeout=300)
    assert compiled.backend.name == "XGrammar"
    check(compiled, good, bad)
    with pytest.raises(GrammarError, match=r"structural format: format.*LLGuidance"):
        backends[0].compile(spec)


def test_structural_format_routes_its_schemas(service):
    """XGrammar ignores ``not``; LLGuidance enforces it after the router has rewritten it."""
    schema = {"type": ["string", "null"], "not": {"const": "x"}}
    spec = GrammarSpec.structural_format(
        tag("<t>", form("json_schema", json_schema=schema), "</t>")
    )
    compiled = service.submit(spec.after("</think>")).result(timeout=300)
    assert compiled.backend.name == "LLGuidance"
    assert accepts(compiled, 'hm </think><t>"y"</t>')
    assert not accepts(compiled, 'hm </think><t>"x"</t>')
    unique = {"type": "array", "uniqueItems": True}
    spec = GrammarSpec.structural_format(
        sequence(const("a"), form("json_schema", json_schema=unique))
    )
    with pytest.raises(GrammarError, match=r"format\.elements\[1\]: .*uniqueItems"):
        spec.check()


def test_max_chars_counts_characters(service, backends):
    """With excludes, XGrammar would refuse some characters of several bytes."""
    limited = form("any_text", excludes=["<"], max_chars=2)
    spec = GrammarSpec.structural_format(sequence(limited, THOUGHT))
    compiled = service.submit(spec).result(timeout=300)
    assert compiled.backend.name == "LLGuidance"
    good = ["<think>", "é<think>", "é€<think>", "😀😀<think>"]
    check(
        compiled,
        [f"{text}x</think>" for text in good],
        ["abc<think></think>", "ééa<think></think>", "a<b<think></think>"],
    )
    with pytest.raises(GrammarError, match=r"format\.elements\[0\]: XGrammar.*max_chars"):
        backends[1].compile(spec)
    both = GrammarSpec.structural_format(sequence(limited, form("grammar", grammar="root ::= .")))
    with pytest.raises(GrammarError, match=r"LLGuidance.*type grammar.*; .*XGrammar.*max_chars"):
        both.check()


def test_special_tokens_delimit_a_tag(service):
    spec = GrammarSpec.structural_format(
        sequence(tag(token("<think>"), FREE, token(THINK)), const("x"))
    )
    compiled = service.submit(spec).result(timeout=300)
    assert accepts(compiled, THINK, "a<think>", THINK, "x")
    assert not accepts(compiled, "<think>", THINK, "x")
    assert not accepts(compiled, THINK, "a", "x")
    unknown = GrammarSpec.structural_format(token("<none>"))
    assert "special token" in str(service.submit(unknown).exception(timeout=300))


@pytest.mark.parametrize(
    "format_, message",
    [
        (None, r"format: must be an object with a type, got None"),
        ({"type": "nothing"}, r"format\.type: must be one of any_text, .*, got 'nothing'"),
        (form("any_tokens"), r"format\.type: must be one of"),
        (sequence(), r"format\.elements: must have at least one element"),
        (sequence(const("a"), form("regex")), r"elements\[1\]: regex needs the field 'pattern'"),
        (sequence(form("regex", pattern=1)), r"elements\[0\]\.pattern: must be a string, got 1"),
        (tag("<a>", FREE, []), r"format\.end: must have at least one element"),
        (tag("<a>", FREE, ""), r"at least one end string must be non-empty"),
        (form("repeat", min=2, max=1, content=FREE), r"format: min 2 is greater than max 1"),
        (form("any_text", max_tokens=3), r"format: .*max_tokens is not supported"),
        (form("any_text", maximum=3), r"format: any_text has no field 'maximum'"),
        (
            form("triggered_tags", triggers=["<g"], tags=CALLS),
            r"format\.tags\[0\]\.begin: '<f=1>' starts with 0 of the triggers",
        ),
        (form("dispatch", rules=[["a"]]), r"format\.rules\[0\]: must be \[pattern, format\]"),
    ],
)
def test_structural_format_error_names_place_and_value(format_, message):
    with pytest.raises(GrammarError, match=message):
        GrammarSpec.structural_format(format_).check()


def test_structural_format_limits_its_depth():
    nested = FREE
    for _ in range(2000):
        nested = form("optional", content=nested)
    with pytest.raises(GrammarError, match="nested more than 64 levels"):
        GrammarSpec.structural_format(nested)


#: Formats that contain another format in every place in which formats can be nested.
NESTINGS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "optional": lambda inner: form("optional", content=inner),
    "star": lambda inner: form("star", content=inner),
    "repeat": lambda inner: form("repeat", min=1, max=2, content=inner),
    "or": lambda inner: form("or", elements=[inner, const("a")]),
    "sequence": lambda inner: sequence(inner, form("or", elements=[const("c"), const("d")])),
    "tag": lambda inner: tag("<t>", inner, ["</t>", "</u>"]),
    "optional in tag": lambda inner: tag("<t>", form("optional", content=inner), "</t>"),
    "free text in tag": lambda inner: tag(
        "<t>", form("optional", content=sequence(inner, FREE)), "</t>"
    ),
    "optional free text": lambda inner: tag(
        "<t>", sequence(inner, form("optional", content=FREE)), "</t>"
    ),
    "triggered_tags": lambda inner: form(
        "triggered_tags", triggers=["<f="], tags=[tag("<f=1>", inner, "</f>")], at_least_one=True
    ),
    "tags_with_separator": lambda inner: form(
        "tags_with_separator", tags=[tag("<f=1>", inner, "</f>")], separator=","
    ),
}


@pytest.mark.parametrize("nest", NESTINGS.values(), ids=NESTINGS)
def test_size_of_nested_format_is_proportional_to_its_depth(nest):
    sizes = {}
    for depth in (4, 8, 16):
        nested = const("b")
        for _ in range(depth):
            nested = nest(nested)
        sizes[depth] = len(lark_text(parse_format(nested), "line"))
    assert sizes[16] - sizes[8] < 3 * (sizes[8] - sizes[4])


def test_deeply_nested_optional_format_is_checked_quickly(service):
    """The time limit of a check is 30 seconds."""
    nested = const("b")
    for _ in range(60):
        nested = form("optional", content=nested)
    spec = GrammarSpec.structural_format(nested)
    spec.check()
    check(service.submit(spec).result(timeout=300), ["", "b"], ["bb"])


# Random formats --------------------------------------------------------------------------------


WORDS = ("a", "ab", "<t>", "</t>", "<f=", "x", "1", "</")
#: Patterns, each with texts that match it.
PATTERNS = {"[a-c]+": ("a", "abc"), "x?": ("", "x"), "(ab|x)*": ("", "ab", "xab")}


class Generator:
    """Generates random formats, and texts that fit or almost fit a format."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)

    def format(self, depth: int = 0) -> dict[str, Any]:
        choose = self.random.choice
        kinds = ["const_string", "any_text", "json_schema", "regex"]
        if depth < 3:
            kinds += ["sequence", "or", "tag", "optional", "star", "repeat"] * 2
            kinds += ["triggered_tags", "tags_with_separator"] * 2
        kind = choose(kinds)
        if kind == "const_string":
            return const(choose(WORDS))
        if kind == "any_text":
            return form(kind, excludes=choose([[], ["x"]]), max_chars=choose([None, None, 2]))
        if kind == "json_schema":
            return form(kind, json_schema=choose([{"enum": ["q", 12]}, {"type": "boolean"}]))
        if kind == "regex":
            return form(kind, pattern=choose(list(PATTERNS)))
        if kind in ("sequence", "or"):
            count = self.random.randrange(1, 4)
            return form(kind, elements=[self.format(depth + 1) for _ in range(count)])
        if kind == "repeat":
            return form(kind, min=1, max=choose([-1, 1, 2]), content=self.format(depth + 1))
        if kind in ("optional", "star"):
            return form(kind, content=self.format(depth + 1))
        if kind == "tag":
            return self.tag(choose(["<t>", "<b>"]), depth)
        tags = [self.tag(begin, depth) for begin in ("<f=1>", "<f=2>")]
        names = ("at_least_one", "stop_after_first")
        flags: dict[str, Any] = {name: choose([False, True]) for name in names}
        if kind == "triggered_tags":
            return form(kind, triggers=["<f="], tags=tags, excludes=choose([[], ["x"]]), **flags)
        return form(kind, tags=tags, separator=choose([",", ""]), **flags)

    def tag(self, begin: str, depth: int) -> dict[str, Any]:
        end = self.random.choice(["</t>", ["</t>", "</b>"]])
        return tag(begin, self.format(depth + 1), end)

    def text(self, format_: dict[str, Any]) -> str:
        """Return a text, which most often fits the format."""
        choose = self.random.choice
        kind = format_["type"]
        if kind == "const_string":
            return str(format_["value"])
        if kind == "any_text":
            return self.free_text()
        if kind == "json_schema":
            return str(choose(["true", "false", '"q"', "12"]))
        if kind == "regex":
            return str(choose(PATTERNS[format_["pattern"]]))
        if kind == "sequence":
            return "".join(map(self.text, format_["elements"]))
        if kind == "or":
            return self.text(choose(format_["elements"]))
        if kind == "tag":
            end = format_["end"]
            end = end if isinstance(end, str) else choose(end)
            return f"{format_['begin']}{self.text(format_['content'])}{end}"
        parts = [self.text(format_["content"])] if "content" in format_ else []
        parts += map(self.text, format_.get("tags", []))
        found = self.random.choices(parts, k=self.random.randrange(3))
        if kind == "triggered_tags":
            found = [self.free_text() + part for part in found] + [self.free_text()]
        return str(format_.get("separator", "")).join(found)

    def free_text(self) -> str:
        return "".join(self.random.choices(["", "a", "x", "<", "<f"], k=2))

    def changed(self, text: str) -> str:
        at = self.random.randrange(len(text) + 1)
        return text[:at] + self.random.choice(["", *WORDS]) + text[at + 1 :]


def test_random_formats_have_the_texts_of_xgrammar():
    """The oracle is XGrammar's matcher for the unchanged format.

    LLGuidance refuses some formats. The others must allow exactly the same texts.
    """
    backend = LLGuidanceBackend(TOKENS)
    oracle = XGrammarBackend(TOKENS)
    compiler = new_compiler(oracle._info)
    outcomes = {(True, True): 0, (False, False): 0}
    for seed in range(150):
        generator = Generator(seed)
        format_ = generator.format()
        spec = GrammarSpec.structural_format(format_)
        try:
            compiled = backend.compile(spec)
        except GrammarError:
            continue
        document = json.dumps({"type": "structural_tag", "format": _without_nulls(format_)})
        expected = oracle._compiled_grammar(spec, compiler.compile_structural_tag(document))
        for _ in range(8):
            text = generator.text(format_)
            for variant in (text, generator.changed(text)):
                outcome = accepts(compiled, variant), accepts(expected, variant)
                assert outcome in outcomes, (seed, format_, variant)
                outcomes[outcome] += 1
    assert min(outcomes.values()) > 200


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def test_masks_of_random_formats_agree_with_accepted_tokens():
    """Every legal token can be accepted, and no other token."""
    import numpy as np

    backend = LLGuidanceBackend(TOKENS)
    for seed in (3, 5, 8, 21):
        generator = Generator(seed)
        try:
            compiled = backend.compile(GrammarSpec.structural_format(generator.format()))
        except GrammarError:
            continue
        matcher = compiled.matcher()
        for _ in range(12):
            if matcher.is_terminated():
                break
            row = np.zeros(TOKENS.words, np.int32)
            if not matcher.fill(row):
                row[:] = -1
            legal = [i for i in range(TOKENS.size) if row[i // 32] >> i % 32 & 1]
            for candidate in range(TOKENS.size):
                if accepted := matcher.accept(candidate):
                    matcher.rollback(1)
                assert accepted == (candidate in legal), (seed, candidate)
            assert matcher.accept(generator.random.choice(legal))


def test_trigger_lookup_finds_triggers_that_begin_a_text():
    """The lookup agrees with `str.startswith`, also for equal triggers and different lengths."""
    rng = random.Random(1)
    for _ in range(300):
        triggers = ["".join(rng.choices("ab", k=rng.randint(1, 5))) for _ in range(6)]
        text = "".join(rng.choices("ab", k=rng.randint(0, 6)))
        expected = sorted((t for t in triggers if text.startswith(t)), key=len)
        assert TriggerLookup(triggers).find(text) == expected


def test_structural_tag_with_many_triggers_is_read_quickly():
    """Comparing each of 30,000 tags with each trigger would take minutes."""
    names = [f"<{number}>" for number in range(30_000)]
    tag = StructuralTag.of("<>", {"type": "object"}, "</>")
    tags = [replace(tag, begin=name) for name in names]
    spec = GrammarSpec.structural_tag(tags, names)
    assert len(json.loads(spec.text)["tags"]) == len(tags)
