"""Every way to state a constraint, on every backend, and what is refused when stated."""

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
def test_a_choice_is_taken_literally(backend, option):
    """A choice accepts exactly its strings, whatever characters they contain."""
    spec = GrammarSpec.choice([option, "other"])
    assert fits(backend, spec, option) and fits(backend, spec, "other")
    for wrong in (option + "x", option[:-1], option[1:], "x" + option, option.replace("\\", "")):
        assert wrong == option or not fits(backend, spec, wrong)


def test_slashes_and_newlines_in_a_regex(backend):
    """Characters that end or break a regex elsewhere are taken as they are."""
    for pattern, text in ((r"a/b\/c", "a/b/c"), ("a\nb", "a\nb")):
        assert fits(backend, GrammarSpec.regex(pattern), text)


def test_strict_objects_take_no_further_properties(backend):
    """Strict closes objects that list their properties; so does XGrammar unrouted."""
    inner = {"type": "object", "properties": {"a": {"type": "integer"}}}
    schema = {"type": "object", "properties": {"o": inner}}
    text = '{"o": {"a": 1, "z": 2}}'
    assert not fits(backend, GrammarSpec.json_schema(schema, strict=True), text)
    assert fits(backend, GrammarSpec.json_schema(schema, strict=False), text)
    assert fits(backend, GrammarSpec.json_schema(schema), text) == (backend.name != "XGrammar")


def test_markers_by_name_by_id_and_as_text(backend):
    """A marker that names an added token is that token or its text; an id is that token alone."""
    yes = GrammarSpec.choice(["yes"])
    assert fits(backend, yes.after("</think>"), "so... ", THINK, "yes")
    assert fits(backend, yes.after("</think>"), "so... </think>yes")
    assert fits(backend, yes.after(THINK), "a </think> b", THINK, "yes")
    assert not fits(backend, yes.after(THINK), "</think>yes", THINK)
    assert not fits(backend, yes.after("</think>"), "so", THINK, "no")
    # a stop id in the free text ends it, unless the marker is required
    assert fits(backend, yes.after("</think>"), "so")
    assert not fits(backend, yes.after("</think>", required=True), "so")


def test_no_token_carries_the_marker_and_more(backend):
    """A token with the marker's end inside is illegal, so the grammar sees every later byte."""
    matcher = backend.compile(GrammarSpec.choice(["yes"]).after('t"')).matcher()
    assert 261 in matcher.legal() and matcher.accept(ord("t"))
    assert 261 not in matcher.legal() and not matcher.accept(261)  # it is '": '
    assert matcher.accept(ord('"'))
    assert matcher.legal().tolist() == [ord("y")]
    matcher.rollback(2)
    assert matcher.legal().size > 200  # the matcher is un-started


def test_a_matcher_may_begin_behind_tokens(backend):
    """It allows what one does that has taken them; what the grammar refuses of them is named."""
    compiled = backend.compile(SPECS["text, then choice"])
    tokens = b'so a":ab'
    other = compiled.matcher()
    assert all(map(other.accept, tokens))
    assert compiled.matcher(tokens=tokens).legal().tolist() == other.legal().tolist()
    with pytest.raises(GrammarError, match="token 270 at index 1 is illegal"):
        backend.compile(SPECS["regex"]).matcher(tokens=[97, 270])


def test_free_text_is_undone_as_far_as_it_is_kept(backend):
    """The scanner keeps the last 64 free tokens; a deeper rollback is an error, not a guess."""
    matcher = backend.compile(GrammarSpec.choice(["yes"]).after("</t>")).matcher()
    for token in (b"abcd" * 50) + b"</t":
        assert matcher.accept(token)
    matcher.rollback(60)
    for token in b"</t>":
        assert matcher.accept(token)
    assert matcher.legal().tolist() == [ord("y")]
    with pytest.raises(GrammarError, match="more free text than is kept"):
        matcher.rollback(9)


def test_markers_that_are_no_markers_are_refused(backend):
    """A marker token out of range, or one that ends the request, is refused with the matcher."""
    ends = "one of the request's stop ids"
    for token, stops, said in (
        (270, None, "outside"),
        (STOP, None, "stop id"),
        (THINK, [STOP, THINK], ends),
    ):
        grammar = backend.compile(GrammarSpec.regex("a").after(token))
        with pytest.raises(GrammarError, match=said):
            grammar.matcher(stops)


def test_grammars_that_a_backend_refuses(backend, serve):
    """A grammar with an error is refused in one sentence, here and by the compile service."""
    service = serve(backend.name.lower())
    for spec in (GrammarSpec("regex", "(a"), GrammarSpec("lark", "start: missing_rule")):
        with pytest.raises(GrammarError) as here:
            backend.compile(spec)
        there = service.submit(spec).exception()
        assert isinstance(there, GrammarError)
        for text in (str(here.value), str(there)):
            assert text.startswith(spec.kind) and "\n" not in text


def test_rows_that_are_not_contiguous_are_refused(backend):
    """The libraries ignore strides: a row with gaps must not be written as if it had none."""
    matcher = backend.compile(SPECS["regex"]).matcher()
    words = backend.vocabulary.words
    memory = np.full(2 * words, 7, np.int32)
    with pytest.raises((TypeError, ValueError, GrammarError)):
        matcher.fill(memory[::2])
    assert (memory == 7).all()
    with pytest.raises((TypeError, ValueError, RuntimeError, GrammarError)):
        matcher.fill(memory[: words - 1])
    assert (memory == 7).all()


def test_ids_out_of_range_and_after_the_end_change_nothing(backend, capfd):
    """-1, the size, 2**31 and a token after the stop id are refused, silently, without a trace;
    every stop id ends a complete grammar, until it is rolled back."""
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


def test_unknown_backends_and_names_are_refused():
    """A backend that is not there, and a named token that is text or out of range."""
    with pytest.raises(OptionError, match="nonesuch"):
        make_backend("nonesuch", byte_vocabulary())
    for token, message in ((97, "is text"), (270, "outside")):
        with pytest.raises(GrammarError, match=message):
            byte_vocabulary(names={"<x>": token})


def test_special_tokens_of_a_lark_grammar_are_the_vocabularys():
    """LLGuidance takes those that the vocabulary names; others are refused in a sentence."""
    for names in ({"</think>": THINK}, {}):
        backend = make_backend("llguidance", byte_vocabulary(names=names))
        if names:
            assert fits(backend, GrammarSpec.lark('start: "a" </think> "b"'), "a", THINK, "b")
        with pytest.raises(GrammarError, match="special token") as caught:
            backend.compile(GrammarSpec.lark('start: "a" <|y|>'))
        assert len(str(caught.value)) < 200 and "\n" not in str(caught.value)
