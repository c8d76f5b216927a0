"""Forced text: what it is, how it is spelled where it is appended, and where it ends."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

import numpy as np
import pytest
from engine_util import TARGET
from guide_util import SPECS, byte_vocabulary

from graft.cudagraph.errors import OptionError
from graft.grammar import (
    CompiledGrammar,
    GrammarBackend,
    GrammarSpec,
    Matcher,
    Vocabulary,
    XGrammarBackend,
    make_backend,
)
from graft.grammar.forced import LongerTokens, a_choice, all_legal
from graft.models.jump import JumpForward
from graft.models.request import Output, Request
from graft.models.running import Running
from graft.models.tokenizer import Tokenizer


@pytest.fixture(scope="module", params=["xgrammar", "llguidance"])
def backend(request) -> GrammarBackend:
    return make_backend(request.param, byte_vocabulary())


def letter_by_letter(start: Matcher, tokens: Sequence[int]) -> bytes:
    """What is forced behind tokens, by a matcher that takes one byte after the other."""
    matcher = start.compiled.matcher(start.stop_ids)
    assert all(matcher.accept(token) for token in tokens)
    vocabulary, text = matcher.compiled.backend.vocabulary, b""
    while not matcher.is_terminated():
        legal = [vocabulary.tokens[i] if i < len(vocabulary.tokens) else b""
                 for i in matcher.legal()]  # fmt: skip
        if not legal or not all(legal) or len({piece[0] for piece in legal}) > 1:
            break
        text += legal[0][:1]
        assert matcher.accept(vocabulary.tokens.index(legal[0][:1]))
    return text


@pytest.mark.parametrize("name", sorted(SPECS))
def test_forced_text_is_what_letters_spell(backend, name):
    """On random walks: byte for byte, and the matcher's mask is the same before and after."""
    rng = np.random.default_rng(3)
    compiled = backend.compile(SPECS[name])
    for _ in range(4):
        matcher, tokens = backend.matcher(compiled), []
        for _ in range(25):
            before = matcher.legal()
            assert matcher.forced_text() == letter_by_letter(matcher, tokens)
            assert np.array_equal(matcher.legal(), before)
            if not len(before):
                break
            tokens.append(int(rng.choice(before)))
            assert matcher.accept(tokens[-1])
            if matcher.is_terminated():
                assert matcher.forced_text() == b""
                break


def test_endless_forced_text_comes_to_an_end():
    """A grammar that forces text for ever is told in part."""
    backend = XGrammarBackend(byte_vocabulary())
    endless = GrammarSpec.ebnf('root ::= "ab" more\nmore ::= "cd" root')
    matcher = backend.matcher(backend.compile(endless))
    text = matcher.forced_text()
    assert 1000 < len(text) < 2000
    assert (b"abcd" * 500).startswith(text)
    assert matcher.forced_text() == text


def test_longer_tokens_by_brute_force():
    """Of random vocabularies and rows: a legal token that begins with the text and goes on."""
    rng = random.Random(0)
    found = 0
    for _ in range(300):
        tokens = ["".join(rng.choices("ab\xff", k=rng.randrange(5))).encode("latin-1")
                  for _ in range(60)]  # fmt: skip
        vocabulary = Vocabulary([*tokens, b"x"], 70, [65])
        legal = [i for i in range(60) if rng.random() < 0.2]
        bits = np.zeros(96, np.uint8)
        bits[legal] = 1
        row = np.packbits(bits, bitorder="little").view(np.int32)
        text = "".join(rng.choices("ab\xff", k=rng.randint(1, 4))).encode("latin-1")
        expected = any(tokens[i].startswith(text) and tokens[i] != text for i in legal)
        assert LongerTokens(vocabulary).legal(text, row) == expected
        found += expected
    assert 30 < found < 270


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(TARGET)


