"""Choice of the graph of each launch among the graphs that can run a batch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from graft.grammar.decoder import GuidedRequest
from graft.models.engine.request_state import RequestState
from graft.models.modes.loop.batches import Loops
from graft.models.modes.promotion import Promotion
from graft.models.round.round import RoundGraph

__all__ = ["GraphKey", "LaunchModes", "Selection"]


class GraphKey(NamedTuple):
    """Properties by which a graph is selected.

    Attributes
    ----------
    batch, drafts
        Number of batch rows, and number of drafts per batch row.
    grammar
        Where the grammar steps run: one of `GRAMMAR_STEPS`, or "none" for a loop that has no
        grammar steps.
    repeats
        Whether the graph is a generation loop.
    """

    batch: int
    drafts: int
    grammar: str = "host"
    repeats: bool = False


class Selection(NamedTuple):
    """Graph that is launched next.

    Attributes
    ----------
    graph
        The graph.
    served
        Requests that the grammar worker serves if the graph has host steps.
    """

    graph: RoundGraph
    served: Sequence[GuidedRequest]


class LaunchModes:
    """Selects the graph of each launch.

    Parameters
    ----------
    round_graphs
        Graph of a round whose grammar steps run on the host, for each (number of batch rows, number
        of drafts per batch row).

    Attributes
    ----------
    round_graphs
        Parameter of the same name.
    graphs
        All other graphs.
    loops
        Prepares batches for generation loops; None: no batch runs in a loop.
    promotion
        Promotes requests; None: all grammar steps run on the host.
    """

    def __init__(self, round_graphs: dict[tuple[int, int], RoundGraph]):
        self.round_graphs = round_graphs
        self.graphs: dict[GraphKey, RoundGraph] = {}
        self.loops: Loops | None = None
        self.promotion: Promotion | None = None
        self._launched_loop: GraphKey | None = None  # key of the loop that was launched last

    # Launches -----------------------------------------------------------------------------------

    def batch_bucket(self, num_requests: int) -> int:
        """Return the number of batch rows of the smallest graph that can run this many requests."""
        return min(batch for batch, _ in self.round_graphs if batch >= num_requests)

    def select(
        self, batch: int, drafts: int, states: Sequence[RequestState], *, may_loop: bool
    ) -> Selection:
        """Select the graph for a batch of requests: a loop if one can be launched, else a round.

        Parameters
        ----------
        batch, drafts
            Number of batch rows, and number of drafts per batch row.
        states
            Requests of the batch.
        may_loop
            Whether the batch has all requests that are running.
        """
        key = GraphKey(batch, drafts, self._grammar_place(states))
        if self.loops is not None and self.loops.possible and may_loop:
            is_guided = any(state.matcher is not None for state in states)
            grammar = self.loops.grammar_place(key.grammar, is_guided=is_guided)
            key = key._replace(grammar=grammar, repeats=True)
            self.loops.reserve_pages(states)
            self._launched_loop = key
        return Selection(self._graph(key), self._served_by_worker(states))

    def _served_by_worker(self, states: Sequence[RequestState]) -> tuple[GuidedRequest, ...]:
        """Return the requests of a batch that are not promoted, as the grammar worker sees them."""
        requests = []
        for state in states:
            if not self.is_promoted(state):
                requests.append(
                    GuidedRequest(state.slot, state.epoch, state.matcher, state.start_position)
                )
        return tuple(requests)

    def _graph(self, key: GraphKey) -> RoundGraph:
        if key == GraphKey(key.batch, key.drafts):
            return self.round_graphs[key.batch, key.drafts]
        return self.graphs[key]

    # Loops --------------------------------------------------------------------------------------

    @property
    def looping(self) -> bool:
        """Whether a loop is running. Nothing may be launched meanwhile."""
        return self.loops is not None and self.loops.running

    def leave_loop(self) -> None:
        """Ask the loop that is running, if any, to end soon."""
        if self.loops is not None:
            self.loops.leave()

    def should_leave_loop(self, running: Collection[RequestState]) -> bool:
        """Return whether a loop with fewer batch rows or other grammar steps can run the requests.

        A running loop keeps its batch rows and grammar steps when some of its requests have ended.

        Parameters
        ----------
        running
            Requests that take part in rounds.
        """
        key = self._launched_loop
        if not running or key is None or self.loops is None:
            return False
        batch = self.batch_bucket(len(running))
        is_guided = any(state.matcher is not None for state in running)
        place = self.loops.grammar_place(self._grammar_place(running), is_guided=is_guided)
        return (batch, place) != (key.batch, key.grammar)

    # Promotion ----------------------------------------------------------------------------------

    def is_promoted(self, state: RequestState) -> bool:
        """Return whether kernels do all grammar steps of a request."""
        return self.promotion is not None and self.promotion.is_promoted(state)

    def _grammar_place(self, states: Collection[RequestState]) -> str:
        """Return the place of the grammar steps of a batch, one of `GRAMMAR_STEPS`."""
        num_promoted = sum(self.is_promoted(state) for state in states)
        if not num_promoted:
            return "host"
        return "device" if num_promoted == len(states) else "mixed"
