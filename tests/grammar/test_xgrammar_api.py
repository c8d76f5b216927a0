"""Matchers and compilers with XGrammar's interface, compared with enumerated languages."""

from __future__ import annotations

import array
import inspect
import json
import random
from pathlib import Path

import numpy as np
import pytest

from graft.grammar import GrammarError, Vocabulary, xgrammar_api
from graft.grammar.xgrammar_api import BatchGrammarMatcher, GrammarCompiler, GrammarMatcher

STOP = 1
PIECES = [b"an", b"ana", b"nas", b"ap", b"ppl", b"es", b"\xc3\xa9", b'"a"', b'{"', b"ba", b"e,"]
TOKENS = [b"", b""] + [bytes([byte]) for byte in range(256)] + PIECES
VOCABULARY = Vocabulary(TOKENS, len(TOKENS), [STOP])
WORDS = ["banana", "bananas", "band", "apple", "apples", "applé!", "applè!", "x"]


@pytest.fixture(scope="module", params=["llguidance", "xgrammar"])
def compiler(request):
    compiler = GrammarCompiler(VOCABULARY, backend=request.param)
    yield compiler
    compiler.close()


@pytest.fixture(scope="module")
def words(compiler):
    """Grammar whose language is `WORDS`."""
    rules = " | ".join(json.dumps(word, ensure_ascii=False) for word in WORDS)
    if compiler._service.backend.name == "xgrammar":
        return compiler.compile_grammar(f"root ::= {rules}")
    return compiler.compile_regex("|".join(WORDS))


@pytest.mark.parametrize(
    ("method", "name"),
    [
        (GrammarCompiler.compile_json_schema, "indent"),
        (GrammarCompiler.compile_json_schema, "separators"),
        (GrammarCompiler.compile_json_schema, "any_order"),
        (GrammarMatcher.accept_token, "debug_print"),
        (GrammarMatcher.fill_next_token_bitmask, "debug_print"),
        (GrammarMatcher.__init__, "default_temperature"),
    ],
)
def test_page_lists_parameters_that_are_missing(method, name):
    assert name not in inspect.signature(method).parameters
    page = (Path(__file__).resolve().parents[2] / "grammar" / "PLUGINS.md").read_text()
    assert f"`{name}`" in page


def bitmask():
    return xgrammar_api.allocate_token_bitmask(1, VOCABULARY.size)


def legal_tokens(matcher):
    mask = bitmask()
    matcher.fill_next_token_bitmask(mask)
    bits = np.unpackbits(mask[0].view(np.uint8), bitorder="little")[: VOCABULARY.size]
    return set(np.flatnonzero(bits).tolist())


def continuations(prefix):
    """Return the texts that complete `prefix` to a word of the language."""
    texts = [word.encode() for word in WORDS]
    return [text[len(prefix) :] for text in texts if text.startswith(prefix)]


def forced_text(rests):
    """Return the longest text that all continuations start with, in whole characters."""
    length = 0
    while all(
        len(rest) > length and rest[: length + 1] == rests[0][: length + 1] for rest in rests
    ):
        length += 1
    forced = rests[0][:length]
    if forced and forced[0] & 0xC0 == 0x80:  # starts within a character
        return ""
    while forced:
        try:
            return forced.decode()
        except UnicodeDecodeError:
            forced = forced[:-1]
    return ""


def expected_tokens(prefix):
    rests = continuations(prefix)
    legal = {
        token
        for token, text in enumerate(TOKENS)
        if text and any(rest.startswith(text) for rest in rests)
    }
    return legal | ({STOP} if b"" in rests else set())


def test_bitmask_and_jump_forward_string_equal_enumerated_language(words):
    """Follow random paths through the language and compare every state with the enumeration."""
    generator = random.Random(3)
    for _ in range(12):
        matcher = GrammarMatcher(words)
        prefix = b""
        while not matcher.is_terminated():
            legal = legal_tokens(matcher)
            assert legal == expected_tokens(prefix)
            rests = continuations(prefix)
            assert matcher.find_jump_forward_string() == forced_text(rests)
            assert matcher.is_completed() == (b"" in rests)
            token = generator.choice(sorted(legal))
            assert matcher.accept_token(token)
            prefix += TOKENS[token]
        assert prefix.decode() in WORDS


def test_accept_token_leaves_state_unchanged_when_illegal(words):
    matcher = GrammarMatcher(words)
    assert matcher.accept_string("ban")
    before = legal_tokens(matcher)
    for token in (TOKENS.index(b"ba"), STOP, 0, -1, len(TOKENS), 2**40):
        assert not matcher.accept_token(token)
    assert legal_tokens(matcher) == before
    assert matcher.accept_string("anas")


