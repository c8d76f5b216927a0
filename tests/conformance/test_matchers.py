"""Rollbacks restore the matcher, and a mask has exactly the acceptable ids.

These tests use the grammar package without an engine, with both grammar libraries and with
automata. The oracles are new matchers that have accepted only the tokens that remain, and for masks
the matcher's answer to every single id.
"""

from __future__ import annotations

import functools
import itertools
import json

import numpy as np
import pytest
from guide_util import OTHER_STOP, STOP, byte_vocabulary
from public_issues import issue

from graft.grammar import GrammarSpec, LLGuidanceBackend, Vocabulary, make_backend

THINK = 266
SCHEMA = GrammarSpec.json_schema(
    {
        "type": "object",
        "properties": {
            "abc": {"type": "string"},
            "n": {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
        },
        "required": ["abc", "n"],
        "additionalProperties": False,
    }
)
TEXT = b'{"abc": "ab", "n": [12, 3]}'
#: Kinds of matchers. By default, graft runs an automaton in place of LLGuidance's matcher.
KINDS = ("automaton", "llguidance", "xgrammar")


@functools.cache
def compiled(kind, spec):
    vocabulary = byte_vocabulary(names={"<|tool|>": THINK})
    if kind == "xgrammar":
        return make_backend(kind, vocabulary).compile(spec)
    return LLGuidanceBackend(vocabulary, automata=kind == "automaton").compile(spec)


def legal(matcher):
    return matcher.legal().tolist()


every_kind = pytest.mark.parametrize("kind", KINDS)


@issue(
    "XGrammar",
    161,
    "A rollback over a stop token undoes too many characters.",
    "After every rollback from a terminated matcher, the mask is that of the remaining text.",
)
@issue(
    "vLLM",
    25905,
    "A rollback over a drafted EOS leaves the matcher terminated.",
    "The rollback ends the termination; the matcher can accept the stop id again.",
)
@every_kind
@pytest.mark.parametrize("stop", [STOP, OTHER_STOP])
def test_rollback_over_a_stop_id(kind, stop):
    matcher = compiled(kind, SCHEMA).matcher()
    tokens = [*TEXT, stop]
    for count in range(1, 12):
        assert matcher.accept_all(tokens) == len(tokens) and matcher.is_terminated()
        matcher.rollback(count)
        assert not matcher.is_terminated()
        kept = tokens[: len(tokens) - count]
        assert legal(matcher) == legal(compiled(kind, SCHEMA).matcher(tokens=kept))
        matcher.rollback(len(kept))


@issue(
    "XGrammar",
    164,
    "A refused token leaves the matcher in the middle of the token's characters.",
    "A token of several characters whose last one is illegal changes nothing.",
)
@issue(
    "LLGuidance",
    211,
    "After a refused token, the matcher is in an error state forever.",
    "The matcher goes on after any number of refused tokens.",
)
@every_kind
def test_refused_tokens_do_not_change_the_state(kind):
    vocabulary = byte_vocabulary()
    matcher = compiled(kind, SCHEMA).matcher()
    refused = 0
    for token in TEXT:
        expected = legal(matcher)
        for other in (*range(258, vocabulary.size), ord("]"), STOP, 10**9, -1):
            if other not in expected:
                assert not matcher.accept(other)
                refused += 1
        assert legal(matcher) == expected
        assert matcher.accept(token)
    assert refused > 100 and matcher.accept(STOP)


@issue(
    "XGrammar",
    389,
    "A rollback fails if no maximum was set when the matcher was created.",
    "A rollback of a whole output of 27 tokens works without a setting.",
)
@every_kind
def test_rollback_of_the_whole_output(kind):
    matcher = compiled(kind, SCHEMA).matcher()
    start = legal(matcher)
    for _ in range(3):
        assert matcher.accept_all(TEXT) == len(TEXT)
        matcher.rollback(len(TEXT))
        assert legal(matcher) == start
    assert matcher.accept_all([*TEXT, STOP]) == len(TEXT) + 1


@issue(
    "LLGuidance",
    239,
    "A list of tokens that ends with EOS is accepted, but the same tokens one by one are not.",
    "All ways to divide the tokens are accepted and lead to the same state.",
)
@every_kind
def test_accepting_tokens_in_groups(kind):
    spec = GrammarSpec.regex("ab|abc")
    for tokens in ([*b"ab", STOP], [*b"abc", OTHER_STOP]):
        for cuts in itertools.product((False, True), repeat=len(tokens) - 1):
            matcher = compiled(kind, spec).matcher()
            groups = [[tokens[0]]]
            for cut, token in zip(cuts, tokens[1:], strict=True):
                if cut:
                    groups.append([])
                groups[-1].append(token)
            assert [matcher.accept_all(group) for group in groups] == list(map(len, groups))
            assert matcher.is_terminated()


@issue(
    "LLGuidance",
    305,
    "With several EOS ids, the mask allows all of them but only one is accepted.",
    "At the end of the grammar, each stop id is in the mask and is accepted.",
)
@issue(
    "XGrammar",
    905,
    "A stop id that the request overrides is in the mask inside a string, and is then refused.",
    "In every state, an id is in the mask if and only if the matcher accepts it.",
)
@issue(
    "MLC-LLM",
    2223,
    "Tokens that the mask allows are not accepted by the JSON grammar.",
    "As above.",
)
@every_kind
@pytest.mark.parametrize("stops", [(STOP,), (OTHER_STOP,), (STOP, OTHER_STOP, THINK)])
def test_mask_equals_the_accepted_ids_in_every_state(kind, stops):
    matcher = compiled(kind, SCHEMA).matcher(stop_ids=stops)
    for done in range(len(TEXT) + 1):
        accepted = []
        for token in range(matcher.size):
            if matcher.accept(token):
                matcher.rollback(1)
                accepted.append(token)
        assert legal(matcher) == accepted
        ends = {*stops} & {*accepted}
        assert ends == ({*stops} if done == len(TEXT) else set())
        if done < len(TEXT):
            assert matcher.accept(TEXT[done])


@issue(
    "vLLM",
    46272,
    "The rollback of a structural tag damages its state, and the next legal token is refused.",
    "After rollbacks at every place of a tagged call, the rest of the text is accepted.",
)
@every_kind
def test_rollback_inside_a_structural_tag(kind):
    arguments = {"type": "json_schema", "json_schema": json.loads(SCHEMA.text)}
    tag = {"type": "tag", "begin": "<call>", "content": arguments, "end": "</call>"}
    form = {"type": "triggered_tags", "triggers": ["<call>"], "tags": [tag]}
    grammar = compiled(kind, GrammarSpec.structural_format(form))
    text = b"so: <call>" + TEXT + b"</call> and"
    matcher = grammar.matcher()
    for done in range(len(text)):
        ahead = text[done : done + 4]
        assert matcher.accept_all(ahead) == len(ahead)
        matcher.rollback(len(ahead))
        assert matcher.accept(text[done])
        assert legal(matcher) == legal(grammar.matcher(tokens=text[: done + 1]))
    wrong = b'<call>{"abd'
    assert grammar.matcher().accept_all(wrong) < len(wrong)


@issue(
    "LLGuidance",
    364,
    "The rollback infers the number of characters from the tokens' lengths, which is wrong for "
    "tokens that the grammar names.",
    "A rollback over a named special token, which has no text, restores the mask.",
)
def test_rollback_over_a_named_token():
    grammar = compiled("llguidance", GrammarSpec.lark('start: "a" <|tool|> /[0-9]{3}/ <|tool|>'))
    tokens = [ord("a"), THINK, *b"123", THINK, STOP]
    matcher = grammar.matcher()
    for count in range(1, len(tokens) + 1):
        assert matcher.accept_all(tokens) == len(tokens)
        matcher.rollback(count)
        assert legal(matcher) == legal(grammar.matcher(tokens=tokens[: len(tokens) - count]))
        matcher.rollback(len(tokens) - count)


@issue(
    "XGrammar",
    737,
    "A special token is read byte by byte inside a JSON string, so that a quotation mark of it "
    "closes the string and invalid JSON is accepted.",
    "Special tokens are illegal inside a string; other added tokens are read as their text.",
)
@pytest.mark.parametrize("library", ["llguidance", "xgrammar"])
def test_special_tokens_inside_json_strings(library):
    quote = b'",'
    tokens = [bytes([byte]) for byte in range(256)] + [b"", b"", quote]
    spec = GrammarSpec.json_schema({"type": "array", "items": {"type": "string"}})
    vocabulary = Vocabulary(tokens, 262, [STOP], {"<|special|>": OTHER_STOP})
    matcher = make_backend(library, vocabulary).compile(spec).matcher(tokens=b'["hello')
    assert OTHER_STOP not in legal(matcher) and not matcher.accept(OTHER_STOP)
    assert matcher.accept(258)  # closes the string
    assert not matcher.accept(ord("]"))
    assert matcher.accept_all([*b' "b"]', STOP]) == 6


@issue(
    "XGrammar",
    392,
    "Characters of several bytes in the begin or end of a tag crash the process.",
    "Such tags are compiled, and enclose the content.",
)
@every_kind
def test_characters_of_several_bytes_in_tags(kind):
    begin, end = "<｜tool▁call｜>", "<｜tool▁end｜>"
    arguments = {"type": "json_schema", "json_schema": json.loads(SCHEMA.text)}
    tag = {"type": "tag", "begin": begin, "content": arguments, "end": end}
    form = {"type": "triggered_tags", "triggers": [begin[:6]], "tags": [tag]}
    matcher = compiled(kind, GrammarSpec.structural_format(form)).matcher()
    text = f"é {begin}".encode() + TEXT + f"{end} à".encode()
    assert matcher.accept_all([*text, STOP]) == len(text) + 1


@issue(
    "llama.cpp",
    2553,
    "The grammar assumes that a token consists of whole characters; emojis in a class are refused "
    "because their bytes are several tokens.",
    "After each prefix, exactly those bytes are legal that continue a character of the class.",
)
@every_kind
def test_characters_whose_bytes_are_several_tokens(kind):
    low, high = ord("😀"), ord("🙏")
    characters = [chr(point).encode() for point in range(low, high + 1)]
    matcher = compiled(kind, GrammarSpec.regex("[😀-🙏]{2}")).matcher()
    rng = np.random.default_rng(5)
    for character in rng.choice(len(characters), 2):
        chosen = characters[character]
        for done in range(4):
            expected = {c[done] for c in characters if c[:done] == chosen[:done]}
            assert {token for token in legal(matcher) if token < 256} == expected
            assert matcher.accept(chosen[done])
    assert legal(matcher) == [STOP, OTHER_STOP]


@issue(
    "XGrammar",
    701,
    "A stop token that is also a terminal of the grammar can never be accepted.",
    "The stop id is legal where the grammar names it, and ends the output there.",
)
@issue(
    "LLGuidance",
    197,
    "`start: <[2]>` refuses its only token because the token is EOS; `start: <[2]>*` accepts it.",
    "Both forms accept the id.",
)
@pytest.mark.parametrize("text", [f'"a" <[{STOP}]>', f'"a" <[{STOP}]>*', f'("a" <[{STOP}]>)+'])
def test_stop_id_that_the_grammar_names(text):
    matcher = compiled("llguidance", GrammarSpec.lark(f"start: {text}")).matcher()
    assert not matcher.accept(STOP) and STOP not in legal(matcher)
    assert matcher.accept(ord("a"))
    assert STOP in legal(matcher) and matcher.accept(STOP) and matcher.is_terminated()
