"""Promotion of requests: kernels do the grammar steps of promoted requests, not the host."""

from __future__ import annotations

import logging

from graft.cudagraph.errors import DeviceError
from graft.cudagraph.lanes import StreamLane
from graft.grammar.automaton.device import DeviceAutomata
from graft.models.engine.request_state import RequestState
from graft.sampling.exchange import Exchange

__all__ = ["Promotion"]

LOG = logging.getLogger("graft")


class Promotion:
    """Decides for each request whether its grammar steps run on the host.

    The decision is made when a request starts to take part in rounds, and holds until the request
    leaves its slot. A request without a grammar has no grammar steps: `start` marks all mask rows
    of its slot as free, which means that kernels allow every id. A request whose grammar has an
    automaton is *promoted*: kernels do its grammar steps.

    Parameters
    ----------
    exchange
        Memory that contains the mask rows and their marks.
    automata
        Automata on the device; None: no request is promoted.
    lane
        In-order work queue of the replays.
    """

    def __init__(self, exchange: Exchange, automata: DeviceAutomata | None, lane: StreamLane):
        self._exchange = exchange
        self._automata = automata
        self._lane = lane
        self._promoted: set[RequestState] = set()

    def needs_host(self, state: RequestState) -> bool:
        """Return whether the grammar steps of a request run on the host."""
        return state.matcher is not None and state not in self._promoted

    def start(self, state: RequestState) -> None:
        """Decide whether kernels do the grammar steps of a request.

        If the request has no grammar, mark the mask rows of its slot as allowing every id. The
        method must be called before the request takes part in a round, and while no replay that
        uses the slot is in flight.
        """
        if state.matcher is None:
            self._exchange.free_rows(state.slot, state.epoch)
            return
        if self._automata is None or state.stays_on_host:
            return
        try:
            promoted = self._automata.join(
                self._lane, state.slot, state.epoch, state.matcher, closing_end=state.closing_end
            )
        except DeviceError as error:  # for example, no pinned memory is left
            LOG.warning("request %s stays on the host: %s", state.id, error)
            return
        if promoted:
            self._promoted.add(state)

    def outgrew(self, state: RequestState) -> bool:
        """Return whether a request is promoted, but its stack has become too deep for the kernels.

        Call the method only if the request leaves its slot next, because it advances the matcher.
        """
        if self._automata is None or state not in self._promoted or state.matcher is None:
            return False
        return self._automata.outgrew(state.matcher, state.output.tokens[len(state.start_output) :])

    def leave(self, state: RequestState) -> None:
        """Record that a request leaves its slot and that kernels no longer do its grammar steps."""
        self._promoted.discard(state)

    def release(self, slot: int) -> None:
        """Release the automaton of a slot. No replay that uses the slot may be in flight."""
        if self._automata is not None:
            self._automata.release(slot)
