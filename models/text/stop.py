"""Stop strings: incremental search with an Aho-Corasick automaton."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

__all__ = ["StopFinder"]


class StopFinder:
    """Finds the first of several non-empty stop strings in a text that arrives in pieces.

    The search uses an Aho-Corasick automaton. Its cost per character depends neither on the stop
    strings nor on the length of the text so far.
    """

    def __init__(self, strings: Iterable[str]):
        # Each state of the automaton represents a prefix of a stop string. State 0 is the empty
        # prefix.
        self._children: list[dict[str, int]] = [{}]
        self._prefix_length = [0]
        # For each state, the length of the longest stop string that is a suffix of the state's
        # prefix; 0 if there is none.
        self._match_length = [0]
        for string in strings:
            self._insert(string)
        # Suffix links. The link of a state leads to the state of its longest proper suffix that is
        # also a prefix of a stop string.
        self._suffix = [0] * len(self._children)
        self._link_suffixes()
        self._state = 0
        self._length = 0

    @property
    def held(self) -> int:
        """Length of the longest suffix of the text that is a prefix of a stop string."""
        return self._prefix_length[self._state]

    def feed(self, text: str) -> int | None:
        """Search the next piece of the text for stop strings that end in this piece.

        Return the offset in the whole text at which such a stop string begins, or None if there is
        none. If several stop strings end in this piece, return the lowest of their offsets.
        """
        first_begin = None
        for char in text:
            self._state = self._step(self._state, char)
            self._length += 1
            match_length = self._match_length[self._state]
            if match_length == 0:
                continue
            begin = self._length - match_length
            if first_begin is None or begin < first_begin:
                first_begin = begin
        return first_begin

    def _insert(self, string: str) -> None:
        """Add the states that represent the prefixes of one stop string."""
        state = 0
        for depth, char in enumerate(string, 1):
            children = self._children[state]
            if char not in children:
                children[char] = len(self._children)
                self._children.append({})
                self._prefix_length.append(depth)
                self._match_length.append(0)
            state = children[char]
        self._match_length[state] = len(string)

    def _link_suffixes(self) -> None:
        """Compute the suffix links of all states in breadth-first order.

        The link of a state leads to a state of lower depth, and is computed from the links of such
        states.
        """
        queue = deque(self._children[0].values())
        while queue:
            state = queue.popleft()
            suffix = self._suffix[state]
            if not self._match_length[state]:
                self._match_length[state] = self._match_length[suffix]
            for char, child in self._children[state].items():
                self._suffix[child] = self._step(suffix, char)
                queue.append(child)

    def _step(self, state: int, char: str) -> int:
        """Return the state that `char` leads to from `state`."""
        while state and char not in self._children[state]:
            state = self._suffix[state]
        children = self._children[state]
        return children.get(char, 0)
