"""Choice of the batches that run in generation loops."""

from __future__ import annotations

from collections.abc import Sequence

from graft.models.engine.request_state import RequestState
from graft.models.engine.slots import SlotManager
from graft.models.generation.graph import GenerationGraph
from graft.models.round.automaton_steps import GRAMMAR_STEPS
from graft.models.round.round import RoundGraph
from graft.sampling.mode import DraftMode

__all__ = ["Loops"]

#: If the KV caches are too small for all batch rows, a request gets at most this number of pages
#: for the rounds of a loop after the first one.
PAGES_AHEAD = 16


class Loops:
    """Chooses the graph of a generation loop for a batch, and reserves the pages of its requests.

    Parameters
    ----------
    slots
        Slot manager of the engine.
    mode
        Draft mode of the engine.
    has_all_pages
        Whether the KV caches have enough pages for a request of maximum length in every batch row.

    Attributes
    ----------
    graphs
        Graph of a loop for each (place of the grammar steps, number of batch rows, number of drafts
        per batch row). The places are those of `GRAMMAR_STEPS`.
    """

    def __init__(self, slots: SlotManager, mode: DraftMode, *, has_all_pages: bool):
        self.graphs: dict[tuple[str, int, int], GenerationGraph] = {}
        self._slots = slots
        # With lattice probing, a grammar step chooses the drafts of all trees.
        self._has_lattice_trees = mode.is_lattice and mode.branch > 1
        self._max_pages = None if has_all_pages else PAGES_AHEAD

    def grammar_places(self, has_automata: bool) -> tuple[str, ...]:
        """Return the places of grammar steps for which loops are needed."""
        if has_automata:
            return GRAMMAR_STEPS
        return ("host",) if self._has_lattice_trees else ("host", "device")

    def choose(self, graph: RoundGraph, states: Sequence[RequestState]) -> GenerationGraph | None:
        """Return the loop for a batch of requests; None while another request is being prefilled.

        Parameters
        ----------
        graph
            Graph of a single round of this batch.
        states
            Requests of the batch.
        """
        if self._slots.num_prefilling:
            return None
        grammar = graph.grammar
        if not self._has_lattice_trees and all(state.matcher is None for state in states):
            grammar = "device"
        for state in states:
            self._slots.reserve_ahead(state, self._max_pages)
        return self.graphs[grammar, graph.batch, graph.drafts]