@pytest.fixture(scope="module")
def demo(tokenizer: Tokenizer) -> XGrammarBackend:
    size = tokenizer.vocab_size
    return XGrammarBackend(Vocabulary.from_tokenizer(tokenizer.backend, size, tokenizer.stop_ids))


def jumps_of(tokenizer: Tokenizer, vocabulary: Vocabulary, least: int = 1) -> JumpForward:
    encode = partial(tokenizer.encode, special=False)
    return JumpForward(vocabulary, encode, tokenizer.incremental, least)


def running_of(
    tokenizer: Tokenizer, compiled: CompiledGrammar, tokens: Sequence[int] = (), most: int = 500
) -> Running:
    """A request that has made some tokens, behind a prompt that is no text."""
    grammar: Future[CompiledGrammar] = Future()
    grammar.set_result(compiled)
    running = Running(
        request=Request(tokens=[0]), output=Output(id="0"), prompt=[tokenizer.stop_ids[0]],
        max_tokens=most, stop_ids=compiled.backend.vocabulary.stop_ids,
        decoder=tokenizer.incremental(),
        grammar=grammar,
    )  # fmt: skip
    running.push(list(tokens))
    running.follower = running.make_matcher()
    return running


def random_spelling(rng: random.Random, vocabulary: Vocabulary, text: bytes) -> list[int]:
    """Tokens of a text, any that fit."""
    ids = []
    while text:
        fits = [i for i, piece in enumerate(vocabulary.tokens) if piece and text.startswith(piece)]
        ids.append(rng.choice(fits))
        text = text[len(vocabulary.tokens[ids[-1]]) :]
    return ids


def size_of(vocabulary: Vocabulary, ids: Sequence[int]) -> int:
    return sum(len(vocabulary.tokens[i]) for i in ids)


WORDS = ['name": "', ' {"', 'value', 'é', '", "', "12", "the ", "count", "ing", ": [", "ü]", "}"]


def test_seams_are_spelled_by_the_tokenizer(demo, tokenizer):
    """Free text in any spelling, then forced text, then digits: the tokenizer's own spelling of all
    text, from the last place where one of its tokens begins at one of the output's; without the
    end with which a legal token begins."""
    rng, vocabulary = random.Random(1), demo.vocabulary
    jumps, rewritten, shortened = jumps_of(tokenizer, vocabulary), 0, 0
    for _ in range(200):
        free = "".join(rng.choices('abcdenu ":{', k=rng.randint(1, 8)))
        forced = "".join(rng.choices(WORDS, k=rng.randint(1, 5)))
        literal = re.sub(r"[\[\]{}]", lambda found: "\\" + found[0], forced)
        compiled = demo.compile(GrammarSpec.regex(f'[a-z ":{{]{{{len(free)}}}{literal}[0-9a-z]+'))
        spelled = random_spelling(rng, vocabulary, free.encode())
        running = running_of(tokenizer, compiled, spelled[:-1])
        stand, jump = jumps.follow(running, spelled[-1:], False)

        whole = tokenizer.backend.encode(free + forced, add_special_tokens=False).ids
        starts = [size_of(vocabulary, whole[:n]) for n in range(len(whole))]
        backs = [back for back in range(min(4, len(spelled)) + 1)
                 if size_of(vocabulary, spelled[: len(spelled) - back]) in starts]  # fmt: skip
        if backs:
            kept = spelled[: len(spelled) - backs[0]]
            new = whole[starts.index(size_of(vocabulary, kept)) :]
        else:
            kept = spelled
            new = tokenizer.backend.encode(forced, add_special_tokens=False).ids
        drop = 0
        for count in range(1, min(4, len(new)) + 1):
            matcher = demo.matcher(compiled)
            assert all(matcher.accept(i) for i in [*kept, *new[:-count]])
            end = b"".join(vocabulary.tokens[i] for i in new[-count:])
            pieces = [vocabulary.tokens[i] for i in matcher.legal()]
            if any(piece.startswith(end) and piece != end for piece in pieces):
                drop = count
        new = new[: len(new) - drop]
        assert stand == 1
        shorter = size_of(vocabulary, [*kept, *new]) <= len(free)
        if shorter or len(kept) + len(new) <= len(spelled) or len(forced.encode()) < 2:
            assert jump is None
            continue
        assert jump is not None and jump.tokens == [*kept, *new] and jump.kept == len(kept)
        assert (free + forced).startswith(jump.text)
        assert tokenizer.decode(jump.tokens) == jump.text
        rewritten += len(kept) < len(spelled)
        shortened += drop > 0
        for matcher in (running.follower, jump.matcher):
            fresh = demo.matcher(compiled)
            assert all(fresh.accept(i) for i in jump.tokens)
            assert np.array_equal(matcher.legal(), fresh.legal())
    assert rewritten > 8 and shortened > 8


