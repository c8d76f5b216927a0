"""Stop strings, found while a text grows."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


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
        self._depth, self._found = [0], [0]  # of a state: its text's length, the string in its end
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
