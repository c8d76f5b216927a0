"""How drafts come to be legal: what stands on a round's lanes before and after each level.

The two lanes of a round meet at marks, where drafts come level by level::

    Fill     model    verify - start - [row 0] - draft 1 - step 1 - [row 1] - draft 2 - ...
             grammar      `- commit, row 0 -^         `- fill row 1 --^

    Probe    model    verify - start - candidates 1 - [answer] - draft 1 - step 1 - ...
             grammar      `- commit ------------- probe 1 --^

    Walk     model    verify - start - candidates of all levels - [answer] - drafts
             grammar      `- commit --------------------- walk --^

    Blind    model    verify - start - draft 1 - step 1 - draft 2 - ...
             grammar      `- commit

In Fill each draft is drawn under its mask row, made beside the drafter forward that leads to it.
In Probe the grammar tests the drafter's best candidates, and all rows are filled beside the next
target forward, as they are for Blind, whose illegal drafts are refused there. Walk is the Probe of
drafters whose logits are all there at once: the grammar joins once a round, for a chain or a tree.
"""

from __future__ import annotations

from collections.abc import Callable

from graft.cudagraph.graph import GraphLane, GraphMark
from graft.cudagraph.hostwork import NativeWork
from graft.cudagraph.memory import DeviceArray
from graft.grammar.decoder import GuidedDecoder
from graft.models.drafters.base import Drafter
from graft.models.drafters.feed import Feed
from graft.models.round.timing import Stamps
from graft.sampling.sampler import Sampler
from graft.sampling.tree import TreeSampler

__all__ = ["NoMasking", "FillMasking", "DraftMasking", "ProbeMasking", "LatticeProbeMasking"]


class DraftMasking:
    """Base of the four: the commit, and no more.

    Parameters
    ----------
    guide : makes the grammar's steps.
    model, grammar : the round's lanes.
    wait : lets the model's lane wait for a mark.
    stamps : told where the model waits.
    feed : the bucket's rows.
    draws : what draws the drafts: a chain's, or a tree's.
    levels : how many levels are drafted.
    """

    name = "none"
    masked = False
    commit = "commit, fill row 0"
    committed_row: int | None = None  # that drafts are drawn under

    def __init__(
        self,
        guide: GuidedDecoder,
        model: GraphLane,
        grammar: GraphLane,
        wait: Callable[[GraphMark], None],
        stamps: Stamps,
        feed: Feed,
        draws: Sampler | TreeSampler,
        levels: int,
    ):
        self._guide = guide
        self._model = model
        self._grammar = grammar
        self._let_wait = wait
        self._stamps = stamps
        self._feed = feed
        self._draws = draws
        self._levels = levels
        self._ready: GraphMark

    def committed(self) -> None:
        """Behind verification: the matchers take what was committed."""
        work = self._guide.commit_work()
        self._ready = self._ask("commit", work, self.commit, self.committed_row)

    def at_once(self, drafter: Drafter, most: int) -> int:
        """Behind the logits of level 0: of `most` drafts make those that need no level's end;
        returns how many levels are left to be drawn."""
        return self._levels

    def before(self, level: int, logits: DeviceArray) -> None:
        """Between a level's logits and its draft, levels from 1."""

    def after(self, level: int) -> None:
        """Behind a level's draft."""

    def wait_rows(self) -> None:
        """Let the model wait for the rows that follow the commit."""
        self._stamps.end("drafter extend")
        self._wait("wait for row 0", self.commit)

    def _ask(self, mark: str, work: NativeWork, name: str, row: int | None = None) -> GraphMark:
        """A step of the grammar, once the model's lane is here; it is done at the mark, and the
        mask row that it fills for this round is on the device."""
        self._grammar.wait(self._model.record(f"{mark}: asked"))
        self._guide.add(self._grammar, work, name=name)
        if row is not None:
            self._feed.sampler.exchange.copy_masks_to_device(self._grammar, row, row + 1)
        return self._grammar.record(f"{mark}: done")

    def _wait(self, part: str, step: str) -> None:
        self._let_wait(self._ready)
        self._stamps.end(part, step)

    def _drafted(self, level: int) -> None:
        self._stamps.end("drafter extend" if level == 1 else "drafting")


class NoMasking(DraftMasking):
    """Drafts are made without a look at the grammar."""

    def before(self, level: int, logits: DeviceArray) -> None:
        if level == 1:
            self._stamps.end("drafter extend")


class FillMasking(DraftMasking):
    """Draft j is drawn under mask row j - 1."""

    name = "fill"
    masked = True
    committed_row = 0

    def before(self, level: int, logits: DeviceArray) -> None:
        self._drafted(level)
        step = self.commit if level == 1 else f"fill row {level - 1}"
        self._wait(f"wait for row {level - 1}", step)

    def after(self, level: int) -> None:
        if level < self._levels:
            name = f"fill row {level}"
            self._ready = self._ask(name, self._guide.draft_work(level), name, row=level)


class ProbeMasking(DraftMasking):
    """Drafts are the first of the drafter's candidates that the grammar takes."""

    name = "probe"
    masked = True
    commit = "commit"

    def before(self, level: int, logits: DeviceArray) -> None:
        self._draws.candidates(self._model, logits, self._feed.row_slot, level)
        self._drafted(level)
        name = f"probe {level}"
        self._ready = self._ask(name, self._guide.draft_work(level), name)
        self._wait(f"wait for row {level - 1}", name)


class LatticeProbeMasking(DraftMasking):
    """Drafts are legal paths through the candidates of all levels; of a chain, those of requests
    without a grammar are left to be drawn."""

    name = "lattice-probe"
    masked = True
    commit = "commit"

    def at_once(self, drafter: Drafter, most: int) -> int:
        if not self._levels:
            return 0
        feed = self._feed
        sampler = self._feed.sampler
        row_slot = self._feed.row_slot
        logits = drafter.all_levels(feed)[: self._levels * feed.batch]
        sampler.candidates(self._model, logits, row_slot, most)
        self._stamps.end("drafter extend")
        self._ready = self._ask("walk", self._guide.draft_work(1), "walk")
        self._wait("wait for drafts", "walk")
        sampler.place(self._model, None, row_slot, most=most)
        return 0 if feed.branch > 1 else self._levels