def test_a_prompt_is_never_rewritten(demo, tokenizer):
    """Forced text behind a prompt that ends within a word is spelled by itself or not joined."""
    vocabulary = demo.vocabulary
    compiled = demo.compile(GrammarSpec.regex("tomer_name: [0-9]"))
    running = running_of(tokenizer, compiled)
    running.prompt = tokenizer.encode("the cus", special=False)
    jump = jumps_of(tokenizer, vocabulary).start(running)
    assert jump is not None and jump.kept == 0
    assert "tomer_name: ".startswith(jump.text) and len(jump.text) > 8


def test_a_round_that_sampled_the_same_stands(demo, tokenizer):
    """Tokens of a round behind the place of a jump stand as far as they are the jump's own."""
    vocabulary = demo.vocabulary
    compiled = demo.compile(GrammarSpec.regex('[ab]", "name": "[0-9]'))
    jumps = jumps_of(tokenizer, vocabulary)
    first = tokenizer.encode("a", special=False)
    _, jump = jumps.follow(running_of(tokenizer, compiled), first, False)
    assert jump is not None and jump.kept == 1 and len(jump.tokens) > 3
    whole = jump.tokens
    for count in range(1, len(whole) + 1):
        stand, jump = jumps.follow(running_of(tokenizer, compiled), whole[:count], False)
        assert stand == count
        assert jump is None if count == len(whole) else jump is not None and jump.tokens == whole
    digit = vocabulary.tokens.index(b"7")
    matcher = demo.matcher(compiled)
    assert all(matcher.accept(token) for token in whole)
    rest = random_spelling(random.Random(0), vocabulary, matcher.forced_text())
    stand, jump = jumps.follow(
        running_of(tokenizer, compiled), [*whole, *rest, digit], False
    )
    assert stand == len(whole) + len(rest) + 1 and jump is None
    letters = [vocabulary.tokens.index(bytes([byte])) for byte in b'", "name": "']
    assert [*first, *letters] != whole
    stand, jump = jumps.follow(running_of(tokenizer, compiled), [*first, *letters, digit], False)
    assert stand == 1 and jump is not None and jump.tokens == whole


def test_exact_where_each_token_was_the_one_legal_id(tokenizer):
    """Bytes only: no other spelling; with longer tokens there is one."""

    class Bytes:
        def push(self, ids: list[int]) -> str:
            return bytes(ids).decode()

        def finish(self) -> str:
            return ""

    single = Vocabulary([bytes([i]) for i in range(256)], 257, [256])
    longer = Vocabulary([*(bytes([i]) for i in range(256)), b"bc"], 258, [257])
    for vocabulary, exact in ((single, True), (longer, False)):
        backend = XGrammarBackend(vocabulary)
        compiled = backend.compile(GrammarSpec.regex("[ax]bcde"))
        running = running_of(tokenizer, compiled)
        jumps = JumpForward(vocabulary, lambda text: list(text.encode()), Bytes, 1)
        _, jump = jumps.follow(running, list(b"a"), False)
        assert jump is not None and bytes(jump.tokens) == b"abcde"
        assert running.output.exact == exact


