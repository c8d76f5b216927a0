"""Automata of regular grammars, compared with LLGuidance's matcher in every state.

The comparison visits each state of an automaton with a text that leads to it, and each transition.
In all of them, the token bitmask must equal LLGuidance's bit for bit, except for tokens with
escapes of JSON strings (see `UnescapedMatcher`). The vocabulary has a token for each byte and
longer tokens that cross the boundaries of characters and JSON tokens.
"""

from __future__ import annotations

import functools
import gzip
import itertools
import json
import random
import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from unescaped_matcher import FIRST_BYTE, UnescapedMatcher

from graft.grammar import GrammarError, GrammarSpec, LLGuidanceBackend, Vocabulary, resolve_spec
from graft.grammar.automaton.lower import MAX_STATES, compile_automaton, lower
from graft.grammar.matcher import NativeBackedMatcher
from graft.grammar.regular.regex import NoAutomaton
from graft.native import _native

STOP = 1


def make_vocabulary():
    generator = random.Random(0)
    tokens = [b"", b""] + [bytes([byte]) for byte in range(256)]
    for _ in range(300):
        length = generator.randint(2, 6)
        tokens.append(
            bytes(generator.choice(b'abc019-.: ,"{}[]\xc3\xa9\n\\') for _ in range(length))
        )
    return Vocabulary(tokens, len(tokens) + 5, [STOP])


VOCABULARY = make_vocabulary()
BACKEND = LLGuidanceBackend(VOCABULARY)
WITHOUT_AUTOMATA = LLGuidanceBackend(VOCABULARY, automata=False)


class Table:
    """Transition table of a serialized automaton.

    A configuration is a state, a stack and the value of the counter.
    """

    start = (0, (), 0)

    def __init__(self, data):
        table = _native.guide.AutomatonGrammar(data, BACKEND._trie, BACKEND._row_memory).table()
        self.byte_class = table["classes"].tolist()
        self.accepting = table["accepting"]
        self.next = table["next"]
        self.actions = table["actions"].tolist()
        self.counts = table["counts"].tolist()
        pairs = table["returns"].tolist()
        begins = table["returns_begin"].tolist()
        self.returns = [dict(pairs[a:b]) for a, b in itertools.pairwise(begins)]

    def step(self, configuration, byte_class):
        """Return the configuration after a byte of a class; None if the byte is illegal."""
        state, stack, count = configuration
        target = int(self.next[state, byte_class])
        if target >= 0:
            return target, stack, count
        if target == -1:
            return None
        entry, argument = self.actions[-2 - target]
        if entry == -1:  # pop
            return self.returns[stack[-1]][argument], stack[:-1], 0
        if entry == -2:  # count
            limit, below, reached = self.counts[argument]
            return below if count + 1 < limit else reached, stack, count + 1
        if entry == -3:  # reset
            return argument, stack, 0
        return argument, (*stack, entry), 0

    def accepts(self, text):
        configuration = self.start
        for byte in text:
            configuration = self.step(configuration, self.byte_class[byte])
            if configuration is None:
                return False
        return bool(self.accepting[configuration[0]]) and not configuration[1]


def table_of(spec):
    data = compile_automaton(resolve_spec(spec, "llguidance"))
    assert data is not None
    return Table(data)


def visiting_texts(table, limit):
    """Return texts that visit each state and each transition of an automaton, at most `limit`."""
    access = {0: (b"", Table.start)}
    queue = [0]
    texts = [b""]
    while queue and len(texts) < limit:
        before, configuration = access[queue.pop(0)]
        for index in range(table.next.shape[1]):
            following = table.step(configuration, index)
            if following is None:
                continue
            text = before + bytes([table.byte_class.index(index)])
            texts.append(text)
            if following[0] not in access:
                access[following[0]] = text, following
                queue.append(following[0])
    return texts


def compile_expression(expression):
    return _native.guide.compile_automaton([(0, 0, expression)], MAX_STATES)


def row_after(matcher, text):
    for byte in text:
        assert matcher.accept(FIRST_BYTE + byte)
    row = np.zeros(VOCABULARY.words, np.int32)
    assert matcher.fill(row)
    return row


@functools.lru_cache(maxsize=64)
def compile_without_automaton(spec):
    return WITHOUT_AUTOMATA.compile(spec)


def llguidance_matcher(compiled):
    return compile_without_automaton(compiled.spec).matcher()


def unescaped_matcher(compiled):
    return UnescapedMatcher(compile_without_automaton(compiled.spec), VOCABULARY)


