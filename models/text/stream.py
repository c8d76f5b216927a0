"""Text of tokens as they come, and the stop strings in it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import tokenizers

from graft.models.errors import TokenizerError

T = TypeVar("T")
#: Ids behind the last whole character after which text is given out as it is.
_HELD_IDS = 16


def safely(work: Callable[[], T]) -> T:
    """What the tokenizers library returns; its panics are no Exception."""
    try:
        return work()
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        raise TokenizerError(f"the tokenizer failed: {error}") from error


def decode(
    backend: tokenizers.Tokenizer, size: int, ids: Sequence[int], special: bool = False
) -> str:
    """Text of token ids below `size`; special tokens only where `special` is true."""
    for i in ids:
        if not 0 <= i < size:
            raise TokenizerError(f"token id {i} outside 0..{size - 1}")
    return safely(lambda: backend.decode(list(ids), skip_special_tokens=not special))


class IncrementalDecoder:
    """Text of a growing sequence of ids; the pieces join to what `Tokenizer.decode` gives.

    A token may end inside a UTF-8 character: its text is held back until the rest came, unless
    more ids than a character can have are waiting. Only the ids since the last complete character,
    and the run before them that decides about a leading space, are decoded again.
    """

    def __init__(self, backend: tokenizers.Tokenizer, size: int) -> None:
        self._backend = backend
        self._size = size
        self._ids: list[int] = []
        self._context = 0  # start of the window that is decoded
        self._done = 0  # ids whose text was handed out

    def push(self, ids: Sequence[int]) -> str:
        """Add ids; returns the text that became final, possibly empty."""
        self._ids.extend(ids)
        text = self._pending()
        held = len(self._ids) - self._done <= _HELD_IDS
        if held and (not text or text.endswith("\ufffd")):
            return ""
        del self._ids[: self._context]
        self._context = self._done - self._context
        self._done = len(self._ids)
        return text

    def finish(self, *, cut: bool = False) -> str:
        """The rest, with an incomplete character shown as U+FFFD. The decoder is then empty.

        Parameters
        ----------
        cut : the sequence would have gone on: an incomplete character is left out.
        """
        text = self._pending()
        self._ids = []
        self._context = 0
        self._done = 0
        return text.rstrip("\ufffd") if cut else text

    def _pending(self) -> str:
        known = decode(self._backend, self._size, self._ids[self._context : self._done])
        return decode(self._backend, self._size, self._ids[self._context :])[len(known) :]


class StopFinder:
    """Tells where the first of some strings begins in a text that comes piece by piece.

    The automaton of Aho and Corasick: what a character costs depends neither on the number and
    length of the strings nor on the text before it.

    Parameters
    ----------
    strings : none of them empty.

    Attributes
    ----------
    held : characters at the end of the text that may be the beginning of a string.
    """

    def __init__(self, strings: Iterable[str]):
        self._next: list[dict[str, int]] = [{}]
        # of a state: its text's length, the string in its end
        self._depth = [0]
        self._found = [0]
        for string in strings:
            state = 0
            for depth, char in enumerate(string, 1):
                child = self._next[state].setdefault(char, len(self._next))
                if child == len(self._next):
                    self._next.append({})
                    self._depth.append(depth)
                    self._found.append(0)
                state = child
            self._found[state] = len(string)
        self._shorter = [0] * len(self._next)  # the longest end of a state's text that is a state
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            self._found[state] = self._found[state] or self._found[self._shorter[state]]
            for char, child in self._next[state].items():
                self._shorter[child] = self._step(self._shorter[state], char)
                queue.append(child)
        self._state = self._length = 0

    @property
    def held(self) -> int:
        return self._depth[self._state]

    def feed(self, text: str) -> int | None:
        """Go on by a piece; where the first string that ends in it begins, counted from the start.

        None where none ends in it.
        """
        begins = []
        for char in text:
            self._state = self._step(self._state, char)
            self._length += 1
            if self._found[self._state]:
                begins.append(self._length - self._found[self._state])
        return min(begins, default=None)

    def _step(self, state: int, char: str) -> int:
        while char not in self._next[state] and state:
            state = self._shorter[state]
        return self._next[state].get(char, 0)
