"""Automatic draft length: choose the number of drafts per round that maximizes tokens per second.

The rate of a draft length is its expected acceptance length, which is the number of tokens that a
request gets per round, divided by the measured time of a round.

The host chooses the draft length of a round, which also determines the number of forward rows. The
device assigns these rows to the drafts that are most likely to be accepted (kernels/round.cu). A
draft without a row is cut, which means that it is not verified. Both decisions depend on past
rounds only, never on the drafts that may be cut, so the distribution of outputs does not change.

A *bucket* is a number of batch rows for which graphs are built; there is one graph per bucket and
draft length.
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

#: Weight of the old value in the moving averages of acceptance probabilities and round times.
DECAY = 0.8
#: Acceptance probability of a draft before any has been verified.
INITIAL_ACCEPTANCE = 0.7
#: Number of rounds of a bucket after which its draft length is chosen again.
DECISION_INTERVAL = 8
#: The draft length changes only if the rate of the best length is at least this many times the rate
#: of the current one.
MIN_GAIN = 1.05
#: The last EXPLORATION_ROUNDS of every EXPLORATION_PERIOD launches use the next longer or the next
#: shorter draft length instead of the best one, to measure its rate.
EXPLORATION_PERIOD = 64
EXPLORATION_ROUNDS = 4


def draft_lengths(max_drafts: int) -> list[int]:
    """Return the draft lengths for which graphs are built: 0, 1, 3, 7, ..., and `max_drafts`.

    The number of forward rows per request, 1 + length, doubles from one length to the next.
    """
    lengths = []
    length = 0
    while length < max_drafts:
        lengths.append(length)
        length = 2 * length + 1
    lengths.append(max_drafts)
    return lengths


class DraftBudget:
    """Chooses the draft length of each round.

    The draft length of a round is its average number of drafts per batch row: a round of B batch
    rows with length L verifies at most B * L drafts, but a request may have more or fewer than L.

    A request with K drafts is expected to get ``1 + s_1 + ... + s_K`` tokens in a round. Here
    ``s_j`` is the probability that drafts 1 to j are all accepted: the product of their acceptance
    probabilities, each conditional on the acceptance of the previous drafts. A round verifies the
    drafts with the greatest ``s_j`` of all its requests.

    An acceptance probability is a moving average over the rounds of a request. It starts at the
    average of all requests. If the drafter generated fewer drafts than it could have, the missing
    drafts count as rejected. If draft j has never been generated, its probability is assumed to be
    that of draft j - 1. For trees, j is the depth, and each draft length has its own probabilities,
    because a tree with fewer drafts has another shape.

    Round times are moving averages of measured rounds, because grammars, long contexts and host
    drafters delay rounds in ways that a profile of the graph does not show. The time of a length
    that has not run yet is estimated from the time of its idle replay (a replay without requests),
    multiplied by the ratio of measured times to idle times of the other lengths.

    Parameters
    ----------
    lengths
        Available lengths in ascending order. If there is a single length, nothing is measured.
    max_depth
        Maximum number of drafts that a round can accept.
    is_tree
        Whether drafts are a tree.
    """

    def __init__(self, lengths: Sequence[int], max_depth: int, is_tree: bool = False):
        self.lengths = tuple(lengths)
        self._is_tree = is_tree
        # Acceptance probabilities averaged over all requests, [tables, depth]; NaN if never
        # measured. A tree has one table per draft length, a chain one table for all lengths.
        num_tables = len(self.lengths) if is_tree else 1
        self._overall = np.full((num_tables, max_depth), np.nan)
        self._by_request: WeakKeyDictionary[object, NDArray[np.float64]] = WeakKeyDictionary()
        self._idle_ns: dict[tuple[int, int], float] = {}  # by bucket and length
        self._round_ns: dict[tuple[int, int], Ema] = {}
        self._chosen: dict[int, int] = {}  # index into lengths, by bucket
        # For each bucket, the number of launches, and the number of rounds completed since the
        # draft length was last chosen.
        self._num_launches: Counter[int] = Counter()
        self._undecided_rounds: Counter[int] = Counter()
        self._reported_zero = False

    def record_time(self, bucket: int, length: int, ns: int, idle: bool) -> None:
        """Record the time of a completed replay.

        Parameters
        ----------
        bucket
            Batch rows of the replay.
        length
            Draft length of the replay.
        ns
            Time in nanoseconds.
        idle
            Whether the replay had no requests.
        """
        key = (bucket, length)
        ns = max(ns, 1)
        if idle:
            # Keep the shortest time of the replays without requests. The first replay of a graph
            # takes longer than the others, because the driver then loads the kernels' modules.
            known = self._idle_ns.get(key, ns)
            self._idle_ns[key] = min(ns, known)
            return
        average = self._round_ns.setdefault(key, Ema(1 - DECAY))
        average.update(ns)
        self._undecided_rounds[bucket] += 1

    def drafts_to_generate(self, bucket: int, length: int) -> int:
        """Return the maximum number of drafts per request to generate for verification.

        A round with `length` verifies that many drafts per request on average. If the bucket has
        several batch rows, the result is the next greater length in `lengths`, if there is one, so
        that the device can verify more drafts of some requests and fewer of others.
        """
        if bucket == 1 or length == 0:
            return length
        last = len(self.lengths) - 1
        index = self.lengths.index(length)
        return self.lengths[min(index + 1, last)]

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
            Maximum number of drafts that the previous round could generate for this one.
        num_known
            Number of drafts that had a forward row in the round, so that their outcome is known.
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
        max_depth = self._overall.shape[1]
        # Verification ends at the first rejected draft, so the outcome of later drafts is unknown.
        num_tested = min(num_known, max_depth, accepted + 1)
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
        """Return the draft length of the next launch, a round or a loop of many rounds.

        The launch runs `requests` in a graph with `bucket` batch rows.
        """
        if len(self.lengths) == 1:
            return self.lengths[0]
        number = self._num_launches[bucket]
        self._num_launches[bucket] += 1
        is_due = self._undecided_rounds[bucket] >= DECISION_INTERVAL
        if is_due or number % DECISION_INTERVAL == 0:
            self._decide(bucket, requests)
            self._undecided_rounds[bucket] = 0
        index = self._chosen[bucket]
        period, position = divmod(number, EXPLORATION_PERIOD)
        if position >= EXPLORATION_PERIOD - EXPLORATION_ROUNDS:
            index = self._neighbour(index, longer=period % 2 == 0)
        return self.lengths[index]

    def _neighbour(self, index: int, longer: bool) -> int:
        """Return the index of the draft length after (`longer`) or before the one at `index`.

        At the end of the list, return the neighbour on the other side.
        """
        step = 1 if longer else -1
        neighbour = index + step
        if 0 <= neighbour < len(self.lengths):
            return neighbour
        return index - step

    def _decide(self, bucket: int, requests: Sequence[object]) -> None:
        """Choose the draft length with the highest expected number of tokens per nanosecond.

        The current length stays unless the best length is at least `MIN_GAIN` times as fast.
        """
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
        """Return the expected number of tokens per nanosecond for each draft length."""
        probs = [self._by_request.get(request, self._overall) for request in requests]
        # survival[i, l, j - 1] is s_j of request i for draft length l: the probability that drafts
        # 1 to j are all accepted. For a chain it is the same for all lengths, so l is always 0.
        survival = np.cumprod(_fill_unknown(np.stack(probs)), axis=2)
        times = self._expected_times([(bucket, length) for length in self.lengths])
        rates = []
        for index, length in enumerate(self.lengths):
            num_drafts = self.drafts_to_generate(bucket, length)
            if self._is_tree:
                accepted = survival[:, index, :num_drafts]
            else:
                # The rows of the round go to the drafts that are most likely to be accepted.
                best_first = np.sort(survival[:, 0, :num_drafts], axis=None)[::-1]
                accepted = best_first[: bucket * length]
            tokens = len(requests) + float(accepted.sum())
            rates.append(tokens / times[index])
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
            idle_ns = sum(self._idle_ns[key] for key in measured)
            scale = sum(measured.values()) / idle_ns
        times = []
        for key in keys:
            time = measured.get(key)
            if time is None:
                time = scale * self._idle_ns[key]
            times.append(time)
        return times


def _fill_unknown(probs: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return acceptance probabilities [..., depth] with each NaN replaced by the value before it.

    A NaN at depth 0 is replaced with `INITIAL_ACCEPTANCE`.
    """
    filled = probs.copy()
    previous = np.full(probs.shape[:-1], INITIAL_ACCEPTANCE)
    for depth in range(probs.shape[-1]):
        unknown = np.isnan(probs[..., depth])
        filled[..., depth] = np.where(unknown, previous, probs[..., depth])
        previous = filled[..., depth]
    return filled
