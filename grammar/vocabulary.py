"""Vocabulary of a model: the bytes of each token id."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graft.grammar.errors import GrammarError

if TYPE_CHECKING:
    import tokenizers

__all__ = [
    "FIRST_SPECIAL_TOKEN",
    "LAST_CODE",
    "Vocabulary",
    "byte_level_bytes",
    "special_token_bytes",
]

#: First byte that UTF-8 never uses, except for 0xC0 and 0xC1.
_FIRST_UNUSED_BYTE = 0xF5
#: Code with which automata read the special token 0. Its first byte is `_FIRST_UNUSED_BYTE`.
FIRST_SPECIAL_TOKEN = 0x140000
#: Last code that four bytes can express.
LAST_CODE = 0x1FFFFF


class Vocabulary:
    """The bytes of each token of a model, its number of logit columns, and its stop ids. Immutable.

    Parameters
    ----------
    tokens
        Bytes of each token, by id; empty for ids without text (special tokens, unused ids). Several
        ids may have the same bytes.
    size
        Number of logit columns of the model, at least ``len(tokens)``. Ids without an entry in
        `tokens` are never legal, unless they are stop ids.
    stop_ids
        Ids that end a sequence. Their bytes in `tokens` are ignored, so a grammar never treats them
        as text.
    names
        Ids of the tokens that a grammar may name, such as ``<|tool|>``, by name. A named token may
        have text.

    Raises
    ------
    GrammarError
        `size` is too small, there is no stop id, an id is out of range, a token is not bytes, or no
        token has text.
    """

    def __init__(
        self,
        tokens: Sequence[bytes],
        size: int,
        stop_ids: Iterable[int],
        names: Mapping[str, int] | None = None,
    ):
        distinct_stop_ids = dict.fromkeys(map(int, stop_ids))
        self.stop_ids: tuple[int, ...] = tuple(distinct_stop_ids)
        self.size = int(size)
        if len(tokens) > self.size:
            raise GrammarError(
                f"vocabulary: {len(tokens)} tokens but the model has {self.size} logit columns"
            )
        if not self.stop_ids:
            raise GrammarError("vocabulary: needs at least one stop id")
        for stop in self.stop_ids:
            if not 0 <= stop < self.size:
                raise GrammarError(f"vocabulary: stop id {stop} is outside [0, {self.size})")
        for token, text in enumerate(tokens):
            if not isinstance(text, bytes):
                raise GrammarError(
                    f"vocabulary: token {token} is {type(text).__name__}, expected bytes"
                )
        stops = frozenset(self.stop_ids)
        self.tokens: tuple[bytes, ...] = tuple(
            b"" if token in stops else text for token, text in enumerate(tokens)
        )
        self.names: dict[str, int] = dict(names or {})
        for name, token in self.names.items():
            if not 0 <= token < self.size:
                raise GrammarError(
                    f"vocabulary: token {name!r} has id {token}, outside [0, {self.size})"
                )
        if not any(self.tokens):
            raise GrammarError("vocabulary: no token has text")

    @property
    def words(self) -> int:
        """Number of int32 words of a mask row, ``ceil(size / 32)``."""
        return (self.size + 31) // 32

    @functools.cached_property
    def spells_everything(self) -> bool:
        """Whether the tokens can spell every text, because each byte that UTF-8 uses is a token."""
        single_bytes = {token for token in self.tokens if len(token) == 1}
        # UTF-8 never uses the bytes 0xC0, 0xC1 and 0xF5 to 0xFF.
        utf8_bytes = {bytes([byte]) for byte in range(0xF5)}
        utf8_bytes -= {b"\xc0", b"\xc1"}
        return utf8_bytes <= single_bytes

    @functools.cached_property
    def automaton_tokens(self) -> tuple[bytes, ...]:
        """The bytes that automata read for each token.

        A special token that grammars can name has no text; automata read the bytes that
        `special_token_bytes` returns for its id. Other tokens with the first of these bytes are
        part of no text, so they have no bytes here; otherwise, they could spell a special token.
        """
        tokens = [
            b"" if max(token, default=0) >= _FIRST_UNUSED_BYTE else token for token in self.tokens
        ]
        tokens += [b""] * (self.size - len(tokens))
        for token in self.names.values():
            if not self.is_text(token) and token not in self.stop_ids:
                tokens[token] = special_token_bytes(token)
        return tuple(tokens)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of all data of the vocabulary. Equal vocabularies have equal fingerprints."""
        names = sorted(self.names.items())
        other_fields = (self.size, self.stop_ids, names)
        digest = hashlib.sha256(repr(other_fields).encode())
        for token in self.tokens:
            digest.update(len(token).to_bytes(4, "little") + token)
        return digest.hexdigest()

    def is_text(self, token: int) -> bool:
        """Return whether an id has bytes that a grammar can consume."""
        return 0 <= token < len(self.tokens) and bool(self.tokens[token])

    @classmethod
    def from_tokenizer(
        cls, source: tokenizers.Tokenizer | str | Path, size: int, stop_ids: Iterable[int]
    ) -> Vocabulary:
        """Return the vocabulary of a tokenizer.

        Two kinds of tokenizers are supported. Byte-level BPE tokenizers write their pieces (the
        strings of the tokens in ``tokenizer.json``) in GPT-2's byte alphabet. Byte-fallback
        tokenizers have pieces such as ``<0x0A>`` and write a space as U+2581.

        Grammars can name all added tokens. An added token that the tokenizer marks as special has
        no text in the vocabulary, because the decoded output omits it. Other added tokens, for
        example ``<tool_call>`` in many tokenizers, are text.

        Parameters
        ----------
        source
            Tokenizer object, path of ``tokenizer.json``, or path of the folder that contains it.
        size, stop_ids
            As in `Vocabulary`.

        Raises
        ------
        GrammarError
            The tokenizer is of another kind, cannot be read, or has an id of `size` or more.
        """
        description = _read_tokenizer(source)
        vocab = description["model"]["vocab"]
        if not isinstance(vocab, dict):  # unigram models list pairs [piece, score]
            vocab = {piece: token for token, (piece, _) in enumerate(vocab)}
        to_bytes = _piece_conversion(description)
        added_tokens = description.get("added_tokens") or []
        names = {added["content"]: added["id"] for added in added_tokens}
        last = max([-1, *vocab.values(), *names.values()])
        if last >= size:
            raise GrammarError(f"tokenizer: has id {last} but the model has {size} logit columns")
        tokens = [b""] * (last + 1)
        for piece, token in vocab.items():
            tokens[token] = to_bytes(piece)
        for added in added_tokens:
            # An added token that is not special is decoded in the same way as any other piece.
            tokens[added["id"]] = b"" if added.get("special") else to_bytes(added["content"])
        return cls(tokens, size, stop_ids, names)


