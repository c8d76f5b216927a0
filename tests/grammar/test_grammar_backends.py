"""Tests of all kinds of grammars with every backend, and of the matcher interface."""

from __future__ import annotations

import numpy as np
import pytest
from guide_util import SPECS, STOP, THINK, byte_vocabulary, fits

from graft.cudagraph.errors import OptionError
from graft.grammar import GrammarError, GrammarSpec, make_backend

OPTIONS = [
    'say "hi"',
    "back\\slash",
    "\\n",
    "\\u0041",
    "new\nline",
    "tab\t",
    "\r",
    "\x00",
    "\x7f",
    "é",
    "日本語",
    "\U0001f600",
    "\u2028",
    "[a-z]",
    "a|b",
    "(x)*",
    "'",
    "{}",
    "::=",
    "#c",
    " a ",
]


@pytest.mark.parametrize("option", OPTIONS)
def test_choice_accepts_exactly_its_strings(backend, option):
    spec = GrammarSpec.choice([option, "other"])
    assert fits(backend, spec, option) and fits(backend, spec, "other")
    for wrong in (option + "x", option[:-1], option[1:], "x" + option, option.replace("\\", "")):
        assert wrong == option or not fits(backend, spec, wrong)


def test_regex_with_slashes_and_newlines(backend):
    for pattern, text in ((r"a/b\/c", "a/b/c"), ("a\nb", "a\nb")):
        assert fits(backend, GrammarSpec.regex(pattern), text)


def test_strict_schema_forbids_additional_properties(backend):
    """For XGrammar, ``strict=True`` is the default."""
    inner = {"type": "object", "properties": {"a": {"type": "integer"}}}
    schema = {"type": "object", "properties": {"o": inner}}
    text = '{"o": {"a": 1, "z": 2}}'
    assert not fits(backend, GrammarSpec.json_schema(schema, strict=True), text)
    assert fits(backend, GrammarSpec.json_schema(schema, strict=False), text)
    assert fits(backend, GrammarSpec.json_schema(schema), text) == (backend.name != "XGrammar")


def test_marker_as_token_name_id_and_text(backend):
    """A marker text that names an added token matches the token and its text.

    A marker that is a token id matches only the token.
    """
    yes = GrammarSpec.choice(["yes"])
    assert fits(backend, yes.after("</think>"), "so... ", THINK, "yes")
    assert fits(backend, yes.after("</think>"), "so... </think>yes")
    assert fits(backend, yes.after(THINK), "a </think> b", THINK, "yes")
    assert not fits(backend, yes.after(THINK), "</think>yes", THINK)
    assert not fits(backend, yes.after("</think>"), "so", THINK, "no")
    # A stop id is legal in the free text and ends the output, unless the marker is required.
    assert fits(backend, yes.after("</think>"), "so")
    assert not fits(backend, yes.after("</think>", required=True), "so")


def test_marker_must_end_with_its_token(backend):
    """A token that contains the end of the marker and further text is illegal."""
    matcher = backend.compile(GrammarSpec.choice(["yes"]).after('t"')).matcher()
    assert 261 in matcher.legal() and matcher.accept(ord("t"))
    assert 261 not in matcher.legal() and not matcher.accept(261)  # the token '": '
    assert matcher.accept(ord('"'))
    assert matcher.legal().tolist() == [ord("y")]
    matcher.rollback(2)
    assert matcher.legal().size > 200  # the matcher is in the free text again


def test_matcher_starts_after_given_tokens(backend):
    compiled = backend.compile(SPECS["text, then choice"])
    tokens = b'so a":ab'
    other = compiled.matcher()
    assert all(map(other.accept, tokens))
    assert compiled.matcher(tokens=tokens).legal().tolist() == other.legal().tolist()
    with pytest.raises(GrammarError, match="token 270 at index 1 is illegal"):
        backend.compile(SPECS["regex"]).matcher(tokens=[97, 270])


def test_marked_matcher_rollback_is_limited_in_free_text(backend):
    """The matcher keeps the last 64 tokens of free text. A rollback of more tokens is an error."""
    matcher = backend.compile(GrammarSpec.choice(["yes"]).after("</t>")).matcher()
    for token in (b"abcd" * 50) + b"</t":
        assert matcher.accept(token)
    matcher.rollback(60)
    for token in b"</t>":
        assert matcher.accept(token)
    assert matcher.legal().tolist() == [ord("y")]
    with pytest.raises(GrammarError, match="more tokens of free text than the history has"):
        matcher.rollback(9)


def test_matcher_rejects_invalid_markers(backend):
    ends = "one of the request's stop ids"
    for token, stops, message in (
        (270, None, "outside"),
        (STOP, None, "stop id"),
        (THINK, [STOP, THINK], ends),
    ):
        grammar = backend.compile(GrammarSpec.regex("a").after(token))
        with pytest.raises(GrammarError, match=message):
            grammar.matcher(stops)