def test_rollback_restores_each_earlier_bitmask(words):
    matcher = GrammarMatcher(words)
    masks = [legal_tokens(matcher)]
    for text in (b"b", b"an", b"ana"):
        assert matcher.accept_token(TOKENS.index(text))
        masks.append(legal_tokens(matcher))
    for steps in (1, 2, 3):
        fork = matcher.fork()
        fork.rollback(steps)
        assert legal_tokens(fork) == masks[-1 - steps]
    matcher.reset()
    assert legal_tokens(matcher) == masks[0]


def test_fork_is_independent_of_original(words):
    matcher = GrammarMatcher(words)
    assert matcher.accept_string("ban")
    fork = matcher.fork()
    assert fork.accept_string("d")
    assert legal_tokens(fork) == {STOP}
    assert legal_tokens(matcher) == expected_tokens(b"ban")
    assert fork.stop_token_ids == matcher.stop_token_ids == [STOP]


def test_accept_string_is_one_step_of_rollback(words):
    matcher = GrammarMatcher(words)
    assert matcher.accept_token(TOKENS.index(b"ap"))
    assert matcher.accept_string(b"pl")
    assert not matcher.accept_string("ex")
    assert legal_tokens(matcher) == expected_tokens(b"appl")
    matcher.rollback(1)
    assert legal_tokens(matcher) == expected_tokens(b"ap")


def test_matcher_terminates_with_stop_token_and_rolls_back(words):
    matcher = GrammarMatcher(words)
    assert matcher.accept_string("band")
    assert matcher.is_completed() and not matcher.is_terminated()
    assert matcher.accept_token(STOP)
    assert matcher.is_completed() and matcher.is_terminated()
    assert not matcher.accept_token(STOP)
    assert matcher.find_jump_forward_string() == ""
    with pytest.raises(GrammarError, match="terminated"):
        matcher.fill_next_token_bitmask(bitmask())
    matcher.rollback(2)
    assert not matcher.is_terminated() and not matcher.is_completed()
    assert legal_tokens(matcher) == expected_tokens(b"")


def test_matcher_terminates_without_stop_token_when_complete(words):
    matcher = GrammarMatcher(words, terminate_without_stop_token=True)
    assert matcher.accept_string("appl")
    assert not matcher.is_terminated()
    assert matcher.accept_string("e")
    assert matcher.is_terminated()
    assert not matcher.accept_string("s")


def test_override_stop_tokens_replaces_stop_ids(words):
    matcher = GrammarMatcher(words, override_stop_tokens=0)
    assert matcher.stop_token_ids == [0]
    assert matcher.accept_string("x")
    assert legal_tokens(matcher) == {0}


def test_fill_next_token_bitmask_returns_false_when_all_tokens_are_legal():
    vocabulary = Vocabulary([b"", b"a", b"aa"], 3, [0])
    compiler = GrammarCompiler(vocabulary, backend="llguidance")
    matcher = GrammarMatcher(compiler.compile_regex("a*"))
    mask = np.zeros((1, 1), np.int32)
    need_apply = matcher.fill_next_token_bitmask(mask)
    assert mask[0, 0] & 0b111 == 0b111
    assert need_apply == (mask[0, 0] != -1)
    compiler.close()


class DLPackOnly:
    """An array of another library, which offers only the DLPack protocol."""

    def __init__(self, values):
        self.values = values

    def __dlpack__(self, **options):
        return self.values.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.values.__dlpack_device__()


def test_bitmask_may_come_from_dlpack_or_the_buffer_protocol(words):
    matcher = GrammarMatcher(words)
    expected = bitmask()
    matcher.fill_next_token_bitmask(expected)
    foreign = bitmask()
    matcher.fill_next_token_bitmask(DLPackOnly(foreign))
    np.testing.assert_array_equal(foreign, expected)
    buffer = array.array("i", [0] * VOCABULARY.words)
    matcher.fill_next_token_bitmask(buffer)
    np.testing.assert_array_equal(np.asarray(buffer), expected[0])


