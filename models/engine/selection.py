"""Selects the graph to launch: batch rows, drafts per row, and one round or a loop."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from graft.grammar.decoder import GuidedRequest
from graft.models.engine.promotion import Promotion
from graft.models.engine.request_state import RequestState
from graft.models.round.round import RoundGraph

__all__ = ["GraphKey", "GraphSelector", "Selection"]

_NO_LIMIT = 2**31 - 1


class GraphKey(NamedTuple):
    """Properties by which a graph is selected.

    Attributes
    ----------
    batch, drafts
        Number of batch rows, and number of drafts per batch row.
    kind
        "host": a round with grammar steps on the host. "device": a round without them. "loop": many
        rounds without them.
    """

    batch: int
    drafts: int
    kind: str = "host"


class Selection(NamedTuple):
    """Graph that is launched next.

    Attributes
    ----------
    graph
        The graph.
    served
        Requests of the batch for which the host runs grammar steps (`GraphSelector.is_served`).
    max_rounds
        Maximum number of rounds that the launch runs.
    """

    graph: RoundGraph
    served: Sequence[GuidedRequest]
    max_rounds: int


class GraphSelector:
    """Selects the graph of each launch.

    Parameters
    ----------
    graphs
        All graphs by key. Entries may be added after this object has been created.
    promotion
        Tells which requests need grammar steps on the host. Promoted requests, whose grammar steps
        are done by kernels, need none.
    kind_without_host
        Kind of the graphs for batches that need no grammar steps on the host.
    max_loop_rounds
        Maximum number of rounds of a generation loop; None sets no limit.
    serves_all
        Whether the host runs grammar steps for requests without a grammar, too. This is required
        for trees whose levels are all drafted at once, because the grammar worker on the host then
        chooses the drafts of all requests.
    """

    def __init__(
        self,
        graphs: Mapping[GraphKey, RoundGraph],
        promotion: Promotion,
        *,
        kind_without_host: str = "host",
        max_loop_rounds: int | None = None,
        serves_all: bool = False,
    ):
        self._graphs = graphs
        self._promotion = promotion
        self._kind_without_host = kind_without_host
        self._max_loop_rounds = max_loop_rounds or _NO_LIMIT
        self._serves_all = serves_all

    def batch_bucket(self, num_requests: int) -> int:
        """Return the number of batch rows of the smallest graph that can run this many requests."""
        return min(key.batch for key in self._graphs if key.batch >= num_requests)

    def select(
        self, batch: int, drafts: int, states: Collection[RequestState], *, may_loop: bool
    ) -> Selection:
        """Select the graph for a batch of requests.

        Parameters
        ----------
        batch, drafts
            Number of batch rows, and number of drafts per batch row.
        states
            Requests of the batch.
        may_loop
            Whether the launch may run several rounds.
        """
        served = tuple(state for state in states if self.is_served(state))
        kind = "host" if served else self._kind_without_host
        return Selection(
            self._graphs[GraphKey(batch, drafts, kind)],
            [_guided_request(state) for state in served],
            self._max_loop_rounds if kind == "loop" and may_loop else 1,
        )

    def is_served(self, state: RequestState) -> bool:
        """Return whether the host runs grammar steps for a request that has a slot."""
        return self._serves_all or self._promotion.needs_host(state)


def _guided_request(state: RequestState) -> GuidedRequest:
    """Return the fields of a request that the grammar worker needs."""
    return GuidedRequest(
        state.slot, state.epoch, state.matcher, state.start_position, state.closing_end
    )
