"""Engine counters: rounds, tokens, acceptance, preemption and device time."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from graft.models.round.round import RoundGraph

__all__ = ["EngineStats"]


@dataclass(kw_only=True)
class EngineStats:
    """Counters since the engine was created or `Engine.reset_stats` was called.

    A *row round* is one round of one request. A round with four requests counts as four row rounds.

    Parameters
    ----------
    draft_length
        Maximum number of drafts of a round that can be accepted.

    Attributes
    ----------
    rounds
        Number of rounds with at least one request.
    rounds_by_length
        Number of rounds for each number of drafts per batch row.
    rounds_by_kind
        Number of rounds for each kind of graph, see `GraphKey.kind`.
    launches
        Number of launches of graphs for these rounds. Without generation loops, it equals `rounds`.
    loops
        Number of these launches that were generation loops.
    joins
        Number of times a request got a slot.
    row_rounds
        Number of row rounds.
    stalls
        Number of row rounds in which no token was committed.
    stale_rows
        Number of batch rows whose request had left its slot before the host read the results of the
        row. Such rows occur because a round is launched before the host has read the results of the
        previous round.
    surplus_tokens
        Number of tokens in stale rows. They were discarded.
    preemptions
        Number of preemptions.
    tokens
        Number of committed tokens.
    tested, accepted
        Number of drafts verified and accepted, for each draft position or tree depth.
    forced_tokens
        Number of accepted drafts that the grammar forced. The number is updated at the end of
        `Engine.generate` and by `Engine.counters`.
    speculated_rounds
        Number of row rounds in which at least one draft was verified and a token was committed.
    speculated_tokens
        Number of tokens committed in the `speculated_rounds`.
    round_ns
        Device time in nanoseconds of all rounds that the host knows to be complete.
    part_ns
        Device time in nanoseconds for each part of a round; empty without the option `timeline`.
    """

    draft_length: int = 0
    rounds: int = 0
    rounds_by_length: Counter[int] = field(default_factory=Counter)
    rounds_by_kind: Counter[str] = field(default_factory=Counter)
    launches: int = 0
    loops: int = 0
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

    def count_round(self, graph: RoundGraph) -> None:
        """Count a round of a graph."""
        self.rounds += 1
        self.rounds_by_length[graph.drafts] += 1
        self.rounds_by_kind[graph.kind] += 1

    def count_row(self, count: int, tested: int, accepted: int) -> None:
        """Count one round of one request.

        Parameters
        ----------
        count
            Number of committed tokens.
        tested, accepted
            Number of drafts verified and accepted.
        """
        self.row_rounds += 1
        self.tokens += count
        if count == 0:
            self.stalls += 1
        elif tested > 0:
            self.speculated_rounds += 1
            self.speculated_tokens += count
        # Verification stops at the first rejected draft. Later drafts do not count as tested.
        num_tested = min(tested, accepted + 1, self.draft_length)
        for position in range(num_tested):
            self.tested[position] += 1
            if position < accepted:
                self.accepted[position] += 1

    def count_stale(self, count: int) -> None:
        """Count a batch row whose request has left its slot, and the row's `count` tokens."""
        self.stale_rows += 1
        self.surplus_tokens += count

    @property
    def tokens_per_round(self) -> float:
        """Mean number of committed tokens per round of a request."""
        return _ratio(self.tokens, self.row_rounds)

    @property
    def acceptance_length(self) -> float:
        """Mean number of committed tokens, with the bonus token, of the `speculated_rounds`."""
        return _ratio(self.speculated_tokens, self.speculated_rounds)

    @property
    def acceptance(self) -> list[float]:
        """Acceptance rate for each draft position or tree depth."""
        rates = []
        for accepted, tested in zip(self.accepted, self.tested, strict=True):
            rates.append(_ratio(accepted, tested))
        return rates

    @property
    def exposed_share(self) -> float | None:
        """Fraction of the round time in which forward passes and sampling waited for the grammar.

        None without the option `timeline`. The grammar steps of a round run concurrently with the
        model's kernels. The fraction counts only the time for which a kernel had to wait for a
        step.
        """
        if not self.part_ns:
            return None
        exposed = 0
        for name, ns in self.part_ns.items():
            if name.startswith("wait for"):
                exposed += ns
        return _ratio(exposed, self.round_ns)

    @property
    def part_share(self) -> dict[str, float]:
        """Time of each part of a round as a fraction of the time of all parts."""
        total = sum(self.part_ns.values())
        return {name: _ratio(ns, total) for name, ns in self.part_ns.items()}

    def as_dict(self) -> dict[str, Any]:
        """Return all counters and derived values, convertible to JSON."""
        return vars(self) | {
            "tokens_per_round": self.tokens_per_round,
            "acceptance_length": self.acceptance_length,
            "acceptance": self.acceptance,
            "part_share": self.part_share,
            "exposed_share": self.exposed_share,
        }


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
