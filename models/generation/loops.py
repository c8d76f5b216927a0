"""Choice of the batches that run in generation loops."""

from __future__ import annotations

from collections.abc import Sequence

from graft.models.engine.request_state import RequestState
from graft.models.engine.slots import SlotManager
from graft.models.generation.graph import GenerationGraph

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
    has_all_pages
        Whether the KV caches have enough pages for a request of maximum length in every batch row.

    Attributes
    ----------
    graphs
        Graph of a loop for each (number of batch rows, number of drafts per batch row).
    """

    def __init__(self, slots: SlotManager, *, has_all_pages: bool):
        self.graphs: dict[tuple[int, int], GenerationGraph] = {}
        self._slots = slots
        self._max_pages = None if has_all_pages else PAGES_AHEAD

    def choose(
        self,
        batch: int,
        drafts: int,
        states: Sequence[RequestState],
    ) -> GenerationGraph | None:
        """Return the loop for a batch of requests, or None if the batch must run in rounds.

        A batch runs in rounds if one of its requests needs host steps, and while another request is
        being prefilled.
        """
        graph = self.graphs.get((batch, drafts))
        if graph is None or self._slots.num_prefilling:
            return None
        if not all(state.promoted or state.matcher is None for state in states):
            return None
        for state in states:
            self._slots.reserve_ahead(state, self._max_pages)
        return graph
