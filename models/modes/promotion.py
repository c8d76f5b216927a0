"""Promotion of requests: kernels take over their grammar steps from the host."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable

from graft.cudagraph.errors import DeviceError
from graft.cudagraph.lanes import StreamLane
from graft.grammar.automaton.device import DeviceAutomata
from graft.models.engine.replay import ReplayInFlight
from graft.models.engine.request_state import RequestState

__all__ = ["MAX_PROMOTIONS", "Promotion", "has_automaton", "has_new_automaton"]

LOG = logging.getLogger("graft")

#: Maximum number of running requests that are promoted before a launch. A new matcher accepts the
#: whole output of its request, so many promotions at once would delay the launch.
MAX_PROMOTIONS = 4


class Promotion:
    """Promotes the requests whose grammar has an automaton, and those without a grammar.

    A request is promoted when it starts to take part in rounds or, if its automaton is built later,
    while it runs.

    Parameters
    ----------
    automata
        Automata on the device.
    lane
        In-order work queue of the replays.
    should_promote
        Returns whether a request with a grammar may be promoted, given the number of requests that
        have a slot. By default, every request may.
    """

    def __init__(
        self,
        automata: DeviceAutomata,
        lane: StreamLane,
        should_promote: Callable[[int], bool] = lambda _: True,
    ):
        self._automata = automata
        self._lane = lane
        self._should_promote = should_promote

    def start(self, state: RequestState, num_requests: int, num_unread: int = 0) -> None:
        """Assign the slot of a request to it on the device, and promote the request if possible.

        Parameters
        ----------
        state
            Request that has a slot.
        num_requests
            Number of requests that have a slot.
        num_unread
            Number of launched replays whose results are unknown, see `DeviceAutomata.join`.
        """
        # Requests without a grammar are always promoted.
        allowed = state.matcher is None or self._should_promote(num_requests)
        state.promoted = False
        state.awaits_automaton = False
        try:
            state.promoted = self._automata.join(
                self._lane,
                state.slot,
                state.epoch,
                state.matcher,
                allowed=allowed,
                num_unread=num_unread,
            )
        except DeviceError as error:  # for example, no pinned memory is left
            LOG.warning("request %s stays on the host: %s", state.id, error)
            return
        if allowed and not state.promoted:
            state.awaits_automaton = self._automata.may_promote_later(state.matcher)

    def promote(
        self,
        running: Iterable[RequestState],
        num_requests: int,
        unread: Collection[ReplayInFlight],
    ) -> int:
        """Promote the running requests whose automaton has been built since they started.

        The requests stay in their slots and keep their drafts. The state of a request's automaton
        follows its known tokens. A replay in flight may commit more tokens, which the device adds.

        Parameters
        ----------
        running
            Requests that take part in rounds.
        num_requests
            Number of requests that have a slot.
        unread
            Launched replays whose results are unknown. If several of them contain a request, the
            request is promoted by a later call. A call promotes at most `MAX_PROMOTIONS` requests.

        Returns
        -------
        int
            Number of promoted requests.
        """
        candidates = []
        for state in running:
            if not has_new_automaton(state):
                continue
            if sum(flight.contains(state) for flight in unread) <= 1:
                candidates.append(state)
        for state in candidates[:MAX_PROMOTIONS]:
            self._promote_running(state, num_requests, len(unread))
        return sum(state.promoted for state in candidates)

    def _promote_running(self, state: RequestState, num_requests: int, num_unread: int) -> None:
        """Promote a running request. If this fails, the request stays on the host."""
        served_matcher = state.matcher
        try:
            state.matcher = state.make_matcher()
            self.start(state, num_requests, num_unread)
        except Exception as error:  # a grammar backend may raise anything
            LOG.warning("request %s stays on the host: %s", state.id, error)
        if not state.promoted:  # the grammar worker still serves the matcher of this slot
            state.matcher = served_matcher
            state.awaits_automaton = False

    def leave(self, state: RequestState) -> None:
        """Forget the promotion of a request that leaves its slot."""
        state.promoted = False
        state.awaits_automaton = False

    def release(self, slot: int) -> None:
        """Release the automaton of a slot. No replay that uses the slot may be in flight."""
        self._automata.release(slot)


def has_automaton(state: RequestState) -> bool:
    """Return whether the grammar of a request has an automaton that was built in time."""
    return state.matcher is not None and state.matcher.compiled.automaton is not None


def has_new_automaton(state: RequestState) -> bool:
    """Return whether the automaton that a running request awaits has been built."""
    return state.awaits_automaton and has_automaton(state)