def test_room_and_least_bound_a_jump(demo, tokenizer):
    """No more tokens than may be made, no jump of fewer than asked for."""
    compiled = demo.compile(GrammarSpec.regex('[ab]", "name": "count"'))
    token = tokenizer.encode("a", special=False)
    _, jump = jumps_of(tokenizer, demo.vocabulary).follow(
        running_of(tokenizer, compiled), token, False
    )
    assert jump is not None
    whole = jump.tokens
    for most in range(1, len(whole) + 2):
        running = running_of(tokenizer, compiled, most=most)
        _, jump = jumps_of(tokenizer, demo.vocabulary).follow(running, token, most == 1)
        assert (whole[:1] if jump is None else jump.tokens) == whole[:most]
    for least in range(1, len(whole) + 2):
        running = running_of(tokenizer, compiled)
        _, jump = jumps_of(tokenizer, demo.vocabulary, least).follow(running, token, False)
        assert (jump is not None) == (len(whole) - 1 >= least)


def test_what_cannot_jump_is_refused_by_name(demo, tokenizer):
    """A tokenizer that changes text, and a least length of none."""
    with pytest.raises(OptionError, match="jump_least"):
        jumps_of(tokenizer, demo.vocabulary, 0)
    small = JumpForward(
        demo.vocabulary, lambda text: tokenizer.encode(text.lower(), special=False),
        tokenizer.incremental, 1,
    )  # fmt: skip
    small.require_bytes("abc")
    with pytest.raises(OptionError, match="ABC"):
        small.require_bytes("ABC")


@pytest.mark.parametrize("name", sorted(SPECS))
def test_a_choice_is_two_legal_tokens_that_begin_differently(backend, name):
    """And only where no text is forced; trying them changes nothing."""
    rng = np.random.default_rng(4)
    matcher, found = backend.matcher(backend.compile(SPECS[name])), 0
    texts = backend.vocabulary.tokens
    for _ in range(25):
        if matcher.is_terminated() or not len(legal := matcher.legal()):
            break
        choice = a_choice(matcher)
        assert set(choice) <= set(legal.tolist()) and len(choice) in (0, 2)
        if choice:
            assert matcher.forced_text() == b""
            begins = [(texts[i] if i < len(texts) else b"")[:1] for i in choice]
            assert begins[0] != begins[1] and all_legal(matcher, choice)
        illegal = sorted(set(range(270)) - set(legal.tolist()))
        assert not illegal or not all_legal(matcher, illegal[:1])
        assert np.array_equal(matcher.legal(), legal)
        assert matcher.accept(int(rng.choice(legal)))
        found += bool(choice)
    assert found > 0 or name in ("dead end", "text, then choice")


def test_forced_text_behind_a_marker(demo, tokenizer):
    """Nothing is forced in free text; behind the marker all of it is, and the marker stays as it
    was spelled, even where the tokenizer would join it with what follows."""
    vocabulary = demo.vocabulary
    rng, jumps = random.Random(5), jumps_of(tokenizer, vocabulary)
    for marker in ("so:", ' {"', "ans"):
        compiled = demo.compile(GrammarSpec.regex('name": "[0-9]{3}"').after(marker))
        for _ in range(10):
            free = random_spelling(rng, vocabulary, b"the count is ")
            spelled = [*free, *random_spelling(rng, vocabulary, marker.encode())]
            running = running_of(tokenizer, compiled)
            assert jumps.start(running) is None
            stand, jump = jumps.follow(running, spelled, False)
            assert jump is not None and stand == jump.kept == len(spelled)
            assert jump.tokens[: len(spelled)] == spelled
            text = f"the count is {marker}name"
            assert jump.text.startswith(text) and (text + '": "').startswith(jump.text)
            assert running.follower is not None
            assert np.array_equal(running.follower.legal(), jump.matcher.legal())
