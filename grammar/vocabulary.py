"""Vocabulary of a model: the bytes of each token id."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from graft.grammar.errors import GrammarError

__all__ = ["Vocabulary"]


class Vocabulary:
    """Token bytes, number of logit columns, and stop ids of a model. Immutable.

    Parameters
    ----------
    tokens
        Bytes of each token, by id; empty for ids without text (special tokens, unused ids).
    size
        Number of logit columns of the model, at least ``len(tokens)``. Ids beyond `tokens` are
        never legal.
    stop_ids
        Ids that end a sequence. They are never text, even if `tokens` has bytes for them.
    names
        Ids of named tokens without text, such as ``<|tool|>``.

    Raises
    ------
    GrammarError
        `size` is too small, there is no stop id, an id is out of range, a token is not bytes, a
        named token has text, or no token has text.
    """

    def __init__(
        self,
        tokens: Sequence[bytes],
        size: int,
        stop_ids: Iterable[int],
        names: Mapping[str, int] | None = None,
    ):
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys(int(i) for i in stop_ids))
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
            if self.is_text(token):
                raise GrammarError(f"vocabulary: named token {name!r} (id {token}) is text")
        if not any(self.tokens):
            raise GrammarError("vocabulary: no token is text")

    @property
    def words(self) -> int:
        """Number of int32 words of a mask row, ``ceil(size / 32)``."""
        return (self.size + 31) // 32

    @functools.cached_property
    def spells_everything(self) -> bool:
        """Whether every text can be tokenized: each byte that occurs in UTF-8 is a token."""
        bytes_of_utf8 = {bytes([b]) for b in range(0xF5) if b not in (0xC0, 0xC1)}
        return bytes_of_utf8 <= {token for token in self.tokens if len(token) == 1}

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of everything that compiled grammars depend on; equal for equal vocabularies."""
        rest = (self.size, self.stop_ids, sorted(self.names.items()))
        digest = hashlib.sha256(repr(rest).encode())
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

        Supports byte-level BPE (GPT-2's byte alphabet) and byte-fallback tokenizers (pieces such
        as ``<0x0A>``, and U+2581 for a space). Added tokens, special or not, are not text.

        Parameters
        ----------
        source
            Tokenizer object, path of ``tokenizer.json``, or folder that contains it.
        size, stop_ids
            As in `Vocabulary`.

        Raises
        ------
        GrammarError
            The tokenizer is of another kind, cannot be read, or has more than `size` ids.
        """
        description = _read_tokenizer(source)
        vocab = description["model"]["vocab"]
        if not isinstance(vocab, dict):  # unigram models list [piece, score]
            vocab = {piece: token for token, (piece, _) in enumerate(vocab)}
        steps = _pipeline_steps(description.get("decoder"))
        to_bytes: Callable[[str], bytes] = _byte_level
        if "ByteLevel" not in [*steps, *_pipeline_steps(description.get("pre_tokenizer"))]:
            if "ByteFallback" not in steps and not description["model"].get("byte_fallback"):
                raise GrammarError(
                    "tokenizer: neither byte-level nor byte-fallback (decoder steps: "
                    f"{sorted(steps) or 'none'})"
                )
            to_bytes = _byte_fallback(steps.get("Metaspace", {}).get("replacement", "\u2581"))
        names = {token["content"]: token["id"] for token in description.get("added_tokens") or []}
        added = set(names.values())
        last = max(max(vocab.values(), default=-1), max(added, default=-1))
        if last >= size:
            raise GrammarError(f"tokenizer: has id {last} but the model has {size} logit columns")
        tokens = [b""] * (last + 1)
        for piece, token in vocab.items():
            if token not in added:
                tokens[token] = to_bytes(piece)
        return cls(tokens, size, stop_ids, names)


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


def _pipeline_steps(pipeline: dict[str, Any] | None) -> dict[str, dict[str, Any]]:
    """Return the steps of a pipeline by type. Nested sequences are flattened."""
    found = {}
    pending = [pipeline] if pipeline else []
    while pending:
        part = pending.pop()
        found[part["type"]] = part
        pending += [*part.get("decoders", ()), *part.get("pretokenizers", ())]
    return found


# GPT-2's byte alphabet: printable bytes map to themselves, the others to U+0100 and up.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_ALPHABET = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(0x100 + i): byte for i, byte in enumerate(_OTHERS)
}


def _byte_level(piece: str) -> bytes:
    """Return the bytes of a piece that is written in GPT-2's byte alphabet."""
    try:
        return bytes(_ALPHABET[char] for char in piece)
    except KeyError:  # a character outside the alphabet: decoders take the piece literally
        return piece.encode("utf-8")


def _byte_fallback(space: str) -> Callable[[str], bytes]:
    """Return the conversion of pieces to bytes; `space` is the character for a space."""

    def to_bytes(piece: str) -> bytes:
        byte = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", piece)
        if byte:
            return bytes([int(byte[1], 16)])
        return piece.replace(space, " ").encode("utf-8")

    return to_bytes
