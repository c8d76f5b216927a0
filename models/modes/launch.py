"""Choice of the graph of each launch among the graphs that can run a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from graft.models.engine.replay import ReplayInFlight
from graft.models.engine.request_state import RequestState
from graft.models.generation.loops import Loops
from graft.models.modes.choice import Bucket, Launch, ModeChoice
from graft.models.round.round import RoundGraph, RoundParts

__all__ = ["GraphKey", "LaunchModes"]


class GraphKey(NamedTuple):
    """Properties by which a graph is selected.

    Attributes
    ----------
    batch, drafts
        Number of batch rows, and number of drafts per batch row.
    grammar
        Where the grammar steps run, one of `GRAMMAR_STEPS`.
    repeats
        Whether the graph is a generation loop.
    optimistic
        Whether the graph is one of the optimistic graphs among which the engine chooses.
    """

    batch: int
    drafts: int
    grammar: str = "host"
    repeats: bool = False
    optimistic: bool = False


class LaunchModes:
    """Selects the graph of each launch.

    The requests of a batch determine where their grammar steps can run. If several graphs remain,
    `choice` selects one of them from measured times.

    Parameters
    ----------
    round_graphs
        Graph of a round whose grammar steps run on the host, for each (number of batch rows, number
        of drafts per batch row).
    chooses_loops
        Whether loops are chosen from measured times. Otherwise, all batches that can run in a loop
        do.
    chooses_promotion
        Whether requests with automata are promoted if rounds with promoted requests take less time
        per token than others. Otherwise, all of them are.

    Attributes
    ----------
    loops
        Prepares batches for generation loops; None: no batch runs in a loop.
    graphs
        All other graphs.
    optimistic_parts
        Parts of the optimistic graphs; None if there are none.
    choice
        Chooses among modes.
    """

    def __init__(
        self,
        round_graphs: Mapping[tuple[int, int], RoundGraph],
        *,
        chooses_loops: bool = False,
        chooses_promotion: bool = False,
    ):
        self._round_graphs = round_graphs
        self.loops: Loops | None = None
        self.optimistic_parts: RoundParts | None = None
        self._chooses_loops = chooses_loops
        self._chooses_promotion = chooses_promotion
        self.graphs: dict[GraphKey, RoundGraph] = {}
        self.choice = ModeChoice()
        # Modes among which that of the latest launch was chosen, and the mode.
        self._latest: tuple[Bucket, tuple[str, ...], str] | None = None

    def select(
        self,
        batch: int,
        drafts: int,
        states: Sequence[RequestState],
        *,
        may_loop: bool,
    ) -> tuple[RoundGraph, Launch]:
        """Return the graph for a batch of requests, and the bucket of its times.

        Parameters
        ----------
        batch, drafts
            Number of batch rows, and number of drafts per batch row.
        states
            Requests of the batch.
        may_loop
            Whether the batch has all requests that are running.
        """
        place = _grammar_place(states)
        is_guided = any(state.matcher is not None for state in states)
        bucket = Bucket(place if is_guided else "none", batch, drafts)
        keys = self._keys(GraphKey(batch, drafts, place), is_guided, may_loop)
        if self._may_be_optimistic(bucket, states):
            keys += [key._replace(optimistic=True) for key in keys]
        graphs = {}
        for key in keys:
            graph = self._graph(key)
            graphs[graph.mode] = graph
        modes = tuple(graphs)
        mode = self.choice.choose(bucket, modes)
        self._latest = bucket, modes, mode
        graph = graphs[mode]
        if graph.repeats and self.loops is not None:
            self.loops.reserve_pages(states)
        return graph, Launch(bucket, len(modes))

    def _keys(self, key: GraphKey, is_guided: bool, may_loop: bool) -> list[GraphKey]:
        """Return the keys of the round and of the loop that can run a batch.

        `key` is that of the round.
        """
        loops = self.loops
        if loops is None or not may_loop or not loops.possible:
            return [key]
        grammar = loops.grammar_place(key.grammar, is_guided=is_guided)
        loop_key = key._replace(grammar=grammar, repeats=True)
        return [key, loop_key] if self._chooses_loops else [loop_key]

    def _may_be_optimistic(self, bucket: Bucket, states: Sequence[RequestState]) -> bool:
        """Return whether an optimistic graph can run a batch, with the same outputs."""
        parts = self.optimistic_parts
        if parts is None or bucket.grammar != "host":
            return False
        # The drafts differ if they are probed in optimistic graphs only.
        same_drafts = parts.mode == self._round_graphs[bucket.batch, bucket.drafts].parts.mode
        return same_drafts or not any(state.depends_on_drafts for state in states)

    def _graph(self, key: GraphKey) -> RoundGraph:
        if key == GraphKey(key.batch, key.drafts):
            return self._round_graphs[key.batch, key.drafts]
        return self.graphs[key]

    @property
    def prefers_other(self) -> bool:
        """Whether another mode than that of the latest launch would be chosen now."""
        if self._latest is None:
            return False
        bucket, modes, mode = self._latest
        return self.choice.choose(bucket, modes) != mode

    def record(self, flight: ReplayInFlight, ns: float, tokens: int) -> None:
        """Record the time and the number of tokens of a complete replay."""
        launch = flight.launch
        if launch is None:
            return
        bucket = launch.bucket
        if launch.num_modes > 1:
            self.choice.record(bucket, flight.graph.mode, ns, tokens)
        if self._chooses_promotion and bucket.grammar != "none":
            promotion = self._promotion_bucket(bucket.batch)
            if bucket.grammar == "mixed":
                self.choice.record_change(promotion, ns)
            else:
                self.choice.record(promotion, bucket.grammar, ns, tokens)

    def should_promote(self, num_requests: int) -> bool:
        """Return whether a request with an automaton is promoted.

        Parameters
        ----------
        num_requests
            Number of requests with a slot, including this one.
        """
        if not self._chooses_promotion:
            return True
        buckets = [batch for batch, _ in self._round_graphs if batch >= num_requests]
        bucket = self._promotion_bucket(min(buckets))
        return self.choice.choose(bucket, ("device", "host")) == "device"

    def _promotion_bucket(self, batch: int) -> Bucket:
        lengths = [drafts for _, drafts in self._round_graphs]
        return Bucket("promotion", batch, max(lengths))


def _grammar_place(states: Sequence[RequestState]) -> str:
    """Return the place of the grammar steps of a batch, one of `GRAMMAR_STEPS`."""
    num_promoted = sum(state.promoted for state in states)
    if not num_promoted:
        return "host"
    return "device" if num_promoted == len(states) else "mixed"
