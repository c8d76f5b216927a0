"""Counters of the modes of rounds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from graft.models.round.round import RoundGraph

__all__ = ["ModeStats"]


@dataclass(kw_only=True)
class ModeStats:
    """Counters of the modes in which rounds were run, see `LaunchModes`.

    Attributes
    ----------
    rounds
        Number of rounds with at least one request.
    rounds_by_length
        Number of rounds for each number of drafts per batch row.
    launches
        Number of launches of graphs for these rounds. Without generation loops, it equals `rounds`.
    rounds_by_grammar
        Number of rounds for each place of grammar steps, see `GraphKey.grammar`.
    rounds_by_mode
        Number of rounds for each mode, see `RoundGraph.mode`.
    """

    rounds: int = 0
    rounds_by_length: Counter[int] = field(default_factory=Counter)
    launches: int = 0
    rounds_by_grammar: Counter[str] = field(default_factory=Counter)
    rounds_by_mode: Counter[str] = field(default_factory=Counter)

    def count_round(self, graph: RoundGraph) -> None:
        """Count a round of a graph."""
        self.rounds += 1
        self.rounds_by_length[graph.drafts] += 1
        self.rounds_by_grammar[graph.grammar] += 1
        self.rounds_by_mode[graph.mode] += 1