def require_equal_masks(spec, limit=400):
    compiled = BACKEND.compile(spec)
    assert compiled.automaton is not None
    for text in visiting_texts(table_of(spec), limit):
        matcher, expected = compiled.matcher(), unescaped_matcher(compiled)
        row = row_after(matcher, text)
        if not all(expected.accept(FIRST_BYTE + byte) for byte in text):
            assert not expected.allows_controls
            continue
        legal = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        expected.require_row(legal.tolist(), text)
        expected.require_escapes(matcher, text)


PATTERNS = [
    "[0-9]{3}-(foo|bar)+",
    "[a-z ]{1,20}",
    "a*b|c?",
    "(a|b)*abb",
    "[^a]{2}",
    ".{1,3}",
    "é+x",
    "[à-ü]+",
    "a{0}b",
    "(ab|a)(c|bcd)(d*)",
    r"\.\+\n",
    r"[\]a\-z]+",
    "[a-c-]+",
    "()a",
    "(|a)b",
    "x{2,}y",
    r'[^\n"]*"',
    "a|",
    "a/b",
    r"\x41\u00e9[\x30-\x35]",
    "[ -~]*",
    "\U0001f600|[\U00010000-\U0010ffff]",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_regex_automaton_has_masks_of_llguidance(pattern):
    require_equal_masks(GrammarSpec.regex(pattern))


def test_regex_automaton_accepts_same_texts_as_python():
    """Automata and ``re`` accept the same texts of up to four characters."""
    alphabet = "ab1-"
    texts = [""]
    for _ in range(4):
        texts += [text + char for text in texts for char in alphabet]
    for pattern in ("(a|b)*abb", "a{2,3}(-1)?", "[^a]*a", "(1|-){2}|b+", "((a?b){2}1?)+"):
        table = table_of(GrammarSpec.regex(pattern))
        for text in set(texts):
            assert table.accepts(text.encode()) == bool(re.fullmatch(pattern, text)), text


def test_choice_automaton_has_masks_of_llguidance():
    require_equal_masks(GrammarSpec.choice(["positive", "positively", "né", 'a "b"', "x\ny"]))


def closed(properties, required=None):
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required is None else required,
        "additionalProperties": False,
    }


SCHEMAS = {
    "string": closed({"a": {"type": "string"}}),
    "numbers": closed({"a": {"type": "integer"}, "b": {"type": "number"}}),
    "all_optional": closed({"a": {"type": "boolean"}, "b": {"type": "null"}}, []),
    "optional_first": closed(
        {"a": {"type": "integer"}, "b": {"type": "boolean"}, "c": {"enum": ["x", "y z"]}}, ["b"]
    ),
    "array": closed({"t": {"type": "array", "items": {"enum": ["p", "q"]}}}),
    "array_bounds": closed(
        {"t": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 4}}
    ),
    "string_bounds": closed({"t": {"type": "string", "minLength": 2, "maxLength": 4}}),
    "enum": {"enum": ["a", 1, True, None]},
    "types": closed({"i": {"type": ["integer", "null"]}}),
    "any_of": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
    "nested": {"type": "array", "items": {"type": "array", "items": {"type": "boolean"}}},
    "empty_object": closed({}),
    "reference": {"$ref": "#/$defs/n", "$defs": {"n": closed({"k": {"const": "v"}})}},
    "empty_array": {"type": "array", "items": {"type": "null"}, "maxItems": 0},
    "annotations": {"title": "T", "type": "integer", "x-unknown": 3, "description": "d"},
}


def const(value):
    return {"type": "const_string", "value": value}


def tag(begin, content, end):
    return {"type": "tag", "begin": begin, "content": content, "end": end}


NUMBER = {"type": "json_schema", "json_schema": {"type": "integer"}}
OBJECT = {"type": "json_schema", "json_schema": closed({"a": {"enum": ["x", 1]}})}
TAGS = [tag("<a>", OBJECT, "</a>"), tag("<ab>", const("é"), ["</a>", "</b>"])]
FORMATS = {
    "sequence": {"type": "sequence", "elements": [const("["), OBJECT, const("]")]},
    "or": {"type": "or", "elements": [const("ab"), const("xy"), OBJECT]},
    "texts": {"type": "or", "elements": [const("ab"), const("abc"), const("")]},
    "tags": {"type": "tags_with_separator", "tags": TAGS, "separator": ", "},
    "one tag": {
        "type": "tags_with_separator",
        "tags": TAGS,
        "separator": ", ",
        "at_least_one": True,
        "stop_after_first": True,
    },
    "text before tags": {
        "type": "sequence",
        "elements": [
            const("<"),
            {"type": "tags_with_separator", "tags": TAGS, "separator": "", "at_least_one": True},
            const(">"),
        ],
    },
    "optional": {
        "type": "sequence",
        "elements": [
            {"type": "optional", "content": tag("a=", NUMBER, "")},
            {"type": "optional", "content": tag(", b=", OBJECT, "")},
            const(")"),
        ],
    },
    "repetitions": {
        "type": "sequence",
        "elements": [
            {"type": "plus", "content": const("ab")},
            {"type": "star", "content": const("c")},
            {"type": "repeat", "min": 1, "max": 2, "content": OBJECT},
        ],
    },
    "regex": {"type": "sequence", "elements": [{"type": "regex", "pattern": "[a-c]*"}, const("x")]},
}