def test_lark_grammar_compiles_in_the_service(backend, serve):
    spec = GrammarSpec.lark('start: "a" NUMBER\nNUMBER: /[0-9]+/')
    spec.check(backend.name.lower())
    compiled = serve(backend.name.lower()).submit(spec).result(timeout=300)
    assert compiled.matcher(tokens=[ord("a")]).legal().tolist() == [*range(ord("0"), ord("9") + 1)]


def test_backend_error_is_one_sentence(backend, serve):
    """The error message is one sentence, both from the backend and from the compile service."""
    service = serve(backend.name.lower())
    for spec in (GrammarSpec("regex", "(a"), GrammarSpec("lark", "start: missing_rule")):
        with pytest.raises(GrammarError) as here:
            backend.compile(spec)
        there = service.submit(spec).exception()
        assert isinstance(there, GrammarError)
        for text in (str(here.value), str(there)):
            assert text.startswith(spec.kind) and "\n" not in text


def test_matcher_fill_rejects_invalid_rows(backend):
    """The libraries ignore the strides of a row and would corrupt memory for a strided row."""
    matcher = backend.compile(SPECS["regex"]).matcher()
    words = backend.vocabulary.words
    memory = np.full(2 * words, 7, np.int32)
    with pytest.raises((TypeError, ValueError, GrammarError)):
        matcher.fill(memory[::2])
    assert (memory == 7).all()
    with pytest.raises((TypeError, ValueError, RuntimeError, GrammarError)):
        matcher.fill(memory[: words - 1])
    assert (memory == 7).all()


def test_matcher_rejects_invalid_tokens_and_arguments(backend, capfd):
    """An illegal token does not change the matcher's state, and the library prints nothing.

    After a stop id has terminated the matcher, the matcher accepts no token until the stop id is
    rolled back.
    """
    matcher = backend.compile(GrammarSpec.regex("ab+")).matcher()
    for token in (-1, 270, 2**31, -(2**31) - 1, 2**40):
        assert not matcher.accept(token)
    assert matcher.accept(ord("a")) and not matcher.accept(256) and matcher.accept(ord("b"))
    for stop in (256, 257):
        assert {256, 257} <= set(matcher.legal().tolist())
        assert matcher.accept(stop) and matcher.is_terminated()
        assert not matcher.accept(256) and not matcher.accept(ord("b"))
        with pytest.raises(GrammarError, match="terminated"):
            matcher.legal()
        matcher.rollback(1)
        assert matcher.accept(ord("b")) and not matcher.is_terminated()
    for wrong in (-1, 2**31, None, 0.5):
        with pytest.raises(GrammarError, match="rollback: takes a number of tokens"):
            matcher.rollback(wrong)
    with pytest.raises(GrammarError, match="mask row: must be an int32 array"):
        matcher.fill(None)
    with pytest.raises(GrammarError, match="must be a GrammarSpec, got 5"):
        backend.compile(5)
    printed = capfd.readouterr()
    assert printed.out == printed.err == ""


def test_make_backend_and_vocabulary_reject_unknown_names():
    with pytest.raises(OptionError, match="nonesuch"):
        make_backend("nonesuch", byte_vocabulary())
    with pytest.raises(GrammarError, match="token '<x>' has id 270, outside"):
        byte_vocabulary(names={"<x>": 270})


def test_make_backend_imports_factory_by_name():
    backend = make_backend("own_backend:OwnBackend", byte_vocabulary())
    assert type(backend).__name__ == "OwnBackend" and fits(backend, GrammarSpec.regex("a+"), "aa")
    for name, message in (
        ("own_backend:missing", r"'own_backend:missing': AttributeError: .*missing"),
        ("no_module:x", "'no_module:x': ModuleNotFoundError: .*no_module"),
        ("own_backend:fail", "'own_backend:fail': NotImplementedError$"),
        ("own_backend:__name__", "TypeError: 'str' object is not callable"),
        ("os:fspath", "TypeError"),
    ):
        with pytest.raises(OptionError, match=message) as caught:
            make_backend(name, byte_vocabulary())
        assert caught.value.__cause__ is not None  # has the traceback


def test_lark_special_tokens_must_be_in_vocabulary():
    for names in ({"</think>": THINK}, {}):
        backend = make_backend("llguidance", byte_vocabulary(names=names))
        if names:
            assert fits(backend, GrammarSpec.lark('start: "a" </think> "b"'), "a", THINK, "b")
        with pytest.raises(GrammarError, match="special token") as caught:
            backend.compile(GrammarSpec.lark('start: "a" <|y|>'))
        assert len(str(caught.value)) < 200 and "\n" not in str(caught.value)
