"""Tests of workarounds for defects of XGrammar."""

from __future__ import annotations

import itertools
import json
import random

import pytest
from guide_util import accepts, byte_vocabulary

from graft.grammar import GrammarError, GrammarSpec, ResolvedGrammar, StructuralTag, Vocabulary
from graft.grammar.backends.xgrammar import XGrammarBackend, _compile
from graft.grammar.structural.formats import parse_format


@pytest.mark.parametrize(
    "pattern, text",
    [
        (r"\x41b", "Ab"),
        (r"\x{41}b", "Ab"),
        (r"[\x41-\x43]b", "Cb"),
        (r"\\x41b", r"\x41b"),
        ("^a$", "a"),
        ("[$^]", "^"),
        (r"[\^a]", "^"),
        (r"é[\^]+b", "é^^b"),
        (r"[\^a-]{3}", "^-a"),
    ],
)
def test_xgrammar_patterns_are_converted(xgrammar, pattern, text):
    compiled = xgrammar.compile(GrammarSpec("regex", pattern))
    assert accepts(compiled, text) and not accepts(compiled, text.replace("^", "_") + "_")
    assert "^" not in text or not accepts(compiled, text.replace("^", "_"))
    if "\\" not in text and pattern.isascii():
        schema = {"type": "string", "pattern": pattern}
        value = GrammarSpec.json_schema(schema, backend="xgrammar")
        assert accepts(xgrammar.compile(value), f'"{text}"')


@pytest.mark.parametrize(
    "pattern", [r"a\Zb", r"\Aa", r"a\z", r"\Qa\E", r"\h", "a^", "a$b", r"[\^-z]"]
)
def test_xgrammar_refuses_patterns_that_it_misreads(xgrammar, pattern):
    for spec in (
        GrammarSpec("regex", pattern),
        GrammarSpec.json_schema({"type": "string", "pattern": pattern}, backend="xgrammar"),
    ):
        with pytest.raises(GrammarError, match=r"support"):
            xgrammar.compile(spec)


@pytest.mark.parametrize(
    "spec",
    [
        GrammarSpec.json_schema({"type": "string"}, backend="xgrammar"),
        GrammarSpec("regex", '"[^a]+"'),
        GrammarSpec.ebnf('root ::= "\\"" [^"]* "\\""'),
    ],
    ids=lambda spec: spec.kind,
)
def test_xgrammar_refuses_encoded_surrogates(spec):
    """The bytes of a surrogate may be one token, or several tokens. Rollback is exact."""
    bytewise = byte_vocabulary()
    tokens = [*bytewise.tokens, b"x\xed", b"\xed\xa0\x80", b"\xa0\x80", b"\xed\x9f\xbf"]
    split, surrogate, rest, valid = range(len(bytewise.tokens), len(tokens))
    backend = XGrammarBackend(Vocabulary(tokens, len(tokens), bytewise.stop_ids))
    matcher = backend.compile(spec).matcher()
    assert matcher.accept(ord('"'))
    assert not matcher.accept(surrogate) and surrogate not in matcher.legal()
    for token in (0xED, split):
        assert matcher.accept(token)
        legal = matcher.legal().tolist()
        assert 0x9F in legal and not {0xA0, 0xBF, rest} & set(legal)
        assert not matcher.accept(0xA0) and not matcher.accept(rest)
        assert matcher.accept(0x9F) and matcher.accept(0xBF)
        matcher.rollback(2)
        assert not matcher.accept(0xA0)
        matcher.rollback(1)
    assert matcher.accept(valid) and matcher.accept(ord('"'))


INVALID = [b"\xc0\x80", b"\xe0\x9f\x80", b"\xed\xa0\x80", b"\xf0\x8f\x80\x80", b"\xf4\x90\x80\x80"]
VALID = ["\xa0", "\u0800", "\ud7ff", "\U00010000", "\U0010ffff"]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "^.*$"},
        {"type": "object", "patternProperties": {"^[^a]+$": {}}, "additionalProperties": False},
        {"type": "object", "propertyNames": {"type": "string", "pattern": "^[^a]+$"}},
    ],
    ids=json.dumps,
)
def test_xgrammar_refuses_bytes_that_are_not_utf8(schema):
    """The bytes may be one token or several tokens, and rollback is exact."""
    tokens = [bytes([byte]) for byte in range(256)] + INVALID + [b"x\xf0", b"\x8f\x80", b"y\xe0"]
    vocabulary = Vocabulary(tokens, len(tokens) + 1, [len(tokens)])
    spec = GrammarSpec.json_schema(schema, backend="xgrammar")
    matcher = XGrammarBackend(vocabulary).compile(spec).matcher()
    start = b'"x' if schema["type"] == "string" else b'{"x'
    assert matcher.accept_all(list(start)) == len(start)
    for text in INVALID:
        assert tokens.index(text) not in matcher.legal() and not matcher.accept(tokens.index(text))
        assert matcher.accept_all(list(text)) < 2
        assert not matcher.accept(text[1])
        matcher.rollback(int(text[0] != 0xC0))
    split = tokens.index(b"x\xf0")
    assert matcher.accept(split) and not matcher.accept(tokens.index(b"\x8f\x80"))
    assert 0x8F not in matcher.legal() and 0x90 in matcher.legal()
    matcher.rollback(1)
    for text in VALID:
        assert matcher.accept_all(list(text.encode())) == len(text.encode())


