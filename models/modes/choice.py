"""Choice of the mode of each launch from measured times.

A *mode* is a way to run the rounds of a batch, such as one launch per round or a generation loop.
All modes give the same outputs, but the number of tokens per round may differ. A *bucket* contains
the launches whose times are comparable.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

__all__ = ["Bucket", "Launch", "ModeChoice"]

#: Number of rounds for which a mode is measured before modes are compared, and for which it is
#: measured again.
MEASURED_ROUNDS = 8
#: Number of latest rounds from which the costs of a mode are computed.
WINDOW = 32
#: Maximum share of the time of a bucket that modes other than the best one take.
EXPLORED_SHARE = 0.02
#: Minimum ratio of costs for which another mode is chosen.
MIN_GAIN = 1.03
#: Longer times are clamped to this multiple of the median, so that an outlier has little effect.
MAX_RATIO = 3.0
#: Number of rounds from which the tokens per round of a mode are computed.
TOKENS_WINDOW = 512
#: The mean number of tokens per round of the bucket counts as much as this number of rounds when
#: the tokens per round of a mode are estimated.
PRIOR_ROUNDS = 16
#: Maximum number of rounds of no mode while a mode is measured for the first time or again.
MAX_CHANGING_ROUNDS = 512
_MIN_TOKENS = 1e-3


class Bucket(NamedTuple):
    """Launches among whose modes one is chosen.

    Attributes
    ----------
    grammar
        Place of the grammar steps, one of `GRAMMAR_STEPS`; "none" if no request has a grammar;
        "promotion" for the choice of the place itself.
    batch
        Number of batch rows.
    drafts
        Number of drafts per batch row.
    loops
        Whether a loop was possible. It is not while a prompt is being prefilled, and the times of
        rounds do not contain the gaps between them then.
    """

    grammar: str
    batch: int
    drafts: int
    loops: bool = False


class Launch(NamedTuple):
    """How the mode of a launch was chosen.

    Attributes
    ----------
    bucket
        Bucket of the launch.
    num_modes
        Number of modes that were possible.
    promotion
        Place of the grammar steps by which promotion is judged: "host", "device" or "mixed"; None
        if the launch says nothing about promotion.
    """

    bucket: Bucket
    num_modes: int
    promotion: str | None = None


class _Mode:
    """Measurements of a mode in a bucket.

    Attributes
    ----------
    rounds
        Number of measured rounds.
    last
        Number of rounds of the bucket when the mode was measured last.
    samples
        Time in nanoseconds and number of tokens of the latest rounds.
    tokens_per_round
        Mean number of tokens of about `TOKENS_WINDOW` latest rounds.
    """

    def __init__(self) -> None:
        self.rounds = 0
        self.last = 0
        self.samples: deque[tuple[float, int]] = deque(maxlen=WINDOW)
        self.tokens_per_round = 0.0
        self._mean_ns: float | None = None

    @property
    def is_measured(self) -> bool:
        """Whether there are enough rounds for a comparison."""
        return self.rounds >= MEASURED_ROUNDS

    def add(self, ns: float, tokens: int) -> None:
        """Add a round."""
        self.samples.append((ns, tokens))
        self.rounds += 1
        weight = 1 / min(self.rounds, TOKENS_WINDOW)
        self.tokens_per_round += weight * (tokens - self.tokens_per_round)
        self._mean_ns = None

    @property
    def mean_ns(self) -> float:
        """Mean time of a round in nanoseconds, without the excess of outliers."""
        if self._mean_ns is None:
            times = [ns for ns, _ in self.samples]
            limit = MAX_RATIO * statistics.median(times)
            clamped = [min(ns, limit) for ns in times]
            self._mean_ns = statistics.fmean(clamped)
        return self._mean_ns


class _BucketChoice:
    """Choice among the modes of one bucket; see `ModeChoice`.

    Attributes
    ----------
    modes
        Measurements of all modes that were possible so far, by name.
    chosen
        Mode with the lowest cost; None while modes are measured for the first time.
    """

    def __init__(self) -> None:
        self.modes: dict[str, _Mode] = {}
        self.chosen: str | None = None
        self._rounds = 0
        # Mode that is being measured for the first time.
        self._measured: str | None = None
        # Modes whose first measurement ended without enough rounds.
        self._postponed: set[str] = set()
        # Mode that is being measured again, its number of rounds since then, and the number of
        # rounds of no mode.
        self._explored: str | None = None
        self._explored_rounds = 0
        self._changing_rounds = 0
        self._last_explored: str | None = None
        # Time that other modes than the chosen one may take now; negative if they took too much.
        self._credit_ns = 0.0

    def choose(self, names: Sequence[str]) -> str:
        for name in names:
            mode = self.modes.setdefault(name, _Mode())
            if mode.is_measured:
                self._postponed.discard(name)
            elif name not in self._postponed:
                self._measured = name
                return name
        self._measured = None
        measured = [name for name in names if name not in self._postponed]
        if not measured:
            return names[0]
        if self._explored_rounds >= MEASURED_ROUNDS:
            self._explored = None
        if self._explored is not None and self._explored in names:
            return self._explored
        self.chosen = self._best(measured)
        others = [name for name in names if name != self.chosen]
        oldest = min(others, key=self._last_round)
        # The time of a mode that has no rounds is unknown.
        expected = self.modes[oldest if self.modes[oldest].rounds else self.chosen]
        needed_ns = MEASURED_ROUNDS * expected.mean_ns
        if self._credit_ns < needed_ns:
            return self.chosen
        self._explored = oldest
        self._last_explored = oldest
        self._explored_rounds = 0
        self._changing_rounds = 0
        return oldest

    def _best(self, names: Sequence[str]) -> str:
        """Return the mode with the lowest cost, or the chosen one if it is nearly as good."""
        best = min(names, key=self.cost)
        if self.chosen is None or self.chosen not in names:
            return best
        is_better = MIN_GAIN * self.cost(best) < self.cost(self.chosen)
        return best if is_better else self.chosen

    def _last_round(self, name: str) -> int:
        return self.modes[name].last

    def record(self, name: str, ns: float, tokens: int) -> None:
        mode = self.modes.get(name)
        if mode is None:
            return
        mode.add(ns, tokens)
        if name == self._measured:
            self._changing_rounds = 0
        self._rounds += 1
        mode.last = self._rounds
        self._credit_ns += EXPLORED_SHARE * mode.mean_ns
        if name == self._explored:
            self._explored_rounds += 1
        if name == self._last_explored and name != self.chosen:
            self._credit_ns -= ns

    def record_change(self, ns: float) -> None:
        if self._explored is None and self._measured is None:
            return
        self._credit_ns -= ns
        self._changing_rounds += 1
        if self._changing_rounds < MAX_CHANGING_ROUNDS:
            return
        self._changing_rounds = 0
        self._explored = None
        if self._measured is not None:
            self._postponed.add(self._measured)

    def cost(self, name: str) -> float:
        """Return the time of a mode per token, in nanoseconds."""
        mode = self.modes[name]
        return mode.mean_ns / self._tokens_per_round(mode)

    def _tokens_per_round(self, mode: _Mode) -> float:
        """Return the estimated number of tokens per round of a mode."""
        latest = [tokens for other in self.modes.values() for _, tokens in other.samples]
        rounds = min(mode.rounds, TOKENS_WINDOW)
        tokens = rounds * mode.tokens_per_round + PRIOR_ROUNDS * statistics.fmean(latest)
        return max(tokens / (rounds + PRIOR_ROUNDS), _MIN_TOKENS)

    def summary(self, name: str) -> dict[str, float]:
        """Return the measurements of a mode."""
        mode = self.modes[name]
        if not mode.rounds:
            return {"rounds": 0}
        return {
            "rounds": mode.rounds,
            "round_us": 1e-3 * mode.mean_ns,
            "tokens_per_round": mode.tokens_per_round,
            "us_per_token": 1e-3 * self.cost(name),
        }

    def reason(self) -> str:
        """Return one sentence that explains the choice."""
        if self.chosen is None:
            missing = [name for name, mode in self.modes.items() if not mode.is_measured]
            return f"measuring {', '.join(missing or self.modes)}"
        names = [self.chosen]
        names += [name for name in self.modes if name != self.chosen]
        texts = []
        for name in names:
            mode = self.modes[name]
            if mode.rounds:
                us = 1e-3 * self.cost(name)
                texts.append(f"{name}: {us:.1f} us per token ({mode.rounds} rounds)")
        return "; ".join(texts)


class ModeChoice:
    """Chooses the mode of each launch so that the time per committed token is lowest.

    Each mode of a bucket is measured for `MEASURED_ROUNDS` rounds when it is first possible. After
    that, the mode with the lowest cost is chosen. The current mode is kept unless another one is
    better by `MIN_GAIN`. The other modes are measured again from time to time, for
    `MEASURED_ROUNDS` rounds each, so that the choice follows the load. This takes at most
    `EXPLORED_SHARE` of the time. A measurement, also the first one, ends after
    `MAX_CHANGING_ROUNDS` rounds of no mode.

    The cost of a mode is the mean time of its latest rounds divided by its tokens per round. The
    number of tokens of a few rounds is mostly chance. It is therefore averaged over many rounds
    and, while there are few, with the latest rounds of all modes of the bucket.
    """

    def __init__(self) -> None:
        self._buckets: dict[Bucket, _BucketChoice] = {}

    def choose(self, bucket: Bucket, modes: Sequence[str]) -> str:
        """Return the mode of the next launch.

        Parameters
        ----------
        bucket
            Bucket of the launch.
        modes
            Names of the possible modes, at least one. A single mode is not measured.
        """
        if len(modes) == 1:
            return modes[0]
        return self._buckets.setdefault(bucket, _BucketChoice()).choose(modes)

    def record(self, bucket: Bucket, mode: str, ns: float, tokens: int) -> None:
        """Record a round.

        Parameters
        ----------
        bucket, mode
            Bucket and mode of the launch.
        ns
            Time of the round in nanoseconds, including the time until the next round of the mode
            if nothing else delayed it.
        tokens
            Number of tokens committed to all requests.
        """
        choice = self._buckets.get(bucket)
        if choice is not None:
            choice.record(mode, ns, tokens)

    def record_change(self, bucket: Bucket, ns: float) -> None:
        """Record a round of no mode: only some requests run in the mode that was chosen last.

        Parameters
        ----------
        bucket
            Bucket of the launch.
        ns
            Time of the round in nanoseconds.
        """
        choice = self._buckets.get(bucket)
        if choice is not None:
            choice.record_change(ns)

    def report(self) -> list[dict[str, Any]]:
        """Return the measurements of all buckets, convertible to JSON.

        Returns
        -------
        list of dict
            For each bucket: the fields of `Bucket`; "chosen", the mode with the lowest cost, or
            None while modes are measured for the first time; "reason", a sentence; and "modes", for
            each mode its number of rounds, the averages of its latest rounds, and as "us_per_token"
            the estimated cost by which the modes are compared.
        """
        reports = []
        for bucket, choice in self._buckets.items():
            report = bucket._asdict()
            report["chosen"] = choice.chosen
            report["reason"] = choice.reason()
            report["modes"] = {name: choice.summary(name) for name in choice.modes}
            reports.append(report)
        return reports
