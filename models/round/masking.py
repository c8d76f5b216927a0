"""Draft-masking strategies: the graph nodes added before and after each draft level.

A *level* of drafts is one draft of a chain, or all nodes of a tree at one depth. A round's graph
has two lanes, in-order sequences of nodes: the model lane runs kernels, and the grammar lane runs
the host functions of the grammar. The lanes synchronize at marks: one lane records a mark, and the
other lane waits for it. In the diagrams, ``start`` is the drafter's forward pass over the committed
tokens, and ``step j`` its pass over draft or level j. ``--^`` shows where the model lane waits for
the grammar lane, and the brackets above it what the grammar lane has computed: ``[row j]`` is the
mask row for draft j + 1, ``[result]`` the result of testing candidates::

    FillMasking          model    verify - start - [row 0] - draft 1 - step 1 - [row 1] - draft 2
                         grammar      `- commit, row 0 -^         `- fill row 1 --^

    ProbeMasking         model    verify - start - candidates 1 - [result] - draft 1 - step 1 - ...
                         grammar      `- commit ------------- probe 1 --^

    LatticeProbeMasking  model    verify - start - candidates of all levels - [result] - drafts
                         grammar      `- commit ----------------------- probe --^

    NoMasking            model    verify - start - draft 1 - step 1 - draft 2 - ...
                         grammar      `- commit

FillMasking
    Samples each draft under its mask row. The grammar fills that row concurrently with the drafter
    forward pass that produces the logits.
ProbeMasking
    Lets the grammar test the drafter's best candidates of a level. All mask rows are filled during
    the next target forward pass.
LatticeProbeMasking
    Tests the candidates of all levels in one grammar step, for a chain or a tree. It requires a
    drafter that produces the logits of all levels in one forward pass.
NoMasking
    Samples drafts without the grammar. All mask rows are filled during the next target forward
    pass, and verification rejects illegal drafts.
"""

from __future__ import annotations

from collections.abc import Callable

from graft.cudagraph.driver.memory import DeviceArray
from graft.cudagraph.graph.graph import GraphLane, GraphMark
from graft.models.drafters.base import Drafter
from graft.models.drafters.feed import Feed
from graft.models.round.grammar_steps import GrammarSteps
from graft.models.round.timing import Stamps
from graft.sampling.chain import ChainSampler
from graft.sampling.tree import TreeSampler

__all__ = [
    "DraftMasking",
    "FillMasking",
    "LatticeProbeMasking",
    "MASKING_CLASSES",
    "NoMasking",
    "ProbeMasking",
]


class DraftMasking:
    """Base class of the draft-masking strategies.

    It adds the commit step, the grammar step that advances the matchers by the tokens that
    verification has committed. Subclasses add nodes for the draft levels.

    Parameters
    ----------
    steps
        Adds the grammar steps to the grammar lane.
    model_lane, grammar_lane
        Lanes of the round.
    wait
        Function that makes the model lane wait until the grammar lane has reached a mark
        (`GraphLane.record`).
    stamps
        Time stamps of the round. Each wait of the model lane is timed as a separate `Part`.
    feed
        Arrays that the drafter reads and writes.
    draft_sampler
        Samples the drafts: a `ChainSampler` for a chain, a `TreeSampler` for a tree.
    levels
        Number of draft levels in this round.

    Attributes
    ----------
    commit_name
        Node name of the commit step.
    commit_row
        Index of the mask row that is copied to the device after the commit step, because the first
        draft of this round is sampled under this mask row. None if drafts are not sampled under
        mask rows.
    """

    commit_name = "commit, fill row 0"
    commit_row: int | None = None

    def __init__(
        self,
        steps: GrammarSteps,
        model_lane: GraphLane,
        grammar_lane: GraphLane,
        wait: Callable[[GraphMark], None],
        stamps: Stamps,
        feed: Feed,
        draft_sampler: ChainSampler | TreeSampler,
        levels: int,
    ):
        self._steps = steps
        self._model_lane = model_lane
        self._grammar_lane = grammar_lane
        self._wait = wait
        self._stamps = stamps
        self._feed = feed
        self._draft_sampler = draft_sampler
        self._levels = levels
        self._step_done: GraphMark

    def add_commit(self) -> None:
        """Add the grammar step that advances the matchers by the committed tokens.

        Call this method after verification has been added to the model lane.
        """
        self._request_step("commit")
        self._steps.add_commit(self._grammar_lane, self.commit_row, name=self.commit_name)
        self._step_done = self._grammar_lane.record("commit: done")

    def add_all_levels(self, drafter: Drafter, max_drafts: int) -> int:
        """Add the nodes that choose the drafts of all levels at once; by default none.

        Call this method after the logits of level 0 have been added to the model lane.

        Parameters
        ----------
        drafter
            Drafter of the round.
        max_drafts
            Maximum number of drafts per request.

        Returns
        -------
        int
            Number of levels that remain to be drafted level by level.
        """
        return self._levels

    def before_draft(self, level: int, logits: DeviceArray) -> None:
        """Add the nodes that run before the drafts of a level are sampled; by default none.

        Levels are numbered from 1. `logits` are the logits of the level. The nodes that compute
        them have been added to the model lane before this call.
        """

    def after_draft(self, level: int) -> None:
        """Add the nodes that run after the drafts of a level are sampled; by default none."""

    def wait_for_commit(self) -> None:
        """Make the model lane wait for the mask rows that the commit step fills."""
        self._stamps.end("drafter extend")
        self._wait_for_step("wait for row 0", self.commit_name)

    def _add_draft_step(self, j: int, name: str, rows: range) -> None:
        """Add the grammar step for draft `j`, which runs after all present nodes of the model lane.

        `rows` are the mask rows (token bitmasks) that the step may fill; they constrain the next
        drafts.
        """
        self._request_step(name)
        self._steps.add_draft(self._grammar_lane, j, rows, name=name)
        self._step_done = self._grammar_lane.record(f"{name}: done")

    def _request_step(self, name: str) -> None:
        """Make the grammar lane wait for all nodes that the model lane has so far.

        The caller then adds a grammar step; `name` is the name of its node.
        """
        self._grammar_lane.wait(self._model_lane.record(f"{name}: requested"))

    def _wait_for_step(self, part: str, step: str) -> None:
        """Make the model lane wait for the grammar step that was added last, the node named `step`.

        The timeline records the waiting time as part `part` of the round.
        """
        self._wait(self._step_done)
        self._stamps.end(part, step)

    def _end_drafter_part(self, level: int) -> None:
        """End the timed part in which the drafter computed the logits of `level`."""
        self._stamps.end("drafter extend" if level == 1 else "drafting")


