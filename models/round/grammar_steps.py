"""Adds the grammar steps to the graph of a round."""

from __future__ import annotations

from graft.cudagraph.driver.memory import DeviceArray
from graft.cudagraph.graph.graph import GraphLane, GraphMark
from graft.grammar.automaton.device import DeviceAutomata
from graft.grammar.decoder import GuidedDecoder
from graft.sampling.mask_rows import MaskRows

__all__ = ["GrammarSteps"]


class GrammarSteps:
    """Adds the grammar steps to the grammar lane of a round.

    A grammar step has two parts. First, the guided decoder fills mask rows (token bitmasks) on the
    host, and these rows are copied to the device. After that, kernels do the step for *promoted*
    requests, whose grammar is an automaton on the device, and fill the mask rows of these requests.
    The kernels run after the copy, because the copy overwrites the mask rows of promoted requests
    too.

    Parameters
    ----------
    decoder
        Creates the host work; None: no steps run on the host.
    mask_rows
        Copies mask rows to the device.
    automata
        Adds the kernels that do the steps of promoted requests; None: no request is promoted.
    row_slot
        int32 [B], slot of each batch row.
    """

    def __init__(
        self,
        decoder: GuidedDecoder | None,
        mask_rows: MaskRows,
        automata: DeviceAutomata | None,
        row_slot: DeviceArray,
    ):
        self._decoder = decoder
        self._mask_rows = mask_rows
        self._automata = automata
        self._row_slot = row_slot

    def add_open(self, lane: GraphLane, num_rows: int, begun: GraphMark, *, name: str) -> None:
        """Add the step that fills the mask rows of the drafts to be verified.

        Parameters
        ----------
        lane
            Grammar lane.
        num_rows
            Maximum number of mask rows per request that the round needs.
        begun
            Mark that the model lane reaches when slots have been assigned to batch rows. The copies
            and kernels of the step wait for this mark, but the guided decoder does not.
        name
            Node name of the step.
        """
        if self._decoder is not None:
            self._decoder.add(lane, self._decoder.open_work(), name=name)
        lane.wait(begun)
        if self._decoder is not None:
            self._copy_rows(lane, 0, num_rows)
        if self._automata is not None:
            copied = self._decoder is not None
            self._automata.add_open(lane, self._row_slot, num_rows, copied=copied)

    def add_commit(self, lane: GraphLane, row: int | None, *, name: str) -> None:
        """Add the step that advances the grammar by the committed tokens.

        Parameters
        ----------
        lane
            Grammar lane, ordered after verification.
        row
            Mask row that constrains the first draft of this round; None if the first draft is not
            sampled under a mask row.
        name
            Node name of the step.
        """
        if self._decoder is not None:
            self._decoder.add(lane, self._decoder.commit_work(), name=name)
            if row is not None:
                self._copy_rows(lane, row, row + 1)
        if self._automata is not None:
            self._automata.add_commit(lane, self._row_slot, fill=row is not None)

    def add_draft(self, lane: GraphLane, j: int, rows: range, *, name: str) -> None:
        """Add the grammar step for draft or level `j` (`GuidedDecoder.draft_work`).

        Parameters
        ----------
        lane
            Grammar lane, ordered after the kernel that writes the drafts or candidates.
        j
            Number of the draft or level.
        rows
            Mask rows that the step may fill and that constrain the next drafts.
        name
            Node name of the step.
        """
        if self._decoder is not None:
            self._decoder.add(lane, self._decoder.draft_work(j), name=name)
            if rows:
                self._copy_rows(lane, rows.start, rows.stop)
        if self._automata is not None:
            self._automata.add_draft(lane, self._row_slot, j)

    def _copy_rows(self, lane: GraphLane, first: int, end: int) -> None:
        self._mask_rows.copy_to_device(lane, self._row_slot, first, end)
