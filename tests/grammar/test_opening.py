"""Tests of markers with an opening: an output is free text only if it begins with the opening.

The oracle has a list of the grammar's texts, and decides on the joined bytes of all tokens.
"""

from __future__ import annotations

import functools
import gzip
import re

import numpy as np
import pytest
from guide_util import PythonMatcher
from reference_matchers import ReferenceLLGuidance
from tokenizers import Tokenizer

from graft.grammar import GrammarError, GrammarSpec, Vocabulary
from graft.grammar.backends.llguidance import LLGuidanceBackend
from graft.grammar.backends.xgrammar import XGrammarBackend

OPENING = b"<think>"
END = b"</think>"
SPACE = b" \t\r\n"
#: Texts of the grammar. Some of them share their first characters with the opening. One text begins
#: with the opening, so the output is then free text.
TEXTS = [b"ok", b"<thin", b"<table>", b"\n<t", b"<think>no", b"  </think>x"]
LONGER = [
    *(b"<think>", b"</think>", b"<th", b"ink>", b"ink>\n", b"think>a</think>", b"</think>o"),
    *(
        b"<think></think>",
        b"<think></think>o",
        b"\n\n",
        b" " * 9,
        b" <",
        b"\n<think>",
        b"ok",
        b"a<",
        b" ok",
        b"\n<tab",
        b">\n\n",
        b">\nok",
        b"> <ta",
    ),
]
BYTES = [bytes([byte]) for byte in b"<think>/able \n\tox"]
TOKENS = [*dict.fromkeys([*BYTES, *LONGER]), b"", b"", b""]
STOP, SPECIAL_THINK, SPECIAL_END = len(TOKENS) - 3, len(TOKENS) - 2, len(TOKENS) - 1
VOCABULARY = Vocabulary(TOKENS, len(TOKENS) + 5, [STOP])


class ByteLLGuidance(LLGuidanceBackend):
    """LLGuidance's matchers without automata."""

    def __init__(self, vocabulary: Vocabulary):
        super().__init__(vocabulary, automata=False)


BACKENDS = {
    "automata": LLGuidanceBackend,
    "llguidance": ByteLLGuidance,
    "xgrammar": XGrammarBackend,
    "python": ReferenceLLGuidance,
}


def is_possible(
    tokens: list[int], required: bool, texts: list[bytes] = TEXTS, skips: bool = False
) -> bool:
    """Return whether an output can begin with these tokens."""
    *before, last = tokens
    if last == STOP:
        return is_complete(before, required, texts, skips)
    if STOP in before:
        return False
    text = text_of(tokens)
    opened = re.match(rb"[ \t\r\n]{0,16}" + OPENING, text)
    if opened:
        end = text.find(END, opened.end())
        if end < 0:
            # A token without text does not follow a part of the marker.
            free = text[opened.end() :]
            return not re.search(rb"<(/(t(h(i(nk?)?)?)?)?)?\xff", free)
        answer = answer_after(tokens, opened.end(), end + len(END), texts, skips)
        return answer is not None and starts(answer, texts)
    rest = text.lstrip(b" \t\r\n")
    becomes_opening = OPENING.startswith(rest) and len(text) - len(rest) <= 16
    return becomes_opening or starts(text, texts)


def answer_after(
    tokens: list[int], opened: int, end: int, texts: list[bytes], skips: bool
) -> bytes | None:
    """Return the text of the grammar after the marker.

    The opening and the marker end at the bytes `opened` and `end` of the text.

    If `skips`, white space may precede it, and tokens may join the end of the marker, white space
    and the beginning of the text. A token with which a text of the grammar can begin is not
    skipped. Return None if the marker ends within a token, and `skips` is false or the token
    contains a part of the opening.
    """
    pieces = [text_of([token]) for token in tokens]
    ends = np.cumsum([len(piece) for piece in pieces]).tolist()
    last = int(np.searchsorted(ends, end))
    rest = pieces[last][len(pieces[last]) - (ends[last] - end) :] if ends[last] > end else b""
    if rest and (not skips or ends[last] - len(pieces[last]) < opened):
        return None
    pieces = pieces[last + 1 :]
    text = rest.lstrip(SPACE)
    space = len(rest) - len(text)
    while skips and not text and pieces and not starts(pieces[0], texts):
        piece = pieces.pop(0)
        text = piece.lstrip(SPACE)
        space += len(piece) - len(text)
    return text + b"".join(pieces) if space <= 16 else b"too much white space"


