"""One drafter in front of another: what the first knows at once, and the second's drafts behind."""

from __future__ import annotations

from graft.cudagraph.errors import OptionError
from graft.cudagraph.lanes import Lane
from graft.cudagraph.memory import DeviceArray
from graft.models.drafters.base import Drafter, DrafterChoice, DrafterContext
from graft.models.drafters.feed import Feed
from graft.models.drafters.load import make_drafter
from graft.models.errors import DrafterError
from graft.models.llm.rows import Rows

__all__ = ["CascadeDrafter"]


class CascadeDrafter(Drafter):
    """Drafts what `first` proposes; where that ends, `then` goes on, level by level.

    Parameters
    ----------
    first : its drafts come all at once, as those of `NGram` do.
    then : its drafts come level by level, as those of a model do.

    Raises
    ------
    OptionError
        Unless they do, chains and as many of either; or they read different layers of the target.
    """

    def __init__(self, room: DrafterContext, first: DrafterChoice, then: DrafterChoice):
        self._first, self._then = (make_drafter(choice, room) for choice in (first, then))
        if self._first.shape.levels or not self._then.shape.levels:
            raise OptionError(
                "Ahead: drafts of the first must come all at once, of the second level by level"
            )
        if self._first.shape.branch > 1 or self._then.shape.branch > 1:
            raise OptionError("Ahead: drafts of both must be chains; no tree grows behind others'")
        if self._first.reads_rows:
            raise OptionError("Ahead: the first reads mask rows, which are made for the second")
        if self._first.shape.nodes != self._then.shape.nodes:
            raise OptionError(
                f"Ahead: {self._first.shape.nodes} drafts of the first, and "
                f"{self._then.shape.nodes} of the second"
            )
        both = (self._first, self._then)
        self.shape = self._then.shape
        self.vocab = self._then.vocab
        self.taps = tuple(sorted({tap for drafter in both for tap in drafter.taps}))
        if any(drafter.taps not in ((), self.taps) for drafter in both):
            raise OptionError("Ahead: the two read different layers of the target")
        looks = [drafter.lookahead for drafter in both]
        self.lookahead = None if None in looks else max(n for n in looks if n is not None)
        self.caches = (*self._first.caches, *self._then.caches)

    @property
    def proposes(self) -> bool:
        return True

    def prefill(self, lane: Lane, own: Rows, following: Rows, features: DeviceArray | None) -> None:
        for drafter in (self._first, self._then):
            drafter.prefill(lane, own, following, features)

    def resume(self, lane: Lane, own: Rows) -> None:
        for drafter in (self._first, self._then):
            drafter.resume(lane, own)

    def start(self, lane: Lane, feed: Feed) -> DeviceArray | None:
        self._first.start(lane, feed)
        return self._then.start(lane, feed)

    def step(self, lane: Lane, feed: Feed, level: int) -> DeviceArray:
        return self._then.step(lane, feed, level)

    def failure(self, slot: int, epoch: int) -> DrafterError | None:
        return self._first.failure(slot, epoch) or self._then.failure(slot, epoch)
