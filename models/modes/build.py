"""Modes of an engine: the graphs of all modes, and everything that launches them."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from graft.cudagraph.device import Stream
from graft.cudagraph.errors import GraftError
from graft.cudagraph.lanes import StreamLane
from graft.models.drafters.feed import RoundScratch
from graft.models.engine.options import Options
from graft.models.engine.replay import Replays
from graft.models.engine.slots import SlotManager, SlotObserver
from graft.models.modes.automaton_steps import GRAMMAR_STEPS
from graft.models.modes.launch import GraphKey, LaunchModes
from graft.models.modes.loop.batches import Loops
from graft.models.modes.loop.graph import GenerationGraph
from graft.models.modes.loop.replays import LoopReplays
from graft.models.modes.parts import ModeParts
from graft.models.modes.promotion import Promotion
from graft.models.round.budget import DraftBudget
from graft.models.round.round import RoundGraph

__all__ = ["EngineModes"]

#: Maximum number of rounds of a generation loop with ``draft_length="auto"``. The draft length is
#: chosen for each loop.
ROUNDS_PER_LENGTH = 32


def _batch_buckets(max_batch_size: int) -> list[int]:
    """Return the batch sizes for which graphs are built: powers of two, and the maximum."""
    sizes = []
    size = 1
    while size < max_batch_size:
        sizes.append(size)
        size *= 2
    return [*sizes, max_batch_size]


class EngineModes(LaunchModes):
    """Builds the graphs of all modes of an engine, and selects the graph of each launch.

    Parameters
    ----------
    parts
        Parts of all graphs.
    options
        Options of the engine.
    stream
        Stream of the rounds.
    budget
        Chooses the draft length of each round.
    round_class
        Class of the graphs of single rounds.

    Attributes
    ----------
    replays : Replays
        Launches graphs and reads their results.
    observer : SlotObserver
        Must be the observer of the slot manager.
    """

    def __init__(
        self,
        parts: ModeParts,
        options: Options,
        stream: Stream,
        budget: DraftBudget,
        round_class: type[RoundGraph],
    ):
        super().__init__({})
        self._parts = parts
        self._options = options
        self._budget = budget
        self._round_class = round_class
        self.observer = SlotObserver()
        if parts.automata is not None:
            self.promotion = Promotion(parts.automata, StreamLane(stream))
            self.observer = self.promotion
        self.replays = Replays(parts.round, stream, budget)
        if parts.control is not None:
            self.replays = LoopReplays(parts.round, stream, budget, parts.control)

    def build(self, slots: SlotManager, run_empty: Callable[[RoundGraph], None]) -> None:
        """Build the graphs of all modes for each batch bucket and draft length.

        Parameters
        ----------
        slots
            Slot manager of the engine.
        run_empty
            Is called with each graph, to run it without requests.

        Raises
        ------
        OptionError
            If ``generation="graph"`` is not possible.
        """
        scratch = self._parts.round.scratch(self._options.max_batch_size)
        buckets = _batch_buckets(self._options.max_batch_size)
        places = GRAMMAR_STEPS if self._parts.automata is not None else GRAMMAR_STEPS[:1]
        for batch, drafts, place in itertools.product(buckets, self._budget.lengths, places):
            key = GraphKey(batch, drafts, place)
            graph = self._make_graph(key, scratch)
            if place == "host":
                self.round_graphs[batch, drafts] = graph
            else:
                self.graphs[key] = graph
            run_empty(graph)
        if not isinstance(self.replays, LoopReplays):
            return
        self.loops = Loops(
            self.replays,
            slots,
            self._parts.round.mode,
            has_automata=self._parts.automata is not None,
        )
        for (batch, drafts), place in itertools.product(
            self.round_graphs, self.loops.grammar_places
        ):
            key = GraphKey(batch, drafts, place, repeats=True)
            self.graphs[key] = self._make_graph(key, scratch)
            run_empty(self.graphs[key])

    def _make_graph(self, key: GraphKey, scratch: RoundScratch) -> RoundGraph:
        """Build the graph of a key."""
        generated = self._budget.drafts_to_generate(key.batch, key.drafts)
        arguments = (self._parts.round, scratch, key.batch, key.drafts, generated)
        if not key.repeats:
            return self._round_class(*arguments, key.grammar)
        if self._parts.control is None:
            raise GraftError("generation loops need a LoopControl")
        max_rounds = None if len(self._budget.lengths) == 1 else ROUNDS_PER_LENGTH
        return GenerationGraph(*arguments, self._parts.control, key.grammar, max_rounds)

    def device_counters(self) -> dict[str, int]:
        """Return the counters of grammar steps on the device. Waits for the device."""
        automata = self._parts.automata
        if automata is None:
            return {}
        self.leave_loop()
        return automata.counters()

    def count_forced_tokens(self) -> int:
        """Return the number of accepted drafts that grammar steps on the device forced.

        Waits for the device with the option `forced_drafts`.
        """
        if not self._options.forced_drafts:
            return 0
        return self.device_counters().get("forced_tokens", 0)

    def close(self) -> None:
        """Drop the references to device objects. The graphs must have been closed.

        The objects refer to one another in cycles, and frames of a traceback may refer to them.
        Without this method, device memory would be freed only by the garbage collector.
        """
        self.round_graphs.clear()
        self.graphs.clear()
        self.loops = None
        self.promotion = None
        self.observer = SlotObserver()
        del self._parts, self.replays
