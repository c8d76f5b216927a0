"""Promotion of requests: kernels take over their grammar steps from the host."""

from __future__ import annotations

import logging

from graft.cudagraph.errors import DeviceError
from graft.cudagraph.lanes import StreamLane
from graft.grammar.automaton.device import DeviceAutomata
from graft.models.engine.request_state import RequestState
from graft.models.engine.slots import SlotObserver

__all__ = ["Promotion"]

LOG = logging.getLogger("graft")


class Promotion(SlotObserver):
    """Promotes the requests whose grammar has an automaton, and those without a grammar.

    A request is promoted when it starts to take part in rounds.

    Parameters
    ----------
    automata
        Automata on the device.
    lane
        In-order work queue of the replays.
    """

    def __init__(self, automata: DeviceAutomata, lane: StreamLane):
        self._automata = automata
        self._lane = lane
        self._promoted: set[RequestState] = set()

    def is_promoted(self, state: RequestState) -> bool:
        """Return whether kernels do all grammar steps of a request that has a slot."""
        return state in self._promoted

    def start(self, state: RequestState) -> None:
        """Assign the slot of a request to it on the device, and promote the request if possible."""
        try:
            promoted = self._automata.join(self._lane, state.slot, state.epoch, state.matcher)
        except DeviceError as error:  # for example, no pinned memory is left
            LOG.warning("request %s stays on the host: %s", state.id, error)
            return
        if promoted:
            self._promoted.add(state)

    def leave(self, state: RequestState) -> None:
        """Forget the promotion of a request that leaves its slot."""
        self._promoted.discard(state)

    def release(self, slot: int) -> None:
        """Release the automaton of a slot. No replay that uses the slot may be in flight."""
        self._automata.release(slot)