@pytest.mark.parametrize("name", FORMATS)
def test_structural_format_automaton_has_masks_of_llguidance(name):
    require_equal_masks(GrammarSpec.structural_format(FORMATS[name]))


@pytest.mark.parametrize("token", [257, 0xBFFFF, 0xC0000])
def test_special_token_of_structural_format_counts_in_distance(token):
    """Automata cannot read special tokens with very large ids."""
    tokens = [bytes([byte]) for byte in range(256)] + [b""]
    vocabulary = Vocabulary(tokens, token + 1, [256], {"<tag>": token})
    spec = GrammarSpec.structural_format(tag("<tag>", OBJECT, "<tag>"))
    compiled = LLGuidanceBackend(vocabulary).compile(spec)
    assert (compiled.automaton is None) == (token == 0xC0000)
    path = [token, *b'{"a": 1}', token]
    assert all(map(compiled.matcher().accept, [*path, 256]))
    if compiled.automaton is None:
        return
    matcher = compiled.matcher()
    for left in range(len(path), 0, -1):
        assert matcher.distance() == left + 1  # and the stop id
        assert matcher.accept(path[-left])
    assert matcher.distance() == 1


def real_schemas(shared_data, every):
    """Return every n-th JSON schema of MaskBench."""
    schemas = []
    for path in sorted((shared_data / "maskbench").glob("*.jsonl.gz")):
        with gzip.open(path, "rt") as lines:
            schemas += [
                json.loads(line)["schema"] for line in itertools.islice(lines, 0, None, every)
            ]
    return schemas


@pytest.mark.parametrize("whitespace", ["line", "compact"])
@pytest.mark.parametrize("name", SCHEMAS)
def test_schema_automaton_has_masks_of_llguidance(name, whitespace):
    require_equal_masks(GrammarSpec.json_schema(SCHEMAS[name], whitespace=whitespace))


SCHEMA_PATTERNS = [
    r"^[^a]$",
    r'^["\\]$',
    r"ab",
    r"^ab",
    r"b$",
    r"^\d{2}-\w+$",
    r"^\W\D$",
    r"^(a|b)c$",
    r"a|b",
    r"",
    r"\n",
]


@pytest.mark.parametrize("pattern", SCHEMA_PATTERNS)
def test_schema_pattern_automaton_has_masks_of_llguidance(pattern):
    require_equal_masks(GrammarSpec.json_schema({"type": "string", "pattern": pattern}))


@pytest.mark.full
def test_real_schema_automata_have_masks_of_llguidance(shared_data):
    compared = 0
    schemas = real_schemas(shared_data, 25)
    for schema in schemas:
        spec = GrammarSpec.json_schema(schema, strict=True)
        if has_automaton(spec):
            require_equal_masks(spec, 300)
            compared += 1
    assert compared > 0.85 * len(schemas)


def has_automaton(spec):
    try:
        return compile_automaton(resolve_spec(spec, "llguidance")) is not None
    except GrammarError:  # the router refuses the schema
        return False


NOT_LOWERED = {
    "word_boundary": GrammarSpec("regex", r"a\b"),
    "octal_escape": GrammarSpec("regex", r"\101"),
    "script": GrammarSpec("regex", r"\p{Greek}"),
    "inner_anchor": GrammarSpec("regex", "a^b"),
    "cases_outside_ascii": GrammarSpec("regex", "(?i)é"),
    "recursive_rule": GrammarSpec.ebnf('root ::= "a" root "b" | "c"'),
    "key_order": GrammarSpec.json_schema(closed({"a": {}, "b": {}}), key_order="any"),
    "token": GrammarSpec.structural_format({"type": "token", "token": 3}),
}


@pytest.mark.parametrize("name", NOT_LOWERED)
def test_lower_refuses_grammar_without_known_automaton(name):
    with pytest.raises(NoAutomaton):
        lower(resolve_spec(NOT_LOWERED[name], "llguidance"))


