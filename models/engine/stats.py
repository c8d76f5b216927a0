"""Counters of an engine: what a researcher wants to know about its rounds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class EngineStats:
    """Sums since the engine was built or `reset_stats` was called.

    Attributes
    ----------
    rounds, rounds_by_length : replays that carried at least one request; by the places for
        drafts that each had per row of its bucket.
    joins : how often a request joined.
    row_rounds : (request, round) pairs; `stalls` of them committed nothing.
    stale_rows, surplus_tokens : rows read after their request had left, and the tokens they
        brought, which were discarded: what it costs to launch a round before reading the last.
    preemptions : times a request was preempted.
    tokens : tokens committed by rounds.
    tested, accepted : per draft position, or level of a tree, how often a draft was tested and
        accepted.
    forced_tokens : drafts that the grammar forced and verification accepted; brought up to date at
        the end of `generate` and by `Engine.counters`.
    speculated_rounds, speculated_tokens : the (request, round) pairs that tested at least one draft
        and the tokens they committed, from which the acceptance length is taken.
    round_ns : nanoseconds of all replays on the device's clock, as of when each was read.
    part_ns : the same per part of the round, with the option `timeline`.
    """

    draft_length: int = 0
    rounds: int = 0
    rounds_by_length: Counter[int] = field(default_factory=Counter)
    joins: int = 0
    row_rounds: int = 0
    stalls: int = 0
    stale_rows: int = 0
    surplus_tokens: int = 0
    preemptions: int = 0
    tokens: int = 0
    forced_tokens: int = 0
    speculated_rounds: int = 0
    speculated_tokens: int = 0
    tested: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    round_ns: int = 0
    part_ns: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tested = [0] * self.draft_length
        self.accepted = [0] * self.draft_length

    def count_row(self, count: int, tested: int, accepted: int) -> None:
        """Add one request's share of one round."""
        self.row_rounds += 1
        self.tokens += count
        if count == 0:
            self.stalls += 1
        elif tested > 0:
            self.speculated_rounds += 1
            self.speculated_tokens += count
        # A walk tests one draft more than it accepts, unless it ran out of drafts.
        for j in range(min(tested, accepted + 1, self.draft_length)):
            self.tested[j] += 1
            self.accepted[j] += j < accepted

    def count_stale(self, count: int) -> None:
        """Add a row whose request had left."""
        self.stale_rows += 1
        self.surplus_tokens += count

    @property
    def tokens_per_round(self) -> float:
        """Tokens committed per request and round."""
        return self.tokens / self.row_rounds if self.row_rounds else 0.0

    @property
    def acceptance_length(self) -> float:
        """Mean tokens of a round that tested drafts: accepted drafts plus the bonus token."""
        return self.speculated_tokens / self.speculated_rounds if self.speculated_rounds else 0.0

    @property
    def acceptance(self) -> list[float]:
        """Per draft position, the share of tested drafts that was accepted."""
        return [a / t if t else 0.0 for a, t in zip(self.accepted, self.tested, strict=True)]

    @property
    def exposed_share(self) -> float | None:
        """The share of all rounds' time for which the model stood still for the grammar; None
        without the option `timeline`."""
        if not self.part_ns:
            return None
        exposed = sum(ns for name, ns in self.part_ns.items() if name.startswith("wait for"))
        return exposed / self.round_ns if self.round_ns else 0.0

    @property
    def part_share(self) -> dict[str, float]:
        """Per part of the round, its share of the time of all parts."""
        total = sum(self.part_ns.values())
        return {name: ns / total if total else 0.0 for name, ns in self.part_ns.items()}

    def as_dict(self) -> dict[str, Any]:
        """Everything, derived figures included, ready for JSON."""
        return vars(self) | {
            "tokens_per_round": self.tokens_per_round,
            "acceptance_length": self.acceptance_length,
            "acceptance": self.acceptance,
            "part_share": self.part_share,
            "exposed_share": self.exposed_share,
        }
