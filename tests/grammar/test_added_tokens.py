"""Tests of added tokens in masks: they are text unless they are special.

The oracle is the text of each token: an id with text is legal if and only if the text so far and
the token's bytes begin a text of the grammar.
"""

from __future__ import annotations

import functools
import gzip
import importlib.util
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models

from graft.grammar import GrammarSpec, LLGuidanceBackend, StructuralTag, Vocabulary, make_backend
from graft.grammar.forced import ForcedTokens
from graft.grammar.matcher import GrammarBackend, Matcher

TEXT_TOKENS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "é\n", "   "]
SPECIAL_TOKENS = ["<stop>", "[CALL]", "<|end_call|>"]
BEGIN = '<tool_call>\n{"name": "f", "arguments": '
END = "}\n</tool_call>"
SCHEMA = {"type": "object", "properties": {"s": {"type": "string"}}, "required": ["s"]}


def with_added_tokens(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Add `TEXT_TOKENS` and `SPECIAL_TOKENS` to a tokenizer, and return the tokenizer."""
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in TEXT_TOKENS])
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    return tokenizer


@functools.cache
def small_tokenizer() -> tokenizers.Tokenizer:
    """Return a byte-level tokenizer of single bytes and a few longer tokens."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    pieces = [*alphabet, "<t", 'Ġ"', "e>", '{"']
    tokenizer = tokenizers.Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return with_added_tokens(tokenizer)


@functools.cache
def real_tokenizer(name: str, folder: Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizers" / f"{name}.json.gz"
    if not path.is_file():
        pytest.skip(f"no tokenizer at {path}")
    text = gzip.decompress(path.read_bytes()).decode()
    return with_added_tokens(tokenizers.Tokenizer.from_str(text))


@pytest.fixture(
    scope="module",
    params=[
        "small",
        pytest.param("cl100k-llama3-like", marks=pytest.mark.full),
        pytest.param("deepseek-128k", marks=pytest.mark.full),
    ],
)
def tokenizer(request) -> tokenizers.Tokenizer:
    """A tokenizer to which `TEXT_TOKENS` and `SPECIAL_TOKENS` have been added."""
    if request.param == "small":
        return small_tokenizer()
    return real_tokenizer(request.param, request.getfixturevalue("shared_data"))


@functools.cache
def vocabulary_of(tokenizer: tokenizers.Tokenizer) -> Vocabulary:
    size = tokenizer.get_vocab_size() + 40
    return Vocabulary.from_tokenizer(tokenizer, size, [tokenizer.token_to_id("<stop>")])


@functools.cache
def backend_of(tokenizer: tokenizers.Tokenizer, name: str) -> GrammarBackend:
    return make_backend(name, vocabulary_of(tokenizer))


@pytest.fixture(scope="module")
def vocabulary(tokenizer) -> Vocabulary:
    return vocabulary_of(tokenizer)


@pytest.fixture(scope="module")
def llguidance(tokenizer) -> GrammarBackend:
    pytest.importorskip("llguidance")
    return backend_of(tokenizer, "llguidance")


@pytest.fixture(scope="module")
def without_automata(vocabulary) -> GrammarBackend:
    pytest.importorskip("llguidance")
    return LLGuidanceBackend(vocabulary, automata=False)


@pytest.fixture(scope="module", params=["llguidance", "xgrammar"])
def backend(request, tokenizer, llguidance) -> GrammarBackend:
    if request.param == "llguidance":
        return llguidance
    if importlib.util.find_spec("xgrammar") is None:
        pytest.skip("xgrammar is not installed")
    return backend_of(tokenizer, "xgrammar")


def legal_ids(vocabulary: Vocabulary, text: bytes, texts: Iterable[bytes]) -> set[int]:
    """Return the ids with text after which `text` is still the beginning of one of `texts`."""
    left = [full[len(text) :] for full in texts if full.startswith(text)]
    beginnings = {rest[: size + 1] for rest in left for size in range(len(rest))}
    return {token for token, spelled in enumerate(vocabulary.tokens) if spelled in beginnings}


def test_added_token_has_text_unless_special(tokenizer, vocabulary):
    """Added tokens have the bytes to which the tokenizer decodes them, special tokens have none."""
    for text in TEXT_TOKENS:
        token = tokenizer.token_to_id(text)
        assert vocabulary.names[text] == token
        assert vocabulary.tokens[token] == tokenizer.decode([token]).encode() == text.encode()
    for text in SPECIAL_TOKENS:
        token = tokenizer.token_to_id(text)
        assert vocabulary.names[text] == token and not vocabulary.is_text(token)
        assert tokenizer.decode([token]) == ""


def test_added_token_is_legal_where_its_text_is_legal(tokenizer, vocabulary, backend):
    """At each position of a choice, exactly the ids that continue an option are legal."""
    options = ["<think>é\n</think>", "<tool_call>   <think>", "x[CALL]<|end_call|>"]
    matcher = backend.compile(GrammarSpec.choice(options)).matcher()
    texts = [option.encode() for option in options]
    names = ("<think>", "<tool_call>")
    assert {tokenizer.token_to_id(name) for name in names} <= set(matcher.legal().tolist())
    for option in texts:
        done = b""
        path = tokenizer.encode(option.decode(), add_special_tokens=False).ids
        if not all(map(vocabulary.is_text, path)):
            path = [vocabulary.tokens.index(bytes([byte])) for byte in option]
        for token in path:
            assert set(matcher.legal().tolist()) == legal_ids(vocabulary, done, texts)
            assert matcher.accept(token)
            done += vocabulary.tokens[token]
        assert done == option and matcher.legal().tolist() == list(vocabulary.stop_ids)
        matcher.rollback(len(path))


def test_added_token_opens_and_closes_tool_call(tokenizer, vocabulary, backend):
    """The tokens that the tokenizer gives for a call are legal and forced in a structural tag."""
    tag = StructuralTag.of(BEGIN, SCHEMA, END)
    matcher = backend.compile(GrammarSpec.structural_tag([tag], ["<tool_call>"])).matcher()
    forced = ForcedTokens(vocabulary)
    text = f'I call. {BEGIN}{{"s": "<think>"}}{END} Done.'
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert {tokenizer.token_to_id(name) for name in ("<tool_call>", "</tool_call>")} <= set(ids)
    row = matcher.legal()
    for token in ids:
        assert token in row and matcher.accept(token)
        row = matcher.legal()
    matcher.rollback(len(ids) - ids.index(tokenizer.token_to_id("</tool_call>")))
    mask = np.zeros(matcher.words, np.int32)
    assert matcher.fill(mask)
    assert forced.token(mask) == tokenizer.token_to_id("</tool_call>")


def test_special_token_is_illegal_in_free_text(tokenizer, vocabulary, backend):
    """Strings and free text contain no special token that the grammar does not name."""
    special = {tokenizer.token_to_id(text) for text in SPECIAL_TOKENS} - set(vocabulary.stop_ids)
    grammars = [
        (GrammarSpec.regex(r"(.|\n)*"), "a [CA"),
        (GrammarSpec.json_schema({"type": "string"}), '"a [CA'),
        (GrammarSpec.json_schema({"type": "string", "pattern": "^.{3,}$"}), '"[C'),
    ]
    for grammar, text in grammars:
        matcher = backend.compile(grammar).matcher()
        for byte in text.encode():
            assert not special & set(matcher.legal().tolist())
            assert not any(map(matcher.accept, special))
            assert matcher.accept(vocabulary.tokens.index(bytes([byte])))


def test_named_text_token_ends_free_text(tokenizer, vocabulary, llguidance):
    """In a grammar that names a token with text, only this id is legal where the token is named.

    The spelling of the token is then ordinary free text, also within a longer token. Other added
    tokens remain text.
    """
    think, end = (tokenizer.token_to_id(name) for name in ("<think>", "</think>"))
    call = tokenizer.token_to_id("<tool_call>")
    thought = {
        "type": "tag",
        "begin": {"type": "token", "token": "<think>"},
        "content": {"type": "any_text"},
        "end": {"type": "token", "token": "</think>"},
    }
    form = {"type": "sequence", "elements": [thought, {"type": "const_string", "value": "yes"}]}
    by_id = f'start: <think> FREE <[{end}]> "yes"\nFREE: /(?s:.*)/ // <tool_call>'
    for spec in (GrammarSpec.structural_format(form), GrammarSpec.lark(by_id)):
        matcher = llguidance.compile(spec).matcher()
        assert matcher.legal().tolist() == [think] and matcher.accept(think)
        for token in [*(vocabulary.tokens.index(bytes([b])) for b in b"</think>"), call]:
            assert {end, call} <= set(matcher.legal().tolist()) and matcher.accept(token)
            assert think not in matcher.legal()
        assert matcher.accept(end)
        assert set(matcher.legal().tolist()) == legal_ids(vocabulary, b"", [b"yes"])
    # A grammar that names no token with text is not affected.
    matcher = llguidance.compile(GrammarSpec.choice(["<think>"])).matcher()
    assert think in matcher.legal()


def tag(begin: str, content: dict[str, Any], end: str) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


FREE = {"type": "any_text"}
JSON = {"type": "json_schema", "json_schema": SCHEMA}
END_CALL = {"type": "token", "token": "<|end_call|>"}
CALLS = [tag("[CALL]f", JSON, "<|end_call|>"), tag("[CALL]g", JSON, "}<|end_call|>!")]
#: Grammars with special tokens in the texts of tags, texts that match, and texts that do not. In
#: these texts, "@" is the token [CALL], and "$" is the token <|end_call|>.
SPECIAL_TAGS = {
    "structural_tag": (
        GrammarSpec.structural_tag(
            [StructuralTag.of(begin, SCHEMA, "<|end_call|>") for begin in ("[CALL]f", "[CALL]g")],
            ["[CALL]"],
        ),
        ["", "a", '@f{"s": ""}$', 'a[CALf@g{"s": "[CALL]"}$b[CALL]f{"s": ""}<|end_call|>'],
        ["$", "@h", '@f{"s": "@', '@f{"s": "$', '@f{"s": ""}b', '@f{"s": ""}$$', "[CALL]a"],
    ),
    "at once": (
        GrammarSpec.structural_tag(
            [StructuralTag.of("[CALL]f", SCHEMA, "<|end_call|>")], ["[CALL]f"], at_once=True
        ),
        ['@f{"s": ""}$', '@f{"s": ""}$ @f{"s": ""}$', '[CALL]f{"s": ""}$'],
        ["", "a", "@[CALL]", "@g", '@f{"s": ""}$$'],
    ),
    "triggered_tags": (
        {"type": "triggered_tags", "triggers": ["[CALL]"], "tags": CALLS},
        ["", "a", '@f{"s": ""}$', 'a[CALf@g{"s": ""}}$!b[CALL]f{"s": ""}<|end_call|>'],
        ["$", "@h", '@f{"s": "@', '@f{"s": ""}b', '@f{"s": ""}$$', '@g{"s": ""}$'],
    ),
    "stop after first": (
        {
            "type": "triggered_tags",
            "triggers": ["[CALL]"],
            "tags": CALLS,
            "stop_after_first": True,
            "at_least_one": True,
        },
        ['@f{"s": ""}$', '[CALL]g{"s": ""}}$!'],
        ["", "a", '@f{"s": ""}$a', '@f{"s": ""}$@'],
    ),
    "tags_with_separator": (
        {"type": "tags_with_separator", "tags": CALLS, "separator": ",", "at_least_one": True},
        ['@f{"s": ""}$', '@f{"s": ""}$,@g{"s": ""}}$!', '[CALL]f{"s": ""}<|end_call|>'],
        ["", "a", '@f{"s": ""}$@', '@f{"s": ""}$,f', '@f{"s": ""}$,$'],
    ),
    "free text in a tag": (
        {"type": "sequence", "elements": [tag("[CALL]", FREE, "<|end_call|>"), JSON]},
        ['@${"s": ""}', '@a<|end${"s": ""}', '[CALL]<|end_call|>{"s": ""}'],
        ["", "a", "@@", "@$$", "@a<|end_call|>b"],
    ),
    "free text before a tag": (
        {
            "type": "sequence",
            "elements": [{"type": "any_text", "excludes": ["[CALL]"]}, tag("[CALL]f", JSON, "")],
        },
        ['@f{"s": ""}', 'a[CAL@f{"s": ""}', 'a[CALL]f{"s": ""}'],
        ["", "a", "a@@", "a$"],
    ),
    "tokens": (
        {
            "type": "plus",
            "content": {
                "type": "or",
                "elements": [
                    tag(END_CALL, FREE, END_CALL),
                    tag("[CALL]", JSON, END_CALL),
                    tag("<|end_call|>", END_CALL, "!"),
                ],
            },
        },
        ["$$", "$a<|end_call|>$", '@{"s": ""}$$a$', "<|end_call|>$!", "$$!"],
        ["", "a", "$", "$a@", "$$a", '@{"s": ""}<|end_call|>', "<|end_call|>a"],
    ),
    "dispatch": (
        {"type": "dispatch", "rules": [["[CALL]", JSON], ["<|end_call|>", JSON]]},
        ["", '@{"s": ""}', 'a${"s": ""}b[CALL]{"s": ""}'],
        ["@a", "$$", '@{"s": "@"}'],
    ),
}


@functools.cache
def with_escapes(vocabulary: Vocabulary) -> np.ndarray:
    """Return for each id whether its text has a backslash."""
    texts = [*vocabulary.tokens, *[b""] * (vocabulary.size - len(vocabulary.tokens))]
    return np.array([b"\\" in text for text in texts])


def legal_without_escapes(matcher: Matcher) -> np.ndarray:
    """Return the legal ids whose texts have no backslash.

    In strings, automata allow more escapes than LLGuidance.
    """
    legal = matcher.legal()
    return legal[~with_escapes(matcher.compiled.backend.vocabulary)[legal]]


@pytest.mark.parametrize("name", SPECIAL_TAGS)
def test_automaton_with_special_tokens_has_masks_of_llguidance(
    vocabulary, llguidance, without_automata, name
):
    """Along random texts, an automaton and LLGuidance allow the same tokens."""
    grammar, *_ = SPECIAL_TAGS[name]
    is_format = isinstance(grammar, dict)
    spec = GrammarSpec.structural_format(grammar) if is_format else grammar
    compiled = llguidance.compile(spec)
    assert compiled.automaton is not None
    expected = without_automata.compile(spec)
    generator = random.Random(name)
    stops = list(vocabulary.stop_ids)
    special = [t for t in vocabulary.names.values() if not vocabulary.is_text(t) and t not in stops]
    ending = [vocabulary.tokens.index(text) for text in (b'"', b"}")]
    found = 0
    for _ in range(30):
        matchers = compiled.matcher(), expected.matcher()
        for _ in range(40):
            legal, others = map(legal_without_escapes, matchers)
            np.testing.assert_array_equal(legal, others)
            going_on = legal[~np.isin(legal, stops)]
            if not going_on.size:
                break
            # Prefer special tokens, and the bytes of JSON's syntax, so that values end.
            preferred = generator.choice([[], special, ending])
            choices = going_on[np.isin(going_on, preferred)]
            token = int(generator.choice(choices if choices.size else going_on))
            found += token in special
            assert all(matcher.accept(token) for matcher in matchers)
    assert found > 20


def test_automaton_with_token_by_id(tokenizer, vocabulary, llguidance, without_automata):
    """A token without text is named by its id; a token with text has no automaton."""
    call = tokenizer.token_to_id("[CALL]")
    [plain] = tokenizer.encode("x", add_special_tokens=False).ids
    for token, has_automaton in ((call, True), (plain, False)):
        form = {"type": "sequence", "elements": [{"type": "token", "token": token}, JSON]}
        spec = GrammarSpec.structural_format(form)
        compiled = llguidance.compile(spec)
        assert (compiled.automaton is not None) == has_automaton
        for matcher in (compiled.matcher(), without_automata.compile(spec).matcher()):
            assert matcher.legal().tolist() == [token]
            assert matcher.accept(token) and token not in matcher.legal()


@pytest.mark.parametrize(
    "name", [name for name in SPECIAL_TAGS if name not in ("structural_tag", "at once")]
)
@pytest.mark.parametrize("named", ["[CALL]", "<|end_call|>"])
@pytest.mark.full("cl100k")
def test_named_token_that_ends_request_is_legal_only_at_an_end(
    tokenizer, vocabulary, llguidance, without_automata, name, named
):
    """A request's stop ids can contain a special token that the grammar names."""
    spec = GrammarSpec.structural_format(SPECIAL_TAGS[name][0])
    stops = [*vocabulary.stop_ids, tokenizer.token_to_id(named)]
    compiled = llguidance.compile(spec)
    assert compiled.automaton is not None
    expected = without_automata.compile(spec)
    generator = random.Random(name)
    for _ in range(8):
        matchers = compiled.matcher(stop_ids=stops), expected.matcher(stop_ids=stops)
        for _ in range(40):
            legal, others = map(legal_without_escapes, matchers)
            np.testing.assert_array_equal(legal, others)
            for matcher in matchers:
                for stop in stops:
                    assert matcher.accept(stop) == (stop in legal)
                    assert matcher.is_terminated() == (stop in legal)
                    matcher.rollback(int(stop in legal))
            # A shorter text could contain the stop id.
            assert (matchers[0].distance() is None) == (named in spec.text)
            going_on = legal[~np.isin(legal, stops)]
            if not going_on.size:
                break
            token = int(generator.choice(going_on))
            assert all(matcher.accept(token) for matcher in matchers)


@pytest.mark.parametrize("name", SPECIAL_TAGS)
def test_special_token_is_legal_instead_of_its_name_in_tags(
    tokenizer, vocabulary, llguidance, name
):
    """A special token is legal where its name begins or ends a tag, and nowhere else."""
    grammar, fits, differs = SPECIAL_TAGS[name]
    spec = grammar
    if isinstance(grammar, dict):
        spec = GrammarSpec.structural_format(grammar)
    compiled = llguidance.compile(spec)
    named = {"@": tokenizer.token_to_id("[CALL]"), "$": tokenizer.token_to_id("<|end_call|>")}

    def ids(text: str) -> list[int]:
        return [named.get(c) or vocabulary.tokens.index(c.encode()) for c in text]

    for text in fits:
        matcher = compiled.matcher()
        for token in ids(text):
            assert token in matcher.legal() and matcher.accept(token), text
        assert matcher.accept(vocabulary.stop_ids[0]), text
        if name == "tokens":
            continue
        # The spelled text fits as well.
        spelled = text.replace("@", "[CALL]").replace("$", "<|end_call|>")
        compiled.matcher(tokens=[*ids(spelled), vocabulary.stop_ids[0]])
    for text in differs:
        matcher = compiled.matcher()
        path = [*ids(text), vocabulary.stop_ids[0]]
        wrong = matcher.accept_all(path)
        assert wrong < len(path), text
        assert path[wrong] not in matcher.legal(), text
