"""Automatic draft length: the number of drafts per round that maximizes tokens per second.

The host chooses the number of forward rows of a round. The device assigns these rows to the drafts
that are most likely to be accepted (kernels/round.cu). Both decisions depend on past rounds only,
never on the drafts that may be cut, so the distribution of outputs does not change.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from graft.models.round.ema import Ema

__all__ = ["DraftBudget", "draft_lengths"]

LOG = logging.getLogger("graft")

#: Weight of the old value in a moving average.
DECAY = 0.8
#: Acceptance probability of a draft before any has been verified.
INITIAL_ACCEPTANCE = 0.7
#: Rounds of a bucket between two decisions.
DECISION_INTERVAL = 8
#: Minimum ratio of rates for which another length is chosen.
MIN_GAIN = 1.05
#: The last EXPLORATION_ROUNDS of every EXPLORATION_PERIOD rounds use a neighbouring length.
EXPLORATION_PERIOD = 64
EXPLORATION_ROUNDS = 4


def draft_lengths(max_drafts: int) -> list[int]:
    """Return the draft lengths for which graphs are built: 0, 1, 3, 7, ..., and `max_drafts`.

    The number of forward rows per request doubles from one to the next.
    """
    powers = [(1 << i) - 1 for i in range(max_drafts.bit_length())]
    return [*(length for length in powers if length < max_drafts), max_drafts]


class DraftBudget:
    """Chooses the draft length of each round.

    The draft length of a round is its number of forward rows for drafts per row of the bucket. A
    request with K drafts is expected to get ``1 + s_1 + ... + s_K`` tokens, where ``s_j`` is the
    product of the acceptance probabilities of drafts 1 to j, each given that the previous drafts
    were accepted. Rows are assigned where s is greatest.

    An acceptance probability is a moving average over the rounds of a request and starts at the
    average of all requests. A draft that was not generated counts as rejected; one that could not
    be generated is assumed to be as likely as the previous one. For trees, j is the depth, and each
    length has its own probabilities, because fewer drafts are another tree.

    Times are moving averages of real rounds, because grammars, long contexts and host drafters
    delay rounds in ways that no profile predicts. A length that has not run yet is assumed to take
    the time of an idle replay, scaled like the other lengths.

    Parameters
    ----------
    lengths
        Available lengths in ascending order. With a single one nothing is measured.
    max_depth
        Maximum number of drafts that a round can accept.
    is_tree
        Whether drafts are a tree.
    """

    def __init__(self, lengths: Sequence[int], max_depth: int, is_tree: bool = False):
        self.lengths = tuple(lengths)
        self._is_tree = is_tree
        # Acceptance probabilities of all requests: [lengths (1 for a chain), depth]; NaN: unknown.
        self._overall = np.full((len(self.lengths) if is_tree else 1, max_depth), np.nan)
        self._by_request: WeakKeyDictionary[object, NDArray[np.float64]] = WeakKeyDictionary()
        self._idle_ns: dict[tuple[int, int], float] = {}  # by bucket and length
        self._round_ns: dict[tuple[int, int], Ema] = {}
        self._chosen: dict[int, int] = {}  # index into lengths, by bucket
        self._num_rounds: Counter[int] = Counter()  # by bucket
        self._reported_zero = False

    def record_time(self, bucket: int, length: int, ns: int, idle: bool) -> None:
        """Record the time of a completed replay.

        Parameters
        ----------
        bucket
            Batch rows of the replay.
        length
            Draft length.
        ns
            Time in nanoseconds.
        idle
            Whether the replay had no requests.
        """
        key = (bucket, length)
        ns = max(ns, 1)
        if idle:  # the first replay also loads lazily loaded modules: take the minimum
            self._idle_ns[key] = min(ns, self._idle_ns.get(key, ns))
        else:
            self._round_ns.setdefault(key, Ema(1 - DECAY)).update(ns)

    def drafts_to_generate(self, bucket: int, length: int) -> int:
        """Return the maximum number of drafts that a round of this length generates per request.

        It is the next greater length, so that the rows can go to the requests that benefit.
        """
        if bucket == 1 or length == 0:
            return length
        index = self.lengths.index(length)
        return self.lengths[min(index + 1, len(self.lengths) - 1)]

    def record_acceptance(
        self,
        request: object,
        bucket: int,
        length: int,
        capacity: int,
        num_known: int,
        accepted: int,
    ) -> None:
        """Record how many drafts of a request were accepted in a round.

        Parameters
        ----------
        request
            The request.
        bucket, length
            Batch rows and draft length of the round.
        capacity
            Maximum number of drafts that the previous round could generate.
        num_known
            Number of drafts whose outcome is known: those that were not cut.
        accepted
            Number of accepted drafts.
        """
        if len(self.lengths) == 1:
            return
        row = 0
        if self._is_tree:
            if capacity != self.drafts_to_generate(bucket, length):
                return
            row = self.lengths.index(length)
            num_known = capacity
        num_tested = min(num_known, self._overall.shape[1], accepted + 1)
        own = self._by_request.setdefault(request, self._overall.copy())
        if num_tested == 0:
            return
        for averages in (self._overall, own):
            probs = averages[row, :num_tested]
            if np.isnan(probs[-1]):
                probs[:] = _fill_unknown(probs)
            probs *= DECAY
            probs[:accepted] += 1 - DECAY

    def choose(self, bucket: int, requests: Sequence[object]) -> int:
        """Return the draft length of the next round of `requests` in a bucket."""
        if len(self.lengths) == 1:
            return self.lengths[0]
        number = self._num_rounds[bucket]
        self._num_rounds[bucket] += 1
        if number % DECISION_INTERVAL == 0:
            self._decide(bucket, requests)
        index = self._chosen[bucket]
        if number % EXPLORATION_PERIOD >= EXPLORATION_PERIOD - EXPLORATION_ROUNDS:
            # Explore a longer one and a shorter one alternately.
            step = -1 if number // EXPLORATION_PERIOD % 2 else 1
            if not 0 <= index + step < len(self.lengths):
                step = -step
            index += step
        return self.lengths[index]

    def _decide(self, bucket: int, requests: Sequence[object]) -> None:
        """Choose the length with the highest rate, unless the current one is nearly as good."""
        rates = self.expected_rates(bucket, requests)
        best = rates.index(max(rates))
        current = self._chosen.get(bucket, best)
        if rates[best] < MIN_GAIN * rates[current]:
            best = current
        self._chosen[bucket] = best
        if self.lengths[best] == 0 and not self._reported_zero:
            self._reported_zero = True
            LOG.info(
                "speculation does not pay off for batches of %d: continuing without drafts, with "
                "occasional attempts (reported once; see stats.rounds_by_length)",
                bucket,
            )

    def expected_rates(self, bucket: int, requests: Sequence[object]) -> list[float]:
        """Return the expected tokens per nanosecond for each length."""
        keys = [(bucket, length) for length in self.lengths]
        probs = [self._by_request.get(request, self._overall) for request in requests]
        # [requests, lengths (1 for a chain), depth]
        survival = np.cumprod(_fill_unknown(np.stack(probs)), axis=2)
        times = self._expected_times(keys)
        rates = []
        for index, key in enumerate(keys):
            row = index if self._is_tree else 0
            expected = survival[:, row, : self.drafts_to_generate(*key)]
            if not self._is_tree:
                num_rows = bucket * key[1]
                expected = np.sort(expected, axis=None)[::-1][:num_rows]
            rates.append((len(requests) + float(expected.sum())) / times[index])
        return rates

    def _expected_times(self, keys: Sequence[tuple[int, int]]) -> list[float]:
        """Return the expected round time in nanoseconds for each (bucket, length)."""
        measured: dict[tuple[int, int], float] = {}
        for key in keys:
            average = self._round_ns.get(key)
            if average is not None and average.value is not None:
                measured[key] = average.value
        scale = 1.0
        if measured:
            scale = sum(measured.values()) / sum(self._idle_ns[key] for key in measured)
        return [measured[key] if key in measured else scale * self._idle_ns[key] for key in keys]


def _fill_unknown(probs: NDArray[np.float64]) -> NDArray[np.float64]:
    """Replace each NaN of an array [..., depth] by the value of the previous depth."""
    columns = [np.full(probs.shape[:-1], INITIAL_ACCEPTANCE)]
    for column in np.moveaxis(probs, -1, 0):
        columns.append(np.where(np.isnan(column), columns[-1], column))
    return np.stack(columns[1:], axis=-1)
