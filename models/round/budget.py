"""How many drafts a round tests and makes: as many as bring most tokens per second.

Chosen here is how many rows the target's forward has; whose drafts have a place among them is
chosen on the device (kernels/round.cu), by how often drafts of each request were accepted. Both are
chosen from past rounds, never from the drafts that may be cut. So outputs keep their
distribution.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

__all__ = ["DraftBudget", "ladder"]

LOG = logging.getLogger("graft")
#: What an average keeps of its old value, and a draft's chance before any was tested.
DECAY = 0.8
FIRST = 0.7
#: Rounds of a bucket between two choices, and how much better another length must be.
HOLD = 8
GAIN = 1.05
#: The last PROBE rounds of every PERIOD try another length than the chosen one.
PERIOD = 64
PROBE = 4


def ladder(most: int) -> list[int]:
    """Lengths that have graphs of their own: 0, 1, 3, 7 and so on, and the most. Rows double."""
    return [*(n for n in ((1 << i) - 1 for i in range(most.bit_length())) if n < most), most]


class DraftBudget:
    """Chooses the draft length of each round.

    A length is the places for drafts that a round has per row of its bucket. A request with K of
    them is expected to get ``1 + s_1 + .. + s_K`` tokens, where s_j is the product of the chances
    that drafts 1 to j are accepted if those before are; places go where s is largest. A chance is
    an exponential average over the request's rounds, which begins with that of all requests; a
    draft that was not made counts as refused, one that could not be as likely as the one before.
    Where drafts branch, fewer are another tree: each length has chances of its own, with the places
    that it gives, and j is the depth.

    Times are exponential averages of live rounds: no profile knows how grammars, long contexts and
    drafters on the host delay them. A length that has not run yet takes as long as an idle replay,
    scaled like those that have.

    Parameters
    ----------
    lengths : those there are graphs for, ascending; with a lone one nothing is measured.
    levels : most drafts that a round can have accepted.
    branches : whether drafts branch.
    """

    def __init__(self, lengths: Sequence[int], levels: int, branches: bool = False):
        self.lengths = tuple(lengths)
        self._branches = branches
        self._all = np.full((len(self.lengths) if branches else 1, levels), np.nan)
        self._of: WeakKeyDictionary[object, NDArray[np.float64]] = WeakKeyDictionary()
        self._idle: dict[tuple[int, int], float] = {}  # by bucket and length
        self._live: dict[tuple[int, int], float] = {}
        self._chosen: dict[int, int] = {}  # by bucket, place among the lengths
        self._rounds: Counter[int] = Counter()  # by bucket
        self._told = False

    def took(self, size: int, length: int, ns: int, idle: bool) -> None:
        """Take the time of a replay of bucket `size` that is over; idle: nobody sat in it."""
        key = (size, length)
        ns = max(ns, 1)
        if idle:  # the first one also loads what is loaded lazily
            self._idle[key] = min(ns, self._idle.get(key, ns))
        else:
            self._live[key] = DECAY * self._live.get(key, ns) + (1 - DECAY) * ns

    def made(self, size: int, length: int) -> int:
        """Drafts to make per request in a round of this length: more than the round after it has
        places for on average, so that they can go where they pay."""
        at = self.lengths.index(length)
        return self.lengths[min(at + 1, len(self.lengths) - 1)] if size > 1 and length else length

    def brought(
        self, request: object, size: int, length: int, made: int, known: int, accepted: int
    ) -> None:
        """Take how many drafts of a request were accepted in a round of this bucket and length; up
        to `made` could have been made before, and of `known` it is known what became of them."""
        if len(self.lengths) == 1 or (self._branches and made != self.made(size, length)):
            return
        at = self.lengths.index(length)
        known = made if self._branches else known
        tested = min(known, self._all.shape[1], accepted + 1)
        own = self._of.setdefault(request, self._all.copy())
        for every in (self._all, own) if tested else ():
            chances = every[at if self._branches else 0, :tested]
            if np.isnan(chances[-1]):
                chances[:] = _known(chances)
            chances *= DECAY
            chances[:accepted] += 1 - DECAY

    def choose(self, size: int, requests: Sequence[object]) -> int:
        """The length of the next round, of `requests` in bucket `size`."""
        if len(self.lengths) == 1:
            return self.lengths[0]
        number = self._rounds[size]
        self._rounds[size] += 1
        if number % HOLD == 0:
            self._decide(size, requests)
        at = self._chosen[size]
        if number % PERIOD >= PERIOD - PROBE:  # a longer one, the next time a shorter one
            step = -1 if number // PERIOD % 2 else 1
            at += step if 0 <= at + step < len(self.lengths) else -step
        return self.lengths[at]

    def _decide(self, size: int, requests: Sequence[object]) -> None:
        rates = self.rates(size, requests)
        best = rates.index(max(rates))
        if rates[best] < GAIN * rates[self._chosen.get(size, best)]:
            best = self._chosen.get(size, best)
        self._chosen[size] = best
        if self.lengths[best] == 0 and not self._told:
            self._told = True
            LOG.info(
                "drafts do not pay in rounds of %d: these go on without, and try now and "
                "then (told once; see stats.rounds_by_length)",
                size,
            )

    def rates(self, size: int, requests: Sequence[object]) -> list[float]:
        """Tokens per nanosecond that rounds of each length are expected to bring."""
        keys = [(size, length) for length in self.lengths]
        ran = [key for key in keys if key in self._live]
        idle = sum(self._idle[key] for key in ran)
        live = sum(self._live[key] for key in ran)
        scale = live / idle if ran else 1.0
        chances = _known(np.stack([self._of.get(request, self._all) for request in requests]))
        survival = np.cumprod(chances, axis=2)
        rates = []
        for at, key in enumerate(keys):
            each = survival[:, at if self._branches else 0, : self.made(*key)]
            best = each if self._branches else np.sort(each, axis=None)[::-1][: size * key[1]]
            time = self._live.get(key, scale * self._idle[key])
            rates.append((len(requests) + float(best.sum())) / time)
        return rates


def _known(chances: NDArray[np.float64]) -> NDArray[np.float64]:
    """The same, [.., drafts], with those before in the place of what is not known."""
    known = [np.full(chances.shape[:-1], FIRST)]
    for chance in np.moveaxis(chances, -1, 0):
        known.append(np.where(np.isnan(chance), known[-1], chance))
    return np.stack(known[1:], axis=-1)