@pytest.mark.parametrize(
    "pattern", ["[ab]*a[ab]{15}", "((a{60}){60}){60}", "(?:(?:(?:){4096}){350}){350}"]
)
def test_automaton_larger_than_limit_is_not_compiled(pattern):
    """The first automaton would have 65,536 states; the second would have 216,000.

    The third would have one state after 500 million repetitions of the empty text.
    """
    spec = GrammarSpec.regex(pattern)
    with pytest.raises(ValueError, match=r"has more than 32767 states|is too large|takes too long"):
        compile_expression(lower(resolve_spec(spec, "llguidance"))[0][2])
    assert compile_automaton(resolve_spec(spec, "llguidance")) is None


@pytest.mark.parametrize(
    "program", [[], [10], [2, 3], [0, 0], [1, 1, 5, 2], [4, 0, 1], [0, 4, 3, 1]]
)
def test_malformed_expression_raises(program):
    with pytest.raises(RuntimeError, match="malformed expression"):
        compile_expression(program)


def test_expression_without_texts_raises():
    with pytest.raises(ValueError, match="allows no text"):
        compile_expression([1, 0])


def test_invalid_serialized_automaton_raises():
    data = compile_automaton(resolve_spec(GrammarSpec.regex("ab"), "llguidance"))
    memory = _native.guide.RowMemory(1 << 20)
    for broken in (b"", data[:-1], data + b"x", data[:28] + b"\xff" * (len(data) - 28)):
        with pytest.raises(RuntimeError, match="invalid data"):
            _native.guide.AutomatonGrammar(broken, BACKEND._trie, memory)


def test_matcher_rolls_back_tokens_and_stop_token():
    matcher = BACKEND.compile(GrammarSpec.regex("ab+")).matcher(tokens=[FIRST_BYTE + ord("a")])
    before = row_after(matcher, b"")
    assert not matcher.accept(STOP)
    assert matcher.accept(FIRST_BYTE + ord("b"))
    assert not matcher.accept(FIRST_BYTE + ord("a"))
    assert matcher.accept(STOP) and matcher.is_terminated()
    assert not matcher.accept(FIRST_BYTE + ord("b"))
    matcher.rollback(2)
    np.testing.assert_array_equal(row_after(matcher, b""), before)


def test_row_memory_is_given_back_when_grammar_is_freed():
    compiled = BACKEND.compile(GrammarSpec.regex("[xyz]{1,9}!"))
    used = [BACKEND._row_memory.bytes_in_use]
    for text in (b"", b"x", b"y"):  # the state after x and after y is the same
        row_after(compiled.matcher(), text)
        used.append(BACKEND._row_memory.bytes_in_use)
    assert used[0] < used[1] < used[2] == used[3]
    del compiled
    assert BACKEND._row_memory.bytes_in_use <= used[0]


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_masks_are_correct_when_row_memory_is_full(rows):
    data = compile_automaton(resolve_spec(GrammarSpec.regex("[ab]{4}"), "llguidance"))
    memory = _native.guide.RowMemory(rows * (4 * VOCABULARY.words + 200))
    grammar = _native.guide.AutomatonGrammar(data, BACKEND._trie, memory)
    compiled = BACKEND.compile(GrammarSpec.regex("[ab]{4}"))
    for text in (b"", b"a", b"ab", b"aba", b"abab", b"a", b"ab"):
        matcher = NativeBackedMatcher(
            compiled, (STOP,), _native.guide.AutomatonMatcher(grammar, (STOP,))
        )
        expected = row_after(llguidance_matcher(compiled), text)
        np.testing.assert_array_equal(row_after(matcher, text), expected)
    assert (memory.bytes_in_use > 0) == (rows > 0)


def test_threads_fill_rows_of_one_grammar():
    compiled = BACKEND.compile(GrammarSpec.regex("[a-c]{1,200}"))
    expected = {n: row_after(llguidance_matcher(compiled), b"a" * n) for n in range(0, 200, 9)}

    def check(lengths):
        for n in lengths:
            np.testing.assert_array_equal(row_after(compiled.matcher(), b"b" * n), expected[n])

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(check, [list(expected)] * 4))


def test_duplicate_tokens_are_legal_together():
    vocabulary = Vocabulary([b"", b"a", b"b", b"a", b"ab"], 5, [0])
    backend = LLGuidanceBackend(vocabulary)
    compiled = backend.compile(GrammarSpec.regex("ab"))
    assert compiled.matcher().legal().tolist() == [1, 3, 4]


def test_json_text_of_enum_is_exact():
    table = table_of(GrammarSpec.json_schema({"enum": ["a", 10, None]}))
    for value in ("a", 10, None):
        assert table.accepts(json.dumps(value).encode())
    for value in ("b", 1, 100, False, ["a"]):
        assert not table.accepts(json.dumps(value).encode())
