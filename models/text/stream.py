"""Conversion of token ids to text, for complete outputs and during generation."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any, TypeVar

import tokenizers

from graft.grammar.vocabulary import byte_level_bytes
from graft.models.errors import TokenizerError

__all__ = ["Detokenizer", "IncrementalDecoder", "call_tokenizer"]

T = TypeVar("T")


def call_tokenizer(work: Callable[[], T]) -> T:
    """Call a function of the tokenizers library, and raise TokenizerError if the function fails.

    A panic of this Rust library arrives in Python as an exception that derives from BaseException
    and not from Exception.
    """
    try:
        return work()
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        raise TokenizerError(f"the tokenizer failed: {error}") from error


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    """Handle a decoding error: replace each invalid byte with one U+FFFD."""
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error("graft.replace_each_byte", _replace_each_byte)


class Detokenizer:
    """Decoding rules of a tokenizer, shared by all its incremental decoders.

    There are two kinds of tokens. All tokens of a byte-level tokenizer, and the tokens ``<0x80>``
    to ``<0xFF>`` of a byte-fallback tokenizer, represent bytes: the bytes of consecutive tokens are
    concatenated and decoded as UTF-8. The tokenizers library converts all other tokens. The text of
    such a token depends only on how the text of the preceding token ends, and on whether there is a
    preceding token, because the library strips a leading space at the beginning of a text.

    Valid ids are less than `size`. If the tokenizer's decoder combines ByteLevel with steps that
    change the text, the constructor raises TokenizerError.

    Attributes
    ----------
    utf8_errors
        Name of the error handler for bytes that are not valid UTF-8. It yields the same number of
        U+FFFD characters as the tokenizers library: for a byte-level tokenizer, one for each
        maximal incomplete character; for a byte-fallback tokenizer, one for each invalid byte.
    """

    def __init__(self, backend: tokenizers.Tokenizer, size: int, where: str) -> None:
        self._backend = backend
        self._size = size
        steps = _decoder_steps(backend)
        self._is_byte_level = "ByteLevel" in steps
        self._has_byte_tokens = "ByteFallback" in steps
        others = steps - {"Sequence", "ByteLevel", "Fuse"}
        if self._is_byte_level and others:
            raise TokenizerError(
                f"{where}: the decoder combines ByteLevel with {', '.join(sorted(others))}; "
                "ByteLevel is supported alone or with Fuse"
            )
        self.utf8_errors = "replace" if self._is_byte_level else "graft.replace_each_byte"
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self._bytes: dict[int, bytes | None] = {}

    def token_bytes(self, token: int) -> bytes | None:
        """Return the bytes that a token represents.

        The result is None if the token does not represent bytes (see `Detokenizer`); the tokenizers
        library then converts it to text. The result is empty for an id without a token. An id that
        is out of range raises TokenizerError.
        """
        if token not in self._bytes:
            if not 0 <= token < self._size:
                raise TokenizerError(f"token id {token} is outside 0..{self._size - 1}")
            self._bytes[token] = self._read_token(self._backend.id_to_token(token))
        return self._bytes[token]

    def _read_token(self, piece: str | None) -> bytes | None:
        if not piece:
            return b""
        if self._is_byte_level:
            return byte_level_bytes(piece)
        # For tokens of ASCII bytes, the result is None: the tokenizers library must convert them,
        # because it may strip a leading space.
        if self._has_byte_tokens and re.fullmatch("<0x[89A-Fa-f][0-9A-Fa-f]>", piece):
            return bytes.fromhex(piece[3:5])
        return None

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text to which the tokenizers library decodes ids, with special tokens."""
        id_list = list(ids)
        return call_tokenizer(lambda: self._backend.decode(id_list, skip_special_tokens=False))

    @cached_property
    def anchor(self) -> list[int]:
        """At most one id, which is decoded before other ids so that their leading space is kept.

        The tokenizers library strips a leading space at the beginning of a text. An id with a
        non-empty text before the space prevents this. The list is empty if the library converts no
        id to a non-empty text. It is also empty for byte-level tokenizers, whose ids are converted
        without the library.
        """
        if self._is_byte_level:
            return []
        ids = (token for token in range(self._size) if self.token_bytes(token) is None)
        return next(([token] for token in ids if self.decode([token])), [])


class IncrementalDecoder:
    """Converts a growing sequence of ids to text.

    The text depends on the ids only, not on how the caller groups them into calls: after each call,
    the strings returned so far concatenate to the longest text that no later id can change. If the
    ids end inside a UTF-8 character, the bytes of this character are held back.

    Special tokens are included if `special` is set or their ids are in `shown`.
    """

    def __init__(
        self, detokenizer: Detokenizer, *, special: bool = False, shown: Iterable[int] = ()
    ) -> None:
        self._detokenizer = detokenizer
        self._hidden = frozenset() if special else detokenizer.special_ids.difference(shown)
        self._utf8 = codecs.getincrementaldecoder("utf-8")(detokenizer.utf8_errors)
        # Ids to decode together with the next id, because its text depends on them.
        self._context: list[int] = []

    def push(self, ids: Iterable[int]) -> str:
        """Append ids and return the text that became complete, possibly empty.

        TokenizerError is raised if an id is out of range or the tokenizers library fails.
        """
        pieces = []
        run: list[int] = []  # consecutive ids that the tokenizers library converts
        for token in ids:
            data = self._detokenizer.token_bytes(token)
            if data == b"" or token in self._hidden:
                continue
            if data is None:
                run.append(token)
                continue
            if run:
                pieces.append(self._push_run(run))
                run = []
            pieces.append(self._push_bytes(data))
        if run:
            pieces.append(self._push_run(run))
        return "".join(pieces)

    def finish(self) -> str:
        """Return the bytes of an incomplete last character as U+FFFD, and reset the decoder."""
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        self._context = []
        return rest

    def _push_bytes(self, data: bytes, final: bool = False) -> str:
        """Append UTF-8 bytes of the output and return the text that became complete.

        If `final` is true, an incomplete character at the end becomes U+FFFD.
        """
        text = self._utf8.decode(data, final)
        if text:
            self._context = self._detokenizer.anchor
        return text

    def _push_run(self, run: list[int]) -> str:
        """Append ids that the tokenizers library converts, and return their text."""
        rest = self._push_bytes(b"", final=True)
        context = self._context
        before = self._detokenizer.decode(context) if context else ""
        text = self._detokenizer.decode([*context, *run])
        self._context = [*self._detokenizer.anchor, run[-1]]
        return rest + text[len(before) :]


def _decoder_steps(backend: tokenizers.Tokenizer) -> set[str]:
    """Return the types of the steps of a tokenizer's decoder, including nested steps."""
    steps = set()
    pending: list[Any] = []
    if backend.decoder is not None:
        pending.append(json.loads(backend.decoder.__getstate__()))
    while pending:
        step = pending.pop()
        steps.add(step["type"])
        pending += step.get("decoders", ())
    return steps
