"""Steps of the grammar in the graph of a round."""

from __future__ import annotations

from graft.cudagraph.graph.graph import GraphLane, GraphMark
from graft.cudagraph.host.hostwork import NativeWork
from graft.grammar.decoder import GuidedDecoder
from graft.sampling.exchange import Exchange

__all__ = ["GrammarSteps"]


class GrammarSteps:
    """Adds the steps of the grammar to the grammar lane of a round.

    A step is host work of the guided decoder, followed by a copy of the mask rows that it fills to
    the device.

    Parameters
    ----------
    decoder
        Creates the host work.
    exchange
        Memory that contains the mask rows.

    Attributes
    ----------
    has_host_steps
        Whether steps need host work. If not, the decoder skips the replays of the graph.
    """

    has_host_steps = True

    def __init__(self, decoder: GuidedDecoder, exchange: Exchange):
        self._decoder = decoder
        self._exchange = exchange

    def add_open(self, lane: GraphLane, num_rows: int, begun: GraphMark, *, name: str) -> None:
        """Add the step that fills the mask rows of the drafts to be verified.

        Parameters
        ----------
        lane
            Grammar lane.
        num_rows
            Number of mask rows that the round can need.
        begun
            Mark of the model lane after slots have been assigned to batch rows. Host work need not
            wait for it.
        name
            Node name of the step.
        """
        self._add(lane, self._decoder.open_work(), 0, num_rows, name)

    def add_commit(self, lane: GraphLane, row: int | None, *, name: str) -> None:
        """Add the step that advances the grammar by the committed tokens.

        Parameters
        ----------
        lane
            Grammar lane, ordered after verification.
        row
            Mask row under which a draft of this round is sampled; None if there is none.
        name
            Node name of the step.
        """
        self._add_row(lane, self._decoder.commit_work(), row, name)

    def add_draft(self, lane: GraphLane, j: int, row: int | None, *, name: str) -> None:
        """Add draft step `j`, see `graft.grammar.decoder.GuidedDecoder.draft_work`.

        Parameters
        ----------
        lane
            Grammar lane, ordered after the kernel that writes the drafts or candidates.
        j
            Number of the draft or level.
        row
            Mask row that the step fills; None if it fills none.
        name
            Node name of the step.
        """
        self._add_row(lane, self._decoder.draft_work(j), row, name)

    def _add_row(self, lane: GraphLane, work: NativeWork, row: int | None, name: str) -> None:
        first, end = (0, 0) if row is None else (row, row + 1)
        self._add(lane, work, first, end, name)

    def _add(self, lane: GraphLane, work: NativeWork, first: int, end: int, name: str) -> None:
        """Add host work and the copy of the mask rows `first` to `end` (exclusive)."""
        self._decoder.add(lane, work, name=name)
        if first < end:
            self._exchange.copy_masks_to_device(lane, first, end)