def test_xgrammar_accepts_stop_id_beyond_the_tokens():
    vocabulary = Vocabulary([bytes([byte]) for byte in range(256)], 300, [280])
    matcher = XGrammarBackend(vocabulary).compile(GrammarSpec.regex("a")).matcher()
    assert matcher.accept(ord("a"))
    assert matcher.legal().tolist() == [280]
    assert matcher.accept(280) and matcher.is_terminated()


def closed(**keywords):
    return {"type": "object", "additionalProperties": False, **keywords}


PATTERNS = [
    ("^[ -~]{1,8}$", True),
    ("^[^a]*$", True),
    (r"^\s\S\W.$", True),
    (r"^[\n\]a]b$", True),
    ("a", True),
    ('^"$', False),
    ('^["]$', False),
    (r"a\\b", False),
    (r"^a\n$", False),
    ("a\t", False),
    (r"\u0022", False),
    (r"[\x1f]", False),
    (r"\cA", False),
    ('(a|"b)', False),
    (r"^\u0022a$", False),
    (r"^\x5Cb\u{22}$", False),
    ("^[A-Zà-ÿ]*é?[a-c_]$", True),
    (r"^\u00e9?[^a]$", True),
    ("^é[^a]$", False),
    ("^[ -~]é$", False),
    (r"^[\^a]日$", False),
    (r"^(é|\S)*$", False),
]
STRINGS = [
    ({"type": "string"}, True),
    ({"type": "string", "minLength": 0}, True),
    ({"type": "string", "minLength": 1}, False),
    ({"type": "string", "maxLength": 5}, False),
    (closed(properties={"a": {"type": ["null", "string"], "maxLength": 3}}), False),
    (closed(propertyNames={"type": "string", "maxLength": 3}, additionalProperties={}), False),
    ({"type": "string", "format": "json-pointer"}, False),
    *(({"type": "string", "pattern": pattern}, safe) for pattern, safe in PATTERNS),
    *((closed(patternProperties={pattern: {"type": "null"}}), safe) for pattern, safe in PATTERNS),
]


@pytest.mark.parametrize("schema, safe", STRINGS, ids=lambda value: json.dumps(value))
def test_xgrammar_strings_are_json_or_refused(xgrammar, schema, safe):
    """Outputs are JSON. Schemas for which XGrammar cannot ensure this are refused, or partial.

    The random outputs prefer the characters that JSON strings must escape.
    """
    if not safe:
        for call in (xgrammar.compile, GrammarSpec.check):
            with pytest.raises(GrammarError, match=r"cannot be enforced: #.*XGrammar"):
                call(GrammarSpec.json_schema(schema, backend="xgrammar"))
    spec = GrammarSpec.json_schema(schema, backend="xgrammar", partial=not safe)
    compiled = xgrammar.compile(spec)
    outputs = 0
    for seed in range(12):
        rng = random.Random(seed)
        matcher = compiled.matcher()
        output = bytearray()
        while not matcher.is_terminated() and len(output) < 200:
            stops = [token for token in matcher.stop_ids if token in matcher.legal()]
            legal = [token for token in matcher.legal().tolist() if token < 0x80]
            unsafe = [token for token in legal if token < 0x20 or token in b'"\\']
            choices = stops or (unsafe if unsafe and rng.random() < 0.5 else legal)
            if not choices:  # only bytes of other characters are legal
                break
            token = rng.choice(choices)
            assert matcher.accept(token)
            output += bytes([token]) if token < 256 else b""
        if matcher.is_terminated():
            json.loads(output)
            outputs += 1
    assert outputs or schema.get("pattern") == "a"


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]},
        {"type": "string", "pattern": "^a", "maxLength": 3},
        {"oneOf": [{"type": "string"}, {"type": "string", "pattern": "^a"}]},
        {"anyOf": [{"type": "object"}, {"type": "null"}], "properties": {"a": {"type": "null"}}},
        {"type": "string", "format": "date"},
        {"type": "array", "items": {"type": "string", "format": "date-time"}},
    ],
    ids=json.dumps,
)
def test_xgrammar_refusals_agree(xgrammar, serve, schema):
    """``check``, the backend and the compile service have the same message."""
    spec = GrammarSpec.json_schema(schema, backend="xgrammar")
    messages = set()
    for call in (GrammarSpec.check, xgrammar.compile, lambda spec: serve().submit(spec).result(99)):
        with pytest.raises(GrammarError) as caught:
            call(spec)
        messages.add(str(caught.value))
    assert len(messages) == 1


