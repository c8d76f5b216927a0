"""Launches rounds and generation loops, and reads their results (``generation="graph"``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from graft.cudagraph.device import Stream
from graft.grammar.decoder import GuidedRequest
from graft.models.engine.replay import ReplayInFlight, Replays
from graft.models.engine.request_state import RequestState
from graft.models.engine.stats import EngineStats
from graft.models.round.budget import DraftBudget
from graft.models.round.loop import LoopControl
from graft.models.round.round import RoundGraph, RoundResources

__all__ = ["LoopReplays"]


class LoopReplays(Replays):
    """Launches rounds and generation loops, and reads the results of their replays.

    A loop is one launch that runs many replays. The results of each replay say whether another
    replay of the loop follows. The host therefore learns of a replay of a loop only when it reads
    the results of the previous replay. The device may be up to `LOOP_ENTRIES` - 1 replays ahead of
    the host.

    While a loop is running, `retired` is at most the number of the last replay before the loop.
    Slots of the loop's requests are therefore not reclaimed while the device may still write their
    state and pages.

    Parameters
    ----------
    resources, stream, budget
        As in `Replays`.
    control
        Memory through which the host asks a loop to end, and through which the device reports
        whether a replay is the last one of its loop.
    """

    def __init__(
        self, resources: RoundResources, stream: Stream, budget: DraftBudget, control: LoopControl
    ):
        super().__init__(resources, stream, budget)
        self._control = control
        self._first = 0  # number of the first replay of the latest loop

    def launch(
        self,
        graph: RoundGraph,
        states: Sequence[RequestState],
        served: Sequence[GuidedRequest],
        max_rounds: int = 1,
    ) -> None:
        """Launch a round or a loop; see `Replays.launch`."""
        if max_rounds > 1:
            self._first = self.launched + 1
            self.looping = True
        super().launch(graph, states, served, max_rounds)

    def leave_loop(self) -> None:
        """Ask the running generation loop to end. If none is running, do nothing.

        The device finishes the current replay, and possibly one more. Their results are read as
        usual.
        """
        if self.looping:
            self._control.end(self._first)

    def finish(self) -> None:
        """Remove the oldest replay from `unread`, and release its entries in the rings.

        If the replay belongs to a loop (`LoopReplays`) and the loop runs another replay after it,
        add that replay to `unread`. The caller must have read the results of the removed replay.
        """
        flight = self.unread[0]
        ends = flight.repeats and self._control.is_last(flight.number)
        super().finish()
        self._control.release(flight.number)
        if ends:
            self.looping = False
        elif flight.repeats:
            self._continue(flight)

    def _continue(self, flight: ReplayInFlight) -> None:
        """Add to `unread` the replay that follows `flight` in the running loop."""
        number = self.launched + 1
        self._resources.outputs.reserve(number)
        self._resources.decoder.skip(number)
        self.launched = number
        self.unread.append(replace(flight, number=number))

    def drain(self) -> None:
        """End the running loop and wait for the device; see `Replays.drain`."""
        self.leave_loop()
        super().drain()
        self.looping = False

    def close(self) -> None:
        """Drop the references to device objects; see `Replays.close`."""
        super().close()
        del self._control

    def _retire(self, number: int, stats: EngineStats) -> None:
        super()._retire(number, stats)
        if self.looping:
            self.retired = min(self.retired, self._first - 1)
