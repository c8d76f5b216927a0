"""Counters of the modes of rounds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from graft.models.modes.choice import ModeChoice
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
    late_promotions
        Number of requests whose grammar steps moved to the device while they were running, see
        `DeviceAutomata`.
    choice
        Chooses the modes from measured times. Its measurements are kept when the counters are
        reset.
    """

    rounds: int = 0
    rounds_by_length: Counter[int] = field(default_factory=Counter)
    launches: int = 0
    rounds_by_grammar: Counter[str] = field(default_factory=Counter)
    rounds_by_mode: Counter[str] = field(default_factory=Counter)
    late_promotions: int = 0
    choice: ModeChoice = field(default_factory=ModeChoice, repr=False)

    def count_round(self, graph: RoundGraph) -> None:
        """Count a round of a graph."""
        self.rounds += 1
        self.rounds_by_length[graph.drafts] += 1
        self.rounds_by_grammar[graph.grammar] += 1
        self.rounds_by_mode[graph.mode] += 1

    @property
    def modes(self) -> list[dict[str, Any]]:
        """Measured times of the modes among which the engine chooses, and the reasons.

        See `ModeChoice.report`. The list is empty unless an option such as `generation` is "auto".
        """
        return self.choice.report()