class NoMasking(DraftMasking):
    """Sample drafts without the grammar."""

    def before_draft(self, level: int, logits: DeviceArray) -> None:
        if level == 1:
            self._stamps.end("drafter extend")


class FillMasking(DraftMasking):
    """Fill a mask row for each draft before the draft is sampled: row ``j - 1`` for draft ``j``."""

    commit_row = 0

    def before_draft(self, level: int, logits: DeviceArray) -> None:
        self._end_drafter_part(level)
        step = self.commit_name if level == 1 else f"fill row {level - 1}"
        self._wait_for_step(f"wait for row {level - 1}", step)

    def after_draft(self, level: int) -> None:
        if level < self._levels:
            self._add_draft_step(level, f"fill row {level}", range(level, level + 1))


class ProbeMasking(DraftMasking):
    """At each level, draft the best of those candidates that the grammar accepts."""

    commit_name = "commit"

    def before_draft(self, level: int, logits: DeviceArray) -> None:
        self._draft_sampler.candidates(self._model_lane, logits, self._feed.row_slot, level)
        self._end_drafter_part(level)
        name = f"probe {level}"
        # If no candidate for a draft of a chain is legal, the step fills the draft's mask row.
        rows = range(level - 1, level) if self._feed.branch == 1 else range(0)
        self._add_draft_step(level, name, rows)
        self._wait_for_step(f"wait for row {level - 1}", name)


class LatticeProbeMasking(DraftMasking):
    """Draft only legal paths through the candidates of all levels.

    In a chain, only the drafts of requests with a grammar are chosen in this way. The drafts of
    other requests are sampled level by level.
    """

    commit_name = "commit"

    def add_all_levels(self, drafter: Drafter, max_drafts: int) -> int:
        if not self._levels:
            return 0
        feed = self._feed
        sampler = feed.sampler
        logits = drafter.all_levels(feed)[: self._levels * feed.batch]
        sampler.chain.candidates(self._model_lane, logits, feed.row_slot, max_drafts)
        self._stamps.end("drafter extend")
        # If a chain ends early and the option `forced_drafts` is set, the step fills the mask row
        # after the last draft, because this row may force the next token.
        rows = range(max_drafts) if feed.branch == 1 else range(0)
        self._add_draft_step(1, "lattice probe", rows)
        self._wait_for_step("wait for drafts", "lattice probe")
        sampler.proposals.add_drafts(self._model_lane, None, feed.row_slot, max_drafts=max_drafts)
        return 0 if feed.branch > 1 else self._levels


#: Class for each value of `DraftMode.masking`.
MASKING_CLASSES: dict[str, type[DraftMasking]] = {
    "none": NoMasking,
    "fill": FillMasking,
    "probe": ProbeMasking,
    "lattice-probe": LatticeProbeMasking,
}
