"""Which of several engines a prompt goes to."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import takewhile

from graft.tools.serve.driver import Facts


class Router:
    """Which engine a prompt goes to: where most pages of its beginning have been before, then where
    least is to do; but to none that is a batch behind the idlest.

    Parameters
    ----------
    count : of engines.
    facts : of each: an engine is thought to keep as many pages as its cache has.
    """

    def __init__(self, count: int, facts: Facts):
        self._facts = facts
        self._known: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(count)]

    def keys(self, tokens: Sequence[int]) -> list[int]:
        """A chain of hashes, one for each whole page behind which a token is left."""
        size = self._facts.page_size
        keys = [0]
        for end in range(size, len(tokens), size):
            part = repr(tokens[end - size : end])  # what is no token yet has no hash
            keys.append(hash((keys[-1], part)))
        return keys[1:]

    def choose(self, keys: Sequence[int], loads: Mapping[int, int]) -> int:
        """One of the engines, which have so many requests each, for a prompt with these keys."""
        idlest = min(loads.values())

        def rank(number: int) -> tuple[int, int]:
            known = self._known[number]
            return -sum(1 for _ in takewhile(known.__contains__, keys)), loads[number]

        chosen = min((n for n, load in loads.items() if load - idlest < self._facts.rows), key=rank)
        known = self._known[chosen]
        for key in reversed(keys):  # the beginning is the last to be forgotten
            known[key] = None
            known.move_to_end(key)
        while len(known) > self._facts.pages:
            known.popitem(last=False)
        return chosen

    def forget(self, number: int) -> None:
        """An engine begins anew, with an empty cache."""
        self._known[number].clear()
