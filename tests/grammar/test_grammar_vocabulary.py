"""Tests of Vocabulary. Token bytes are compared with the tokenizers' encoding and decoding."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from graft.grammar import GrammarError, GrammarSpec, Vocabulary, XGrammarBackend

TEXTS = [
    '{"name": "Zoë", "tags": ["α", "日本語", "🙂👩‍👩‍👧"], "n": -1.5e+10}\n\n\t  end',
    "\x00\x01\x7f \u00a0\u00ad\u2028 ÿĀġ mixed \r\n   spaces    and\ttabs",
    "".join(chr(c) for c in range(0x20, 0x250)),
]


@pytest.fixture(
    scope="module",
    params=[pytest.param("deepseek-128k", marks=pytest.mark.full), "cl100k-llama3-like"],
)
def real(request, shared_data: Path) -> tuple[tokenizers.Tokenizer, Vocabulary]:
    path = shared_data / "tokenizers" / f"{request.param}.json.gz"
    if not path.is_file():
        pytest.skip(f"no tokenizer at {path}")
    tokenizer = tokenizers.Tokenizer.from_str(gzip.decompress(path.read_bytes()).decode())
    size = tokenizer.get_vocab_size() + 21
    stop = {"deepseek-128k": 1, "cl100k-llama3-like": 100257}[request.param]
    return tokenizer, Vocabulary.from_tokenizer(tokenizer, size, [stop])


def test_vocabulary_bytes_match_tokenizer(real):
    """The tokenizer decodes each id to the bytes of the vocabulary.

    The bytes of a text's tokens are the UTF-8 of the text, even if a character is split between
    tokens. Special tokens have no bytes.
    """
    tokenizer, vocabulary = real
    added = tokenizer.get_added_tokens_decoder()
    special = {token for token in added if added[token].special}
    seen = set()
    for token, text in enumerate(vocabulary.tokens):
        if token in special or token in vocabulary.stop_ids:
            assert text == b""
        else:
            assert text.decode("utf-8", "replace") == tokenizer.decode([token]), token
            assert text not in seen
            seen.add(text)
    assert {bytes([byte]) for byte in range(256)} <= seen
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert b"".join(vocabulary.tokens[token] for token in ids) == text.encode()


def test_bitmask_of_large_vocabulary_is_exact(real):
    """An id is legal if and only if its bytes continue the text."""
    _, vocabulary = real
    backend = XGrammarBackend(vocabulary)
    text = b'{"name": "'
    schema = {"type": "object", "properties": {"name": {"enum": ["Zoë", "日本"]}}}
    matcher = backend.compile(GrammarSpec.json_schema({**schema, "required": ["name"]})).matcher()
    endings = [(text + name.encode() + b'"}') for name in ("Zoë", "日本")]
    ids: dict[bytes, list[int]] = {}
    for id, piece in enumerate(vocabulary.tokens):
        ids.setdefault(piece, []).append(id)
    done = b""
    rng = np.random.default_rng(0)
    while done not in endings:
        left = [ending[len(done) :] for ending in endings if ending.startswith(done)]
        beginnings = {text[:size] for text in left for size in range(1, len(text) + 1)}
        fits = sorted(id for piece in beginnings for id in ids.get(piece, ()))
        assert matcher.legal().tolist() == fits
        token = int(rng.choice(fits))
        assert matcher.accept(token)
        done += vocabulary.tokens[token]
    assert matcher.legal().tolist() == list(vocabulary.stop_ids)


def byte_fallback_tokenizer() -> tokenizers.Tokenizer:
    """Return a small tokenizer in SentencePiece's format."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "a", "b", "▁a", "ab"]
    vocab = {piece: token for token, piece in enumerate(pieces)}
    merges = [("▁", "a"), ("a", "b")]
    known = {"unk_token": "<unk>", "fuse_unk": True}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, merges, byte_fallback=True, **known))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def test_vocabulary_reads_byte_fallback_tokenizers(tmp_path):
    """The tokenizer may be an object, a file or a folder."""
    tokenizer = byte_fallback_tokenizer()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for source in (tokenizer, tmp_path, tmp_path / "tokenizer.json"):
        vocabulary = Vocabulary.from_tokenizer(source, 300, [2])
        for text in ("ab a b", "日本 \n"):
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            assert b"".join(vocabulary.tokens[token] for token in ids) == text.encode()
        assert [vocabulary.tokens[token] for token in (0, 1, 2)] == [b"", b"", b""]
        assert not vocabulary.is_text(299) and not vocabulary.is_text(-1)


def word_tokenizer() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


@pytest.mark.parametrize(
    "source, message",
    [
        (word_tokenizer(), "neither byte-level nor byte-fallback"),
        ("", r"not a tokenizer\.json"),
        ("absent.json", "cannot read"),
        (byte_fallback_tokenizer(), "has id 263 but the model has 200 logit columns"),
    ],
)
def test_vocabulary_rejects_unsupported_tokenizers(tmp_path, source, message):
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": 3}))
    source = tmp_path / source if isinstance(source, str) else source
    with pytest.raises(GrammarError, match=message):
        Vocabulary.from_tokenizer(source, 200, [1])


@pytest.mark.parametrize(
    "tokens, size, stops, message",
    [
        ([b"a", b"b"], 1, [0], "2 tokens but the model has 1"),
        ([b"a"], 4, [], "at least one stop id"),
        ([b"a"], 4, [4], r"stop id 4 is outside \[0, 4\)"),
        ([b"a"], 4, [-1], "stop id -1"),
        ([b"a", "b"], 4, [3], "token 1 is str"),
        ([b"", b"x"], 4, [1], "no token has text"),
    ],
)
def test_vocabulary_rejects_invalid_arguments(tokens, size, stops, message):
    with pytest.raises(GrammarError, match=message):
        Vocabulary(tokens, size, stops)