def text_of(tokens: list[int]) -> bytes:
    """Return the text of tokens, with the byte 0xff for each token without text."""
    pieces = (TOKENS[token] if 0 <= token < len(TOKENS) else b"" for token in tokens)
    return b"".join(piece or b"\xff" for piece in pieces)


def starts(beginning: bytes, texts: list[bytes]) -> bool:
    return any(text.startswith(beginning) for text in texts)


def is_complete(
    tokens: list[int], required: bool, texts: list[bytes] = TEXTS, skips: bool = False
) -> bool:
    """Return whether the output can end after these tokens."""
    text = text_of(tokens)
    opened = re.match(rb"[ \t\r\n]{0,16}" + OPENING, text)
    if not opened:
        return text in texts
    end = text.find(END, opened.end())
    if end < 0:
        return not required
    return answer_after(tokens, opened.end(), end + len(END), texts, skips) in texts


@functools.cache
def compiled(name: str, required: bool, skips: bool):
    texts = [text.decode() for text in TEXTS]
    spec = GrammarSpec.choice(texts).after(
        "</think>", required=required, opening="<think>", skips_space=skips
    )
    return BACKENDS[name](VOCABULARY).compile(spec)


@pytest.mark.parametrize(("required", "skips"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.full(
    "automata-False-False",
    "automata-True-False",
    "llguidance-True-False",
    "llguidance-False-True",
    "xgrammar-False-False",
    "xgrammar-False-True",
    "python-False-False",
    "python-True-False",
)
def test_output_begins_with_opening_or_grammar(name, required, skips):
    """Masks and results equal those of the oracle, also after rollbacks of any number of tokens."""
    rng = np.random.default_rng(7)
    likely = [TOKENS.index(token) for token in (*LONGER, b"<", b"t", b"\n", b"o", b"k", b"x")]
    seen: set[str] = set()
    for _ in range(30):
        matcher = compiled(name, required, skips).matcher()
        path: list[int] = []
        for _ in range(25):
            if matcher.is_terminated():
                assert path[-1] == STOP
                seen.add("grammar" if not re.search(OPENING, text_of(path)) else "free")
            else:
                ids = range(VOCABULARY.size)
                legal = [t for t in ids if is_possible([*path, t], required, skips=skips)]
                if rng.random() < 0.7:
                    assert matcher.legal().tolist() == legal, text_of(path)
                pool = [t for t in likely if t in legal] if rng.random() < 0.8 else [*ids]
                token = int(rng.choice(pool or [STOP, *legal]))
                accepted = matcher.accept(token)
                assert accepted == (token in legal), (text_of(path), token)
                path += [token] * accepted
            if path and rng.random() < 0.25:
                count = int(rng.integers(1, len(path) + 1))
                matcher.rollback(count)
                del path[len(path) - count :]
                seen.add("rollback to the start" if not path else "rollback")
    assert {"grammar", "free", "rollback", "rollback to the start"} <= seen


@pytest.mark.parametrize("name", BACKENDS)
def test_white_space_between_marker_and_grammar_is_skipped(name):
    """Tokens of white space with up to 16 characters are legal, also after rollbacks."""
    matcher = compiled(name, False, True).matcher()
    path: list[int] = []

    def check_legal() -> None:
        ids = range(VOCABULARY.size)
        legal = [t for t in ids if is_possible([*path, t], False, skips=True)]
        assert matcher.legal().tolist() == legal, text_of(path)

    for text in (b"<think>", b"</think>", b"\n\n", b" " * 9, b"\n\n", b"\n\n", b"ok"):
        check_legal()
        path.append(TOKENS.index(text))
        assert matcher.accept(path[-1])
    check_legal()
    assert path[2] not in matcher.legal() and STOP in matcher.legal()
    for _ in range(6):
        matcher.rollback(1)
        path.pop()
        check_legal()
    assert TOKENS.index(b"x") in matcher.legal()  # free text


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.full("llguidance", "xgrammar", "python")
def test_white_space_in_the_token_of_the_marker_counts(name):
    """At most 16 white-space characters are skipped, also after another token was undone."""
    spec = GrammarSpec.choice(["ok"]).after("</think>", required=True, skips_space=True)
    matcher = BACKENDS[name](VOCABULARY).compile(spec).matcher()
    start = [b"<", b"/", b"t", b"h", b"i", b"n", b"k"]
    assert all(matcher.accept(TOKENS.index(token)) for token in start)
    spaces = [b" " * 9, b"\n\n", b"\n\n"]
    for last, more in ((b">\n\n", []), (b">", [b"\n\n"]), (b">\n\n", [])):
        path = [last, *spaces, *more]
        assert all(matcher.accept(TOKENS.index(token)) for token in path)
        legal = matcher.legal().tolist()
        assert TOKENS.index(b"\n") in legal and TOKENS.index(b" ok") in legal
        assert TOKENS.index(b"\n\n") not in legal
        assert not matcher.accept(TOKENS.index(b"\n\n"))
        matcher.rollback(len(path))


def test_undone_token_that_joined_white_space_and_answer_leaves_no_trace():
    """The text of such a token takes three tokens of the grammar's matcher; `ok` takes one."""
    matcher = compiled("automata", False, True).matcher()
    path = [TOKENS.index(token) for token in (b"<think>", b"</think>", b"\n<tab")]
    legal = matcher.legal().tolist()
    for _ in range(2):
        assert matcher.accept_all(path) == 3
        matcher.rollback(3)
        assert matcher.accept(TOKENS.index(b"ok")) and matcher.legal().tolist() == [STOP]
        matcher.rollback(1)
        assert matcher.legal().tolist() == legal


def test_budget_excludes_token_that_begins_a_long_answer_with_white_space():
    """Although the token could also be white space and a short answer, it begins the long one."""
    spec = GrammarSpec.choice(["<tab", "\n<table><table>"])
    matcher = (
        LLGuidanceBackend(VOCABULARY)
        .compile(spec.after("</think>", required=True, skips_space=True))
        .matcher(tokens=[TOKENS.index(b"</think>")])
    )
    token = TOKENS.index(b"\n<tab")
    assert matcher.accept(token)
    needed = 1 + matcher.distance()
    matcher.rollback(1)
    for budget in range(matcher.distance(), needed + 2):
        row = np.zeros(matcher.words, np.int32)
        assert matcher.fill(row, budget)
        assert bool(row[token // 32] >> (token % 32) & 1) == (budget >= needed)


def test_budget_excludes_token_after_which_the_vocabulary_cannot_spell_the_answer():
    tokens = [b"#", b"a", b"b", b" a", b" b", b"# b", b""]
    vocabulary = Vocabulary(tokens, len(tokens), [6])
    spec = GrammarSpec.choice(["a", "bc"]).after("#", required=True, skips_space=True)
    matcher = LLGuidanceBackend(vocabulary).compile(spec).matcher()
    row = np.zeros(1, np.int32)
    for legal in ([0, 1, 2, 3, 4], [1, 3]):
        assert matcher.fill(row, 20) and row[0] == sum(1 << token for token in legal)
        matcher.accept(0)


def test_budget_applies_after_a_marker_that_only_a_longer_token_contains():
    tokens = [b"a", b"\n", b";#\n", b""]
    vocabulary = Vocabulary(tokens, len(tokens), [3])
    spec = GrammarSpec.choice(["a", "\naaa"]).after(";#", required=True, skips_space=True)
    matcher = LLGuidanceBackend(vocabulary).compile(spec).matcher()
    assert matcher.distance() is None and matcher.accept(2) and matcher.distance() == 2
    row = np.zeros(1, np.int32)
    for budget, legal in ((2, 1), (4, 1), (5, 3)):
        assert matcher.fill(row, budget) and row[0] == legal


@pytest.mark.parametrize("name", BACKENDS)
def test_special_tokens_open_and_end_free_text(name):
    """A special token whose name is the opening begins the free text, also after white space."""
    names = {"<think>": SPECIAL_THINK, "</think>": SPECIAL_END}
    tokens = [b"" if token in (OPENING, END) else token for token in TOKENS]
    vocabulary = Vocabulary(tokens, VOCABULARY.size, [STOP], names)
    spec = GrammarSpec.choice(["ok", "\nok"]).after("</think>", required=True, opening="<think>")
    matcher = BACKENDS[name](vocabulary).compile(spec).matcher()
    newline, lower_o, both = TOKENS.index(b"\n"), TOKENS.index(b"o"), TOKENS.index(b"ok")
    spelled = [
        token for token, text in enumerate(tokens) if text and is_possible([token], True, [b""])
    ]
    assert set(matcher.legal()) == {SPECIAL_THINK, lower_o, both, *spelled}
    assert matcher.accept(newline)
    assert {SPECIAL_THINK, lower_o, both} <= set(matcher.legal())
    assert matcher.accept(SPECIAL_THINK) and STOP not in matcher.legal()
    assert matcher.accept(both) and matcher.accept(SPECIAL_END)
    assert set(matcher.legal()) == {newline, lower_o, both}
    matcher.rollback(3)
    assert matcher.accept(both) and matcher.legal().tolist() == [STOP]
    matcher.rollback(2)
    assert matcher.accept(TOKENS.index(b"<")) and not matcher.accept(SPECIAL_THINK)


def test_matcher_of_python_backend_with_opening():
    """A matcher that is written in Python also returns to its start after the opening."""
    spec = GrammarSpec.choice(["<x", "ok"]).after("</think>", opening="<think>")

    class Backend(LLGuidanceBackend):
        def matcher(self, compiled, stop_ids=None):
            return PythonMatcher(super().matcher(compiled, stop_ids))

    matcher = Backend(VOCABULARY).compile(spec).matcher()
    for byte in b"<think>x</think>":
        assert matcher.accept(
            TOKENS.index(bytes([byte])) if byte != ord("x") else TOKENS.index(b"x")
        )
    assert set(matcher.legal()) == {TOKENS.index(token) for token in (b"<", b"o", b"ok")}
    matcher.rollback(15)
    assert TOKENS.index(b"x") in matcher.legal() and TOKENS.index(b"t") in matcher.legal()


@pytest.mark.parametrize("name", ["cl100k-llama3-like", "deepseek-128k"])
@pytest.mark.full("deepseek")
def test_tokens_of_real_vocabularies_join_marker_and_answer(shared_data, name):
    """After a marker, the tokens that a tokenizer produces for white space and answer are legal."""
    text = gzip.decompress((shared_data / "tokenizers" / f"{name}.json.gz").read_bytes()).decode()
    tokenizer = Tokenizer.from_str(text)
    size = tokenizer.get_vocab_size()
    backend = LLGuidanceBackend(Vocabulary.from_tokenizer(tokenizer, size, [1]))
    schema = GrammarSpec.json_schema({"type": "object", "properties": {"a": {"type": "null"}}})
    for spec, answer in (
        (GrammarSpec.choice(["Paris", "London"]), "Paris"),
        (GrammarSpec.regex("qu[a-z]+"), "quelques"),
        (schema, '{"a": null}'),
    ):
        grammar = backend.compile(spec.after("Answer:", required=True, skips_space=True))
        for space in ("", " ", "\n", "\n\n", "\t", "\n\n  "):
            ids = tokenizer.encode(f"Why? Answer:{space}{answer}", add_special_tokens=False).ids
            matcher = grammar.matcher()
            assert matcher.native.accept_all(ids) == len(ids), (space, answer)
            assert 1 in matcher.legal()
            matcher.rollback(len(ids))
            for token in ids:
                assert token in matcher.legal() and matcher.accept(token)


def test_opening_is_no_stop_id():
    spec = GrammarSpec.regex("a")
    with pytest.raises(GrammarError, match="its token is one of the request's stop ids"):
        vocabulary = Vocabulary(TOKENS, VOCABULARY.size, [STOP], {"<t>": SPECIAL_THINK})
        grammar = LLGuidanceBackend(vocabulary).compile(spec.after("</t>", opening="<t>"))
        grammar.matcher([STOP, SPECIAL_THINK])