def special_token_bytes(token: int) -> bytes:
    """Return the bytes that automata read for a special token; empty if its id is too large.

    The bytes are those of the code `FIRST_SPECIAL_TOKEN` + `token` if UTF-8 is continued to all
    codes that four bytes can express.
    """
    code = FIRST_SPECIAL_TOKEN + token
    if code > LAST_CODE:
        return b""
    return bytes([0xF0 | code >> 18, *(0x80 | code >> shift & 0x3F for shift in (12, 6, 0))])


def _read_tokenizer(source: tokenizers.Tokenizer | str | Path) -> dict[str, Any]:
    """Return the content of a ``tokenizer.json``."""
    if isinstance(source, (str, Path)):
        path = Path(source)
        path = path / "tokenizer.json" if path.is_dir() else path
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise GrammarError(f"tokenizer: cannot read {path}: {error}") from error
    else:
        text = source.to_str()
    try:
        description = json.loads(text)
        description["model"]["vocab"]
    except (ValueError, KeyError, TypeError) as error:
        raise GrammarError(
            f"tokenizer: is not a tokenizer.json with a model vocabulary: {error!r}"
        ) from error
    return description


def _piece_conversion(description: dict[str, Any]) -> Callable[[str], bytes]:
    """Return the function that converts the pieces (token strings) of a tokenizer to bytes.

    `description` is the content of ``tokenizer.json``. Raise `GrammarError` if the tokenizer is
    neither byte-level nor byte-fallback.
    """
    decoder_steps = _pipeline_steps(description.get("decoder"))
    pre_tokenizer_steps = _pipeline_steps(description.get("pre_tokenizer"))
    if "ByteLevel" in decoder_steps or "ByteLevel" in pre_tokenizer_steps:
        return byte_level_bytes
    if "ByteFallback" not in decoder_steps and not description["model"].get("byte_fallback"):
        raise GrammarError(
            "tokenizer: neither byte-level nor byte-fallback (decoder steps: "
            f"{sorted(decoder_steps) or 'none'})"
        )
    metaspace = decoder_steps.get("Metaspace", {})
    return _byte_fallback(metaspace.get("replacement", "\u2581"))


def _pipeline_steps(pipeline: dict[str, Any] | None) -> dict[str, dict[str, Any]]:
    """Return the components of a tokenizer's decoder or pre-tokenizer, by type.

    `pipeline` is the decoder or pre-tokenizer in ``tokenizer.json``. Nested sequences of components
    are flattened.
    """
    found = {}
    pending = [pipeline] if pipeline else []
    while pending:
        part = pending.pop()
        found[part["type"]] = part
        pending += [*part.get("decoders", ()), *part.get("pretokenizers", ())]
    return found


# GPT-2's byte alphabet: each printable byte is written as the character with the same code, and the
# other bytes are written as the characters from U+0100.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_ALPHABET = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(0x100 + i): byte for i, byte in enumerate(_OTHERS)
}


def byte_level_bytes(piece: str) -> bytes:
    """Return the bytes of a piece that is written in GPT-2's byte alphabet."""
    try:
        return bytes(map(_ALPHABET.__getitem__, piece))
    except KeyError:
        # Tokenizers encode a piece with a character outside the byte alphabet as UTF-8.
        return piece.encode("utf-8")


def _byte_fallback(space: str) -> Callable[[str], bytes]:
    """Return the function that converts pieces of a byte-fallback tokenizer to bytes.

    In the pieces, the character `space` stands for a space.
    """

    def to_bytes(piece: str) -> bytes:
        byte = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", piece)
        if byte:
            return bytes([int(byte[1], 16)])
        return piece.replace(space, " ").encode("utf-8")

    return to_bytes
