"""Promotion of requests: kernels take over their grammar steps from the host."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable

from graft.cudagraph.errors import DeviceError
from graft.cudagraph.lanes import StreamLane
from graft.grammar.automaton.device import DeviceAutomata
from graft.models.engine.replay import ReplayInFlight
from graft.models.engine.request_state import RequestState
from graft.models.engine.slots import SlotObserver

__all__ = ["MAX_PROMOTIONS", "Promotion", "has_automaton"]

LOG = logging.getLogger("graft")

#: Maximum number of running requests that are promoted before a launch. A new matcher accepts the
#: whole output of its request, so many promotions at once would delay the launch.
MAX_PROMOTIONS = 4


class Promotion(SlotObserver):
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
        Returns whether a request whose grammar has an automaton may be promoted, given the number
        of requests that have a slot. By default, every request may.
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
        self._promoted: set[RequestState] = set()
        self._awaiting: set[RequestState] = set()

    def is_promoted(self, state: RequestState) -> bool:
        """Return whether kernels do all grammar steps of a request that has a slot."""
        return state in self._promoted

    def awaits_automaton(self, state: RequestState) -> bool:
        """Return whether a request can be promoted when its grammar's automaton has been built."""
        return state in self._awaiting

    def start(self, state: RequestState, num_requests: int) -> None:
        """Assign the slot of a request to it on the device, and promote the request if possible.

        Parameters
        ----------
        state
            Request that has a slot.
        num_requests
            Number of requests that have a slot.
        """
        matcher = state.matcher
        # Requests without a grammar are always promoted.
        allowed = matcher is None or (
            self._automata.can_promote(matcher) and self._should_promote(num_requests)
        )
        self._join(state, allowed=allowed)
        if not self.is_promoted(state) and self._automata.may_promote_later(matcher):
            self._awaiting.add(state)

    def _join(self, state: RequestState, *, allowed: bool, num_unread: int = 0) -> None:
        """Assign the slot of a request, and promote the request if `allowed` and possible."""
        try:
            promoted = self._automata.join(
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
        if promoted:
            self._promoted.add(state)

    def has_candidates(self, running: Iterable[RequestState], num_requests: int) -> bool:
        """Return whether running requests should be promoted, because their automata are built.

        If promotion does not save time, these requests await their automaton no longer.

        Parameters
        ----------
        running
            Requests that take part in rounds.
        num_requests
            Number of requests that have a slot.
        """
        candidates = self._find_candidates(running)
        if candidates and not self._should_promote(num_requests):
            self._awaiting.difference_update(candidates)
            return False
        return bool(candidates)

    def _find_candidates(self, running: Iterable[RequestState]) -> list[RequestState]:
        return [state for state in running if self.awaits_automaton(state) and has_automaton(state)]

    def promote(
        self,
        running: Collection[RequestState],
        num_requests: int,
        unread: Collection[ReplayInFlight],
    ) -> int:
        """Promote the running requests whose automaton has been built since they started.

        The requests stay in their slots and keep their drafts. The state of a request's automaton
        follows its known tokens. A replay in flight may commit more tokens, which the device adds.

        Parameters
        ----------
        running, num_requests
            As in `has_candidates`.
        unread
            Launched replays whose results are unknown. If several of them contain a request, the
            request is promoted by a later call. A call promotes at most `MAX_PROMOTIONS` requests.

        Returns
        -------
        int
            Number of promoted requests.
        """
        if not self.has_candidates(running, num_requests):
            return 0
        ready = []
        for state in self._find_candidates(running):
            if sum(flight.contains(state) for flight in unread) <= 1:
                ready.append(state)
        for state in ready[:MAX_PROMOTIONS]:
            self._promote_running(state, len(unread))
        return sum(self.is_promoted(state) for state in ready)

    def _promote_running(self, state: RequestState, num_unread: int) -> None:
        """Promote a running request. If this fails, the request stays on the host."""
        self._awaiting.remove(state)
        served_matcher = state.matcher
        try:
            state.matcher = state.make_matcher()
            self._join(state, allowed=True, num_unread=num_unread)
        except Exception as error:  # a grammar backend may raise anything
            LOG.warning("request %s stays on the host: %s", state.id, error)
        if not self.is_promoted(state):  # the grammar worker still serves the slot's matcher
            state.matcher = served_matcher

    def leave(self, state: RequestState) -> None:
        """Forget the promotion of a request that leaves its slot."""
        self._promoted.discard(state)
        self._awaiting.discard(state)

    def release(self, slot: int) -> None:
        """Release the automaton of a slot. No replay that uses the slot may be in flight."""
        self._automata.release(slot)


def has_automaton(state: RequestState) -> bool:
    """Return whether the grammar of a request has an automaton that was built in time."""
    return state.matcher is not None and state.matcher.compiled.automaton is not None
