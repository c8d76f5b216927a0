"""Cascade of two drafters: a cheap one proposes first, a draft model continues its proposals."""

from __future__ import annotations

from graft.cudagraph.driver.memory import DeviceArray
from graft.cudagraph.errors import OptionError
from graft.cudagraph.lanes import Lane
from graft.models.drafters.base import Drafter, DrafterChoice, DrafterContext
from graft.models.drafters.feed import Feed
from graft.models.drafters.load import make_drafter
from graft.models.errors import DrafterError
from graft.models.llm.rows import Rows

__all__ = ["CascadeDrafter"]


class CascadeDrafter(Drafter):
    """Drafter that uses the proposals of `first` and drafts the levels after them with `then`.

    `first` makes all drafts at once, such as `NGram`; `then` drafts level by level, such as a draft
    model.

    Raises
    ------
    OptionError
        If `first` drafts level by level or reads mask rows, if `then` makes all drafts at once, if
        a drafter drafts trees, or if the two drafters differ in the number of drafts or in the
        target layers that they read.
    """

    def __init__(self, context: DrafterContext, first: DrafterChoice, then: DrafterChoice):
        self._first = make_drafter(first, context)
        self._then = make_drafter(then, context)
        self._check()
        drafters = (self._first, self._then)
        self.shape = self._then.shape
        self.vocab = self._then.vocab
        self.num_candidates = self._then.num_candidates
        self.feature_layers = self._first.feature_layers or self._then.feature_layers
        for drafter in drafters:
            if drafter.feature_layers not in ((), self.feature_layers):
                raise OptionError(
                    f"CascadeDrafter: `first` reads the target layers {self._first.feature_layers} "
                    f"and `then` {self._then.feature_layers}; both must read the same layers"
                )
        if self._first.lookahead is None or self._then.lookahead is None:
            self.lookahead = None
        else:
            self.lookahead = max(self._first.lookahead, self._then.lookahead)
        self.feeds_blocks = self._first.feeds_blocks or self._then.feeds_blocks
        self.caches = (*self._first.caches, *self._then.caches)

    def _check(self) -> None:
        first = self._first
        then = self._then
        if first.shape.levels or not then.shape.levels:
            raise OptionError(
                "CascadeDrafter: `first` must make all drafts at once, `then` must draft level by "
                "level"
            )
        if first.shape.branch > 1 or then.shape.branch > 1:
            raise OptionError("CascadeDrafter: both drafters must draft chains, not trees")
        if first.reads_mask_rows:
            raise OptionError(
                "CascadeDrafter: `first` must not read the grammar's mask rows (reads_mask_rows); "
                "use a lookup such as NGram"
            )
        if first.shape.nodes != then.shape.nodes:
            raise OptionError(
                f"CascadeDrafter: `first` makes {first.shape.nodes} drafts and `then` "
                f"{then.shape.nodes}; both must make the same number"
            )

    @property
    def proposes(self) -> bool:
        return True

    def prefill(
        self, lane: Lane, rows: Rows, next_rows: Rows, features: DeviceArray | None
    ) -> None:
        for drafter in (self._first, self._then):
            drafter.prefill(lane, rows, next_rows, features)

    def resume(self, lane: Lane, rows: Rows) -> None:
        for drafter in (self._first, self._then):
            drafter.resume(lane, rows)

    def start(self, lane: Lane, feed: Feed) -> DeviceArray | None:
        self._first.start(lane, feed)
        return self._then.start(lane, feed)

    def step(self, lane: Lane, feed: Feed, level: int) -> DeviceArray:
        return self._then.step(lane, feed, level)

    def failure(self, slot: int, epoch: int) -> DrafterError | None:
        return self._first.failure(slot, epoch) or self._then.failure(slot, epoch)
