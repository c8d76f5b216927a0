"""Steps of the grammar that kernels run, for requests whose automata are on the device."""

from __future__ import annotations

from graft.cudagraph.driver.memory import DeviceArray
from graft.cudagraph.graph.graph import GraphLane, GraphMark
from graft.grammar.automaton.device import DeviceAutomata
from graft.grammar.decoder import GuidedDecoder
from graft.models.round.grammar_steps import GrammarSteps
from graft.sampling.exchange import Exchange

__all__ = ["GRAMMAR_STEPS", "AutomatonSteps", "MixedSteps", "NoGrammarSteps"]

#: Where the grammar steps of a round run: on the host for all requests; on the device for promoted
#: requests and on the host for the others; on the device for all requests.
GRAMMAR_STEPS = ("host", "mixed", "device")


class NoGrammarSteps(GrammarSteps):
    """Adds nothing: no request of the batch has a grammar."""

    has_host_steps = False

    def _add(self, *_: object) -> None:
        pass


class AutomatonSteps(GrammarSteps):
    """Adds only kernels: every request of the batch is promoted, see `DeviceAutomata`.

    Parameters
    ----------
    decoder, exchange
        As in `GrammarSteps`.
    automata
        Adds the kernels.
    row_slot
        int32 [B], slot of each batch row.
    """

    has_host_steps = False

    def __init__(
        self,
        decoder: GuidedDecoder,
        exchange: Exchange,
        automata: DeviceAutomata,
        row_slot: DeviceArray,
    ):
        super().__init__(decoder, exchange)
        self._automata = automata
        self._row_slot = row_slot

    def add_open(self, lane: GraphLane, num_rows: int, begun: GraphMark, *, name: str) -> None:
        lane.wait(begun)
        copied = self.has_host_steps
        self._automata.add_open(lane, self._row_slot, num_rows, copied=copied)

    def add_commit(self, lane: GraphLane, row: int | None, *, name: str) -> None:
        self._automata.add_commit(lane, self._row_slot, fill=row is not None)

    def add_draft(self, lane: GraphLane, j: int, row: int | None, *, name: str) -> None:
        self._automata.add_draft(lane, self._row_slot, j)


class MixedSteps(AutomatonSteps):
    """Adds host work, copies and then kernels: some requests of the batch are promoted.

    A copy overwrites the mask rows of all slots, so the kernels follow it.
    """

    has_host_steps = True

    def add_open(self, lane: GraphLane, num_rows: int, begun: GraphMark, *, name: str) -> None:
        GrammarSteps.add_open(self, lane, num_rows, begun, name=name)
        super().add_open(lane, num_rows, begun, name=name)

    def add_commit(self, lane: GraphLane, row: int | None, *, name: str) -> None:
        GrammarSteps.add_commit(self, lane, row, name=name)
        super().add_commit(lane, row, name=name)

    def add_draft(self, lane: GraphLane, j: int, row: int | None, *, name: str) -> None:
        GrammarSteps.add_draft(self, lane, j, row, name=name)
        super().add_draft(lane, j, row, name=name)
