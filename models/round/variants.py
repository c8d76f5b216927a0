"""Choice between rounds whose grammar steps run on the host, on the device, or on both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from graft.models.round.round import RoundGraph

__all__ = ["GrammarVariants"]


class _Promotable(Protocol):
    promoted: bool


class GrammarVariants:
    """Chooses where the grammar steps of a batch run.

    Attributes
    ----------
    graphs
        Graph for each (kind of grammar steps, number of batch rows, number of drafts per batch
        row), for the kinds "mixed" and "device".
    """

    def __init__(self) -> None:
        self.graphs: dict[tuple[str, int, int], RoundGraph] = {}

    def choose(self, host_graph: RoundGraph, states: Sequence[_Promotable]) -> RoundGraph:
        """Return the graph for a batch of requests.

        Parameters
        ----------
        host_graph
            Graph of the same size whose grammar steps run on the host.
        states
            Requests of the batch.
        """
        num_promoted = sum(state.promoted for state in states)
        if not num_promoted:
            return host_graph
        kind = "device" if num_promoted == len(states) else "mixed"
        return self.graphs[kind, host_graph.batch, host_graph.drafts]
