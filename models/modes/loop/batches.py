"""Batches that can run in generation loops."""

from __future__ import annotations

from collections.abc import Sequence

from graft.models.engine.request_state import RequestState
from graft.models.engine.slots import SlotManager
from graft.models.modes.automaton_steps import GRAMMAR_STEPS
from graft.models.modes.loop.replays import LoopReplays
from graft.sampling.mode import DraftMode

__all__ = ["Loops"]

#: Maximum number of pages that a request gets for the rounds of a loop after the first one.
MAX_PAGES_AHEAD = 16


class Loops:
    """Tells which batches can run in generation loops, and reserves the pages of their requests.

    Parameters
    ----------
    replays
        Launches rounds and loops.
    slots
        Slot manager of the engine.
    mode
        Draft mode of the engine.
    has_automata
        Whether grammar steps can run on the device.
    """

    def __init__(
        self, replays: LoopReplays, slots: SlotManager, mode: DraftMode, *, has_automata: bool
    ):
        self._replays = replays
        self._slots = slots
        self._has_automata = has_automata
        # With lattice probing, a grammar step chooses the drafts of all trees.
        self._has_lattice_trees = mode.is_lattice and mode.branch > 1

    @property
    def grammar_places(self) -> tuple[str, ...]:
        """Places of grammar steps for which loops are needed, see `GraphKey.grammar`."""
        if self._has_automata:
            return GRAMMAR_STEPS
        return ("host",) if self._has_lattice_trees else ("host", "none")

    def grammar_place(self, place: str, *, is_guided: bool) -> str:
        """Return the place of the grammar steps of a loop for a batch, see `GraphKey.grammar`.

        Parameters
        ----------
        place
            Place of the grammar steps of a single round, one of `GRAMMAR_STEPS`.
        is_guided
            Whether a request of the batch has a grammar. If not, a loop needs no grammar steps.
        """
        if is_guided or self._has_lattice_trees or self._has_automata:
            return place
        return "none"

    @property
    def running(self) -> bool:
        """Whether a loop is running. Nothing may be launched meanwhile."""
        return self._replays.looping

    def leave(self) -> None:
        """Ask the loop that is running, if any, to end after the current round."""
        self._replays.leave_loop()

    @property
    def possible(self) -> bool:
        """Whether a loop can be launched; not while another request is being prefilled."""
        return not self._slots.num_prefilling

    def reserve_pages(self, states: Sequence[RequestState]) -> None:
        """Reserve pages for the requests of a loop."""
        self._slots.reserve_ahead(states, MAX_PAGES_AHEAD)
