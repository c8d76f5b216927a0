"""Incremental detokenization of generated token ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import tokenizers

from graft.models.errors import TokenizerError

__all__ = ["IncrementalDecoder", "call_tokenizer", "decode"]

T = TypeVar("T")

#: Maximum number of ids whose text is held back because it ends with an incomplete character.
_MAX_HELD_IDS = 16


def call_tokenizer(work: Callable[[], T]) -> T:
    """Call a function of the tokenizers library, and raise TokenizerError if the function fails.

    A panic of this Rust library arrives in Python as an exception that derives from BaseException
    and not from Exception.

    Raises
    ------
    TokenizerError
        If the library raises or panics.
    """
    try:
        return work()
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        raise TokenizerError(f"the tokenizer failed: {error}") from error


def decode(
    backend: tokenizers.Tokenizer,
    size: int,
    ids: Sequence[int],
    special: bool = False,
) -> str:
    """Return the text of token ids.

    Parameters
    ----------
    backend
        Tokenizer of the model.
    size
        Exclusive upper bound of the ids.
    ids
        Token ids.
    special
        Whether to include special tokens.

    Raises
    ------
    TokenizerError
        If an id is out of range or the library fails.
    """
    for i in ids:
        if not 0 <= i < size:
            raise TokenizerError(f"token id {i} is outside 0..{size - 1}")
    id_list = list(ids)
    return call_tokenizer(lambda: backend.decode(id_list, skip_special_tokens=not special))


class IncrementalDecoder:
    """Converts a growing sequence of ids to text.

    The concatenation of the returned pieces is the result of `Tokenizer.decode`. If a token ends
    inside a UTF-8 character, its text is held back until the character is complete, or until more
    than `_MAX_HELD_IDS` ids are pending.

    Each call decodes only a window of ids: the pending ids and the ids of the last returned piece.
    The ids of the last piece are included because the tokenizer may decode the same id with or
    without a leading space, depending on the ids before it.

    Parameters
    ----------
    backend
        Tokenizer of the model.
    size
        Exclusive upper bound of the ids.
    special
        Whether to include special tokens.
    """

    def __init__(self, backend: tokenizers.Tokenizer, size: int, *, special: bool = False) -> None:
        self._backend = backend
        self._size = size
        self._special = special
        self._ids: list[int] = []
        self._window_begin = 0
        self._num_emitted = 0  # number of ids whose text has been returned

    def push(self, ids: Sequence[int]) -> str:
        """Append ids and return the text that became complete, possibly empty."""
        self._ids.extend(ids)
        text = self._pending_text()
        num_pending = len(self._ids) - self._num_emitted
        is_incomplete = not text or text.endswith("\ufffd")
        if is_incomplete and num_pending <= _MAX_HELD_IDS:
            return ""
        del self._ids[: self._window_begin]
        self._window_begin = self._num_emitted - self._window_begin
        self._num_emitted = len(self._ids)
        return text

    def finish(self, *, cut: bool = False) -> str:
        """Return the rest of the text and reset the decoder.

        Parameters
        ----------
        cut
            Whether the sequence was cut off, for example by a length limit. If True, an incomplete
            last character is omitted. If False, the replacement character U+FFFD is returned for
            it.
        """
        text = self._pending_text()
        self._ids = []
        self._window_begin = 0
        self._num_emitted = 0
        return text.rstrip("\ufffd") if cut else text

    def _pending_text(self) -> str:
        """Return the text of the ids that have not been emitted."""
        emitted = self._ids[self._window_begin : self._num_emitted]
        window = self._ids[self._window_begin :]
        emitted_text = decode(self._backend, self._size, emitted, self._special)
        window_text = decode(self._backend, self._size, window, self._special)
        return window_text[len(emitted_text) :]