@pytest.mark.parametrize("threads", [1, 4, "auto"])
def test_batch_fill_writes_only_the_given_rows(words, threads):
    matchers = [GrammarMatcher(words) for _ in range(3)]
    texts = ["ban", "a", "appl"]
    assert BatchGrammarMatcher.batch_accept_string(matchers, texts) == [True] * 3
    mask = xgrammar_api.allocate_token_bitmask(5, VOCABULARY.size)
    BatchGrammarMatcher(threads).batch_fill_next_token_bitmask(matchers, mask, [4, 0, 2])
    for row, matcher in zip((4, 0, 2), matchers, strict=True):
        alone = bitmask()
        matcher.fill_next_token_bitmask(alone)
        np.testing.assert_array_equal(mask[row], alone[0])
    assert (mask[[1, 3]] == -1).all()
    tokens = [TOKENS.index(b"d"), TOKENS.index(b"d"), TOKENS.index(b"e")]
    assert BatchGrammarMatcher.batch_accept_token(matchers, tokens) == [True, False, True]
    BatchGrammarMatcher.batch_rollback(matchers, [2, 1, 0])
    assert legal_tokens(matchers[0]) == expected_tokens(b"")


def test_compiled_json_schema_forces_keys(compiler):
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Bern", "Berlin"]}, "unit": {"const": "C"}},
        "required": ["city", "unit"],
    }
    matcher = GrammarMatcher(compiler.compile_json_schema(schema, any_whitespace=False))
    assert matcher.find_jump_forward_string() == '{"city": "Ber'
    assert matcher.accept_string('{"city": "Ber')
    assert matcher.find_jump_forward_string() == ""
    assert matcher.accept_string("n")
    assert matcher.find_jump_forward_string() == '", "unit": "C"}'


def test_builtin_json_grammar_accepts_json_only(compiler):
    matcher = GrammarMatcher(compiler.compile_builtin_json_grammar())
    assert matcher.accept_string('{ "a" : [1, null, "é"]}')
    assert matcher.is_completed()
    matcher.reset()
    assert not matcher.accept_string("{a")


def test_structural_tag_constrains_text_after_trigger(compiler):
    tag = {
        "structures": [{"begin": "<f>", "schema": {"enum": [1, 2]}, "end": "</f>"}],
        "triggers": ["<f"],
    }
    matcher = GrammarMatcher(compiler.compile_structural_tag(json.dumps(tag)))
    assert matcher.accept_string("call <f>")
    assert not matcher.accept_string("3")
    assert matcher.accept_string("2</f> done")


def small_compiled():
    compiler = GrammarCompiler(VOCABULARY, backend="llguidance")
    compiled = compiler.compile_regex("a")
    compiler.close()
    return compiled


READ_ONLY = bitmask()
READ_ONLY.flags.writeable = False
REFUSALS = [
    ("object", lambda m: m.fill_next_token_bitmask("mask"), "DLPack or the buffer protocol"),
    ("dtype", lambda m: m.fill_next_token_bitmask(bitmask().view(np.uint32)), "expected int32"),
    ("width", lambda m: m.fill_next_token_bitmask(bitmask()[:, 1:]), "expected int32"),
    ("row", lambda m: m.fill_next_token_bitmask(bitmask(), 1), r"row 1 is outside \[0, 1\)"),
    ("read_only", lambda m: m.fill_next_token_bitmask(READ_ONLY), "writable"),
    ("rollback", lambda m: m.rollback(1), r"num_tokens is 1, must be in \[0, 0\]"),
    ("negative", lambda m: m.rollback(-1), "num_tokens is -1"),
    ("compiled", lambda m: GrammarMatcher("a"), "result of GrammarCompiler"),
    ("stop", lambda m: GrammarMatcher(m._compiled, override_stop_tokens=[9**9]), "stop id"),
    ("threads", lambda m: BatchGrammarMatcher(0), "must be positive or 'auto'"),
    (
        "indices",
        lambda m: BatchGrammarMatcher(1).batch_fill_next_token_bitmask([m, m], bitmask(), [0, 0]),
        "needs 2 different rows",
    ),
    ("tag", lambda m: xgrammar_api.structural_tag_spec({"triggered": {}}), "'structures'"),
    ("format", lambda m: xgrammar_api.structural_tag_spec({"format": {}}), "with a type"),
    (
        "structure",
        lambda m: xgrammar_api.structural_tag_spec({"structures": [{}], "triggers": ["<"]}),
        "structure 0 needs 'begin' and 'end'",
    ),
]


@pytest.mark.parametrize(("name", "call", "words"), REFUSALS, ids=[row[0] for row in REFUSALS])
def test_invalid_arguments_raise(name, call, words):
    matcher = GrammarMatcher(small_compiled())
    with pytest.raises(GrammarError, match=words):
        call(matcher)


def test_compiler_refuses_schema_that_cannot_be_enforced(compiler):
    with pytest.raises(GrammarError):
        compiler.compile_json_schema({"type": "nope"})
