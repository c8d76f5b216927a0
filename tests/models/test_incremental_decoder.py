"""Incremental decoding: the text depends on the ids only, not on how they are grouped."""

import gzip
import random
import re

import pytest
import tokenizers
from tiny_models import make_tiny_tokenizer
from tokenizers import decoders, models

from graft.models.errors import TokenizerError
from graft.models.tokenizer import Tokenizer

#: CJK, emoji with skin tones and joiners, flags, Cyrillic, Arabic, Devanagari, combining marks and
#: characters of one to four bytes.
TEXTS = [
    "日本語のテキスト、中文文本。한국어 텍스트",
    "👍🏽 👩🏿‍🚀 👨‍👩‍👧‍👦 🏳️‍🌈 🇯🇵🇺🇦 🙂🙃",
    "Привет, мир! Съешь же ещё этих мягких булок",
    "مرحبا بالعالم — النص العربي",
    "नमस्ते दुनिया क्षत्रिय",
    "größe e\u0301 ½ \U00010348\U0010ffff \ufffd end\n\ttab  two",
    '{"name": "日本 é 🙂"}',
]


def byte_level(folder):
    make_tiny_tokenizer(folder, 300)
    return Tokenizer(folder, vocab_size=300)


def sentencepiece(folder, *extra_steps):
    """Write a tokenizer with byte tokens and pieces in the form of SentencePiece."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [*"▁abcdefgh日本é🙂П.", "▁a", "▁日", "ab", "▁▁", "\ufffd"]
    vocab = {piece: token for token, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    backend.add_special_tokens(["<s>", "</s>"])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *extra_steps]
    backend.decoder = decoders.Sequence(steps)
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


def byte_fallback(folder):
    return sentencepiece(folder)


def byte_fallback_with_strip(folder):
    return sentencepiece(folder, decoders.Strip(" ", 1, 0))


def make_word_tokenizer(decoder, pieces):
    """Return a function that makes a tokenizer without bytes."""

    def make(folder):
        vocab = {piece: token for token, piece in enumerate(pieces)}
        backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
        if decoder is not None:
            backend.decoder = decoder
        backend.save(str(folder / "tokenizer.json"))
        return Tokenizer(folder)

    return make


KINDS = {
    "byte-level": byte_level,
    "byte fallback": byte_fallback,
    "byte fallback, strip": byte_fallback_with_strip,
    "metaspace": make_word_tokenizer(decoders.Metaspace(), ["▁", "▁日本", "語", "▁a", "🙂", "b"]),
    "WordPiece": make_word_tokenizer(decoders.WordPiece(), ["日", "##本", "a", "##b", ".", "🙂"]),
    "suffix": make_word_tokenizer(decoders.BPEDecoder(), ["日", "本</w>", "a", "b</w>", "🙂</w>"]),
    "none": make_word_tokenizer(None, ["日", "本", "a", "b", "🙂"]),
}


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def tokenizer(request, tmp_path):
    return request.param(tmp_path)


@pytest.fixture(params=["deepseek-128k", "cl100k-llama3-like"])
def real_tokenizer(request, shared_data, tmp_path):
    packed = shared_data / "tokenizers" / f"{request.param}.json.gz"
    (tmp_path / "tokenizer.json").write_bytes(gzip.decompress(packed.read_bytes()))
    return Tokenizer(tmp_path)


def sequences(tokenizer, rng):
    """Return ids of texts, ids of texts with damage, and random ids."""
    texts = rng.sample(TEXTS, len(TEXTS))
    ids = tokenizer.encode("".join(texts), special=False)
    damaged = list(ids)
    for _ in range(len(ids) // 6):
        position = rng.randrange(len(damaged))
        damaged[position : position + rng.randrange(2)] = [rng.randrange(tokenizer.vocab_size)]
    random_ids = [rng.randrange(tokenizer.vocab_size) for _ in range(200)]
    few = rng.sample(range(tokenizer.vocab_size), min(5, tokenizer.vocab_size))
    return ids, damaged, random_ids, rng.choices(few, k=100)


def pieces_of(tokenizer, ids, rng, special, max_size=64):
    """Return the strings that a decoder returns for ids in groups of random size."""
    stream = tokenizer.incremental(special=special)
    pieces = []
    begin = 0
    while begin < len(ids):
        end = begin + rng.randint(1, rng.randint(1, max_size))
        pieces.append(stream.push(ids[begin:end]))
        begin = end
    return [*pieces, stream.finish()]


def check_groupings(tokenizer, seed):
    """Check that the text of random sequences does not depend on their grouping."""
    rng = random.Random(seed)
    for ids in sequences(tokenizer, rng):
        for special in (False, True):
            text = tokenizer.decode(ids, special=special)
            for _ in range(3):
                pieces = pieces_of(tokenizer, ids, rng, special)
                assert "".join(pieces) == text, f"seed {seed}"


@pytest.mark.parametrize(
    "seeds", [range(4), pytest.param(range(4, 200), marks=pytest.mark.full)], ids=["few", "many"]
)
def test_incremental_decoder_text_does_not_depend_on_grouping(tokenizer, seeds):
    for seed in seeds:
        check_groupings(tokenizer, seed)


@pytest.mark.parametrize(
    "seeds", [range(1), pytest.param(range(1, 50), marks=pytest.mark.full)], ids=["few", "many"]
)
@pytest.mark.full("cl100k")
def test_incremental_decoder_groupings_with_real_tokenizer(real_tokenizer, seeds):
    for seed in seeds:
        check_groupings(real_tokenizer, seed)
        for ids in sequences(real_tokenizer, random.Random(seed)):
            for special in (False, True):
                expected = real_tokenizer.backend.decode(ids, skip_special_tokens=not special)
                assert real_tokenizer.decode(ids, special=special) == expected, f"seed {seed}"


@pytest.mark.parametrize(
    "seeds", [range(5), pytest.param(range(5, 20), marks=pytest.mark.full)], ids=["few", "many"]
)
def test_incremental_decoder_returns_longest_final_text(tokenizer, seeds):
    """After each id, the text so far is a prefix of the text of every continuation.

    Only the bytes of an incomplete character are held back.
    """
    for seed in seeds:
        for ids in sequences(tokenizer, random.Random(seed)):
            stream = tokenizer.incremental()
            text = ""
            for count, token in enumerate(ids[:60], 1):
                text += stream.push([token])
                whole = tokenizer.decode(ids[:count])
                assert whole.startswith(text), f"seed {seed}"
                assert set(whole[len(text) :]) <= {"\ufffd"} and len(whole) - len(text) <= 3


def piece_bytes(tokenizer, token):
    """Return the byte of a token such as ``<0xE3>``, or None."""
    found = re.fullmatch("<0x(..)>", tokenizer.backend.id_to_token(token))
    return bytes.fromhex(found[1]) if found else None


def split_characters(data):
    """Return the text of bytes; bytes outside valid characters are U+FFFD."""
    text = ""
    while data:
        for length in range(1, 5):
            try:
                text += data[:length].decode()
                break
            except UnicodeDecodeError:
                continue
        else:
            text += "\ufffd"
            length = 1
        data = data[length:]
    return text


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("make", [byte_fallback, byte_fallback_with_strip])
def test_tokenizer_decode_keeps_valid_characters_among_byte_tokens(make, seed, tmp_path):
    """`decode` equals the library, except that valid characters among invalid bytes are kept."""
    tokenizer = make(tmp_path)
    for ids in sequences(tokenizer, random.Random(seed)):
        expected = ""
        data = b""
        for token in ids:
            if token in (1, 2):
                continue
            byte = piece_bytes(tokenizer, token)
            if byte is not None:
                data += byte
                continue
            piece = tokenizer.backend.id_to_token(token).replace("▁", " ")
            expected += split_characters(data) + piece
            data = b""
        expected += split_characters(data)
        if make is byte_fallback_with_strip:
            expected = expected.removeprefix(" ")
        assert tokenizer.decode(ids) == expected, f"seed {seed}"
        if "\ufffd" not in expected:
            assert tokenizer.backend.decode(ids) == expected


@pytest.mark.parametrize("seed", range(4))
def test_tokenizer_decode_equals_library_without_byte_tokens(tokenizer, seed):
    if "ByteFallback" in str(tokenizer.backend.decoder):
        ids = tokenizer.encode("".join(TEXTS), special=False)
        assert tokenizer.decode(ids) == tokenizer.backend.decode(ids)
        return
    for ids in sequences(tokenizer, random.Random(seed)):
        assert tokenizer.decode(ids) == tokenizer.backend.decode(ids), f"seed {seed}"


def test_incremental_decoder_replaces_invalid_utf8_like_library(tmp_path):
    """All sequences of two bytes, and random sequences of four, decode as in the library."""
    tokenizer = byte_level(tmp_path)
    ids = {}
    for token in range(tokenizer.vocab_size):
        data = tokenizer.backend.id_to_token(token)
        if len(data) == 1:
            ids[token] = data
    singles = list(ids)
    assert len(singles) == 256
    cases = [[a, b] for a in singles for b in singles]
    rng = random.Random(0)
    cases += [rng.choices(singles, k=4) for _ in range(5_000)]
    whole = [tokenizer.backend.decode_batch(cases), [tokenizer.decode(case) for case in cases]]
    assert whole[0] == whole[1]


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_incremental_decoder_keeps_final_replacement_character(make, tmp_path):
    """A generated U+FFFD is text; an incomplete last character is held back until the end."""
    tokenizer = make(tmp_path)
    ids = tokenizer.encode("a\ufffd", special=False)
    stream = tokenizer.incremental()
    assert stream.push(ids) == "a\ufffd"
    tail = tokenizer.encode("語", special=False)[:2]
    assert stream.push(tail) == ""
    assert "a\ufffd" + stream.finish() == tokenizer.decode([*ids, *tail])
    assert stream.push(ids) == "a\ufffd"


def test_incremental_decoder_decodes_each_id_a_bounded_number_of_times(tmp_path, monkeypatch):
    """Long sequences of invalid bytes are not decoded again with each id."""
    tokenizer = byte_fallback(tmp_path)
    counts = []
    original = tokenizer._detokenizer.decode
    monkeypatch.setattr(
        tokenizer._detokenizer, "decode", lambda ids: counts.append(len(ids)) or original(ids)
    )
    stream = tokenizer.incremental()
    for _ in range(500):
        stream.push([3 + 0x80])
        stream.push([3 + 0xE3, 3 + 0x81])
        stream.push([260])
    assert sum(counts) < 6 * 500 + 600


def test_tokenizer_refuses_decoder_that_changes_decoded_bytes(tmp_path):
    make_tiny_tokenizer(tmp_path, 300)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TokenizerError, match="combines ByteLevel with Strip"):
        Tokenizer(tmp_path, vocab_size=300)
