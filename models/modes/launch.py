"""Choice of the graph of each launch among the graphs that can run a batch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from graft.grammar.decoder import GuidedRequest
from graft.models.engine.replay import ReplayInFlight
from graft.models.engine.request_state import RequestState
from graft.models.modes.choice import Bucket, Launch, ModeChoice
from graft.models.modes.loop.batches import Loops
from graft.models.modes.promotion import Promotion, has_automaton
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
    optimistic
        Whether the graph is one of the optimistic graphs among which the engine chooses.
    """

    batch: int
    drafts: int
    grammar: str = "host"
    repeats: bool = False
    optimistic: bool = False


class Selection(NamedTuple):
    """Graph that is launched next.

    Attributes
    ----------
    graph
        The graph.
    served
        Requests that the grammar worker serves if the graph has host steps.
    launch
        How the mode of the launch was chosen.
    """

    graph: RoundGraph
    served: Sequence[GuidedRequest]
    launch: Launch


class LaunchModes:
    """Selects the graph of each launch, and promotes requests.

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
    is_optimistic
        Whether all graphs are optimistic.
    has_optimistic_choice
        Whether there are optimistic graphs among which the engine chooses.
    same_drafts
        Whether the drafts of these graphs are the same as those of others. They differ if drafts
        are probed in optimistic graphs only.

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
    choice
        Chooses among modes.
    """

    def __init__(
        self,
        round_graphs: dict[tuple[int, int], RoundGraph],
        *,
        chooses_loops: bool = False,
        chooses_promotion: bool = False,
        is_optimistic: bool = False,
        has_optimistic_choice: bool = False,
        same_drafts: bool = True,
    ):
        self.round_graphs = round_graphs
        self.graphs: dict[GraphKey, RoundGraph] = {}
        self.loops: Loops | None = None
        self.promotion: Promotion | None = None
        self.choice = ModeChoice()
        self._chooses_loops = chooses_loops
        self._chooses_promotion = chooses_promotion
        self._is_optimistic = is_optimistic
        self._has_optimistic_choice = has_optimistic_choice
        self._same_drafts = same_drafts
        # Modes among which that of the latest launch was chosen, and the mode.
        self._latest: tuple[Bucket, tuple[str, ...], str] | None = None
        self._launched_loop: GraphKey | None = None  # key of the loop that was launched last

    # Launches -----------------------------------------------------------------------------------

    def batch_bucket(self, num_requests: int) -> int:
        """Return the number of batch rows of the smallest graph that can run this many requests."""
        return min(batch for batch, _ in self.round_graphs if batch >= num_requests)

    def select(
        self, batch: int, drafts: int, states: Sequence[RequestState], *, may_loop: bool
    ) -> Selection:
        """Select the graph for a batch of requests.

        Parameters
        ----------
        batch, drafts
            Number of batch rows, and number of drafts per batch row.
        states
            Requests of the batch.
        may_loop
            Whether the batch has all requests that are running.
        """
        place = self._grammar_place(states)
        guided = [state for state in states if state.matcher is not None]
        round_key = GraphKey(batch, drafts, place)
        loop_key = self._loop_key(round_key, bool(guided)) if may_loop else None
        bucket = Bucket(place if guided else "none", batch, drafts, loop_key is not None)
        possible = [round_key] if loop_key is None or self._chooses_loops else []
        if loop_key is not None:
            possible.append(loop_key)
        if self._may_be_optimistic(bucket, states):
            possible += [key._replace(optimistic=True) for key in possible]
        keys = {self._graph(key).mode: key for key in possible}
        key = keys[self._choose(bucket, tuple(keys))]
        if key.repeats and self.loops is not None:
            self.loops.reserve_pages(states)
            self._launched_loop = key
        is_optimistic = key.optimistic or self._is_optimistic
        return Selection(
            self._graph(key),
            self._served_by_worker(states, is_optimistic=is_optimistic),
            Launch(bucket, len(keys), self._promotion_place(guided)),
        )

    def _choose(self, bucket: Bucket, modes: tuple[str, ...]) -> str:
        """Return the mode of the next launch, and remember among which modes it was chosen."""
        mode = self.choice.choose(bucket, modes)
        self._latest = bucket, modes, mode
        return mode

    def _served_by_worker(
        self, states: Sequence[RequestState], *, is_optimistic: bool
    ) -> tuple[GuidedRequest, ...]:
        """Return the requests of a batch that are not promoted, as the grammar worker sees them."""
        requests = []
        for state in states:
            if self.is_promoted(state):
                continue
            request = GuidedRequest(
                state.slot,
                state.epoch,
                state.matcher,
                state.start_position,
                optimistic=is_optimistic and state.params.samples_unmasked,
            )
            requests.append(request)
        return tuple(requests)

    def _loop_key(self, key: GraphKey, is_guided: bool) -> GraphKey | None:
        """Return the key of the loop that can run a batch instead of the round of `key`.

        Return None if no loop can be launched now.
        """
        loops = self.loops
        if loops is None or not loops.possible:
            return None
        grammar = loops.grammar_place(key.grammar, is_guided=is_guided)
        return key._replace(grammar=grammar, repeats=True)

    def _may_be_optimistic(self, bucket: Bucket, states: Sequence[RequestState]) -> bool:
        """Return whether an optimistic graph can run a batch, with the same outputs."""
        if not self._has_optimistic_choice or bucket.grammar != "host":
            return False
        return self._same_drafts or not any(state.params.depends_on_drafts for state in states)

    def _graph(self, key: GraphKey) -> RoundGraph:
        if key == GraphKey(key.batch, key.drafts):
            return self.round_graphs[key.batch, key.drafts]
        return self.graphs[key]

    def record(self, flight: ReplayInFlight, ns: float, gap_ns: float | None, tokens: int) -> None:
        """Record the times and the number of tokens of a complete replay.

        Parameters
        ----------
        flight
            The replay.
        ns
            Time of the replay, in nanoseconds.
        gap_ns
            Time between this replay and the next one, in nanoseconds; None if it is unknown. A
            replay without it is not recorded where loops, which have no gaps, are possible.
        tokens
            Number of tokens committed to all requests.
        """
        launch = flight.launch
        if launch is None or (gap_ns is None and launch.bucket.loops):
            return
        bucket = launch.bucket
        ns += gap_ns or 0.0
        if launch.num_modes > 1:
            self.choice.record(bucket, flight.graph.mode, ns, tokens)
        if self._chooses_promotion and launch.promotion is not None:
            promotion = self._promotion_bucket(bucket.batch)
            if launch.promotion == "mixed":
                self.choice.record_change(promotion, ns)
            else:
                self.choice.record(promotion, launch.promotion, ns, tokens)

    # Loops --------------------------------------------------------------------------------------

    @property
    def looping(self) -> bool:
        """Whether a loop is running. Nothing may be launched meanwhile."""
        return self.loops is not None and self.loops.running

    def leave_loop(self) -> None:
        """Ask the loop that is running, if any, to end soon."""
        if self.loops is not None:
            self.loops.leave()

    def should_leave_loop(self, running: Collection[RequestState], num_requests: int) -> bool:
        """Return whether the running loop should end because another graph is preferable now.

        Parameters
        ----------
        running
            Requests that take part in rounds.
        num_requests
            Number of requests that have a slot.
        """
        if running and self._has_other_loop(running):
            return True
        if self.promotion is not None and self.promotion.has_candidates(running, num_requests):
            return True
        if self._latest is None:
            return False
        bucket, modes, mode = self._latest
        return self.choice.choose(bucket, modes) != mode

    def _has_other_loop(self, states: Collection[RequestState]) -> bool:
        """Return whether a loop with fewer batch rows or other grammar steps can run the requests.

        A running loop keeps its batch rows and grammar steps when some of its requests have ended.
        """
        key = self._launched_loop
        if key is None or self.loops is None:
            return False
        batch = self.batch_bucket(len(states))
        is_guided = any(state.matcher is not None for state in states)
        place = self.loops.grammar_place(self._grammar_place(states), is_guided=is_guided)
        return (batch, place) != (key.batch, key.grammar)

    # Promotion ----------------------------------------------------------------------------------

    def promote(
        self,
        running: Collection[RequestState],
        num_requests: int,
        unread: Collection[ReplayInFlight],
    ) -> int:
        """Promote running requests and return their number; see `Promotion.promote`."""
        if self.promotion is None:
            return 0
        return self.promotion.promote(running, num_requests, unread)

    def should_promote(self, num_requests: int) -> bool:
        """Return whether a request with an automaton is promoted.

        Parameters
        ----------
        num_requests
            Number of requests with a slot, including this one.
        """
        if not self._chooses_promotion:
            return True
        bucket = self._promotion_bucket(self.batch_bucket(num_requests))
        return self.choice.choose(bucket, ("device", "host")) == "device"

    def _promotion_bucket(self, batch: int) -> Bucket:
        lengths = [drafts for _, drafts in self.round_graphs]
        return Bucket("promotion", batch, max(lengths))

    def is_promoted(self, state: RequestState) -> bool:
        """Return whether kernels do all grammar steps of a request."""
        return self.promotion is not None and self.promotion.is_promoted(state)

    def _grammar_place(self, states: Collection[RequestState]) -> str:
        """Return the place of the grammar steps of a batch, one of `GRAMMAR_STEPS`."""
        num_promoted = sum(self.is_promoted(state) for state in states)
        if not num_promoted:
            return "host"
        return "device" if num_promoted == len(states) else "mixed"

    def _promotion_place(self, guided: Sequence[RequestState]) -> str | None:
        """Return the place of the grammar steps of a batch by whose times promotion is judged.

        Return None if no request has a grammar, or if a grammar has no automaton. Promotion then
        has no effect on the times of the batch, or not the usual one.

        Parameters
        ----------
        guided
            Requests of a batch that have a grammar.
        """
        for state in guided:
            if not self.is_promoted(state) and not has_automaton(state):
                return None
        return self._grammar_place(guided) if guided else None