def test_xgrammar_dates_are_legal_where_formats_are_annotations(xgrammar):
    schema = {"type": "string", "format": "date"}
    spec = GrammarSpec.json_schema(schema, backend="xgrammar", assert_formats=False)
    assert accepts(xgrammar.compile(spec), '"2024-02-29"')


@pytest.mark.parametrize(
    "ends",
    [[">>"], ["aba"], ["ab", "ba"], ["ab", "b"], ["aab"], ["ab"], ["a", "ab"], ["abab"], ["bab"]],
    ids="-".join,
)
def test_xgrammar_free_text_ends_at_the_first_end_or_is_refused(xgrammar, ends):
    form = {"type": "tag", "begin": "<", "content": {"type": "any_text"}, "end": ends}
    spec = GrammarSpec.structural_format(form)
    alphabet = sorted({*"".join(ends), "x"})

    def ends_first(text):
        found = [i for i in range(len(text) + 1) if text[:i].endswith(tuple(ends))]
        return found[:1] == [len(text)]

    def is_exact(compiled):
        texts = itertools.chain(*(itertools.product(alphabet, repeat=n) for n in range(7)))
        return all(accepts(compiled, f"<{t}") == ends_first(t) for t in map("".join, texts))

    if ends in (["ab", "b"], ["aab"], ["ab"]):
        assert is_exact(xgrammar.compile(spec))
    else:  # XGrammar would be wrong
        with pytest.raises(GrammarError, match="XGrammar cannot see where the end"):
            xgrammar.compile(spec)
        form = parse_format(json.loads(spec.text))
        native = _compile(xgrammar._info, ResolvedGrammar(spec, "xgrammar", form))
        assert not is_exact(xgrammar._compiled_grammar(spec, native))


def test_xgrammar_refuses_triggers_that_overlap_with_begins(xgrammar):
    """XGrammar misses a trigger only where free text precedes a tag that must occur."""
    for begin, is_refused in ((">>", True), ("<a", False), ("aba", True)):
        tag = StructuralTag.of(begin, {"type": "integer"}, ".")
        for options in ({}, {"at_once": True}):
            optional = GrammarSpec.structural_tag([tag], [begin], **options)
            assert accepts(xgrammar.compile(optional), f"{begin}1.")
        spec = GrammarSpec.structural_tag([tag], [begin], at_least_one=True)
        if is_refused:
            with pytest.raises(GrammarError, match="XGrammar cannot see where the trigger"):
                xgrammar.compile(spec)
            with pytest.raises(GrammarError, match="XGrammar cannot see where the trigger"):
                spec.check("xgrammar")
        else:
            assert accepts(xgrammar.compile(spec), f"x<{begin}1.")


def test_xgrammar_backend_keeps_nothing_of_stop_ids():
    """A matcher accepts its own stop ids. The backend stores nothing about them."""
    backend = XGrammarBackend(byte_vocabulary())
    compiled = backend.compile(GrammarSpec.regex("a+"))
    sizes = {name: len(value) for name, value in vars(backend).items() if hasattr(value, "__len__")}
    for other in (257, 264, 269):
        matcher = compiled.matcher((256, other))
        assert matcher.accept(ord("a"))
        assert {256, other} <= set(matcher.legal().tolist())
        assert matcher.accept(other) and matcher.is_terminated()
    for name, size in sizes.items():
        assert len(getattr(backend, name)) == size, name


@pytest.mark.parametrize(
    "bounds",
    [
        {"exclusiveMinimum": 2**53 + 1},
        {"maximum": -(2**53) - 1},
        {"minimum": 10.870000000000001, "maximum": 10.870000000000001},
    ],
)
def test_xgrammar_refuses_bounds_that_it_rounds(xgrammar, bounds):
    for types in ("number", ["number", "null"]):
        spec = GrammarSpec.json_schema({"type": types, **bounds}, backend="xgrammar")
        with pytest.raises(GrammarError, match="digits"):
            xgrammar.compile(spec)
    xgrammar.compile(GrammarSpec.json_schema({"type": "integer", "maximum": 2**53 + 1}))
