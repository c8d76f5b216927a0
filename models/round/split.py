"""Rounds that are split into several graphs, for measuring the benefit of a single graph."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from graft.cudagraph.device import Stream
from graft.cudagraph.graph.graph import GraphExec, GraphMark
from graft.models.drafters.feed import RoundScratch
from graft.models.round.round import RoundGraph, RoundResources

__all__ = ["SplitRound"]


class SplitRound(RoundGraph):
    """A round whose drafting is in separate graphs (``composition="two"``).

    The first graph ends with verification. After that, each grammar step that the drafter waits
    for ends a graph, and drafting continues in the next graph. The host launches each graph after
    the previous one has completed, so rounds cannot overlap. Outputs are the same as those of a
    `RoundGraph`.
    """

    def __init__(
        self,
        resources: RoundResources,
        scratch: RoundScratch,
        batch: int,
        drafts: int,
        max_new_drafts: int,
        *,
        has_host_steps: bool = True,
    ):
        super().__init__(
            resources, scratch, batch, drafts, max_new_drafts, has_host_steps=has_host_steps
        )
        self._pending: deque[GraphExec] = deque()  # graphs of the current round to be launched

    def launch(self, stream: Stream) -> None:
        """Launch the first graph of the round."""
        super().launch(stream)
        self._pending.extend(self.execs[1:])

    def finish(self, stream: Stream, wait_for: Callable[[GraphExec], None]) -> None:
        """Launch the remaining graphs of the round, each after the previous one has completed.

        `wait_for` must return when the graph that it gets has completed. If it raises an exception,
        for example because of Ctrl-C, the next call continues with the graphs that have not been
        launched.
        """
        while self._pending:
            executable = self._pending.popleft()
            executable.launch(stream)
            if self._pending:
                wait_for(executable)
                self.check()

    def _wait(self, mark: GraphMark) -> None:
        self._start_graph()

    def _start_drafting(self) -> None:
        self._start_graph()
        self._stamps.end("host")

    def _start_graph(self) -> None:
        """End the current graph and continue both lanes in a new one.

        The old graph is complete when the new one is launched. Nodes of the new graph therefore
        need not wait for a mark (`GraphMark`) in the old one.
        """
        self._add_graph()
        for lane in (self._model, self._grammar):
            lane.graph = self.graphs[-1].lane(lane.name).graph
