"""Seating: which request has which slot and pages, from joining until nothing names it any more.

Invariants
----------
1. A slot and its pages belong to a request from `join` until every replay launched before `leave`
   has retired; only then anybody else gets them. Until then a replay in flight may still write
   the slot's pages and state and advance its matcher.
2. What joins is enqueued before the first replay that names it is launched, on the same stream;
   its staging areas are rewritten only by the slot's next owner, hence after they were read.
3. Pages cover every position that a replay in flight can write; see `check_reserve`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from graft.cudagraph.errors import GraftError
from graft.models.running import Running

__all__ = ["Cache", "Prompts", "Seating", "SlotTable"]


class Cache(Protocol):
    """Pages of a slot; `PagedKV` is one."""

    @property
    def page_size(self) -> int: ...
    def pages_of(self, slot: int) -> Sequence[int]: ...
    def allocate(self, slot: int, positions: int) -> bool: ...
    def release(self, slot: int) -> None: ...
    def set_table(self, lane: Any, slot: int) -> None: ...


class Prompts(Protocol):
    """Writes the keys and values of a request's tokens; `Prefill` is one."""

    def run(self, lane: Any, slot: int, tokens: Sequence[int]) -> None: ...


class SlotTable(Protocol):
    """What the device keeps per slot; `SlotState` is one."""

    @property
    def join(self) -> Callable[..., None]: ...
    def leave(self, lane: Any, slot: int) -> None: ...


class Seating:
    """Gives slots and pages to requests, and takes them back when nothing can touch them.

    Parameters
    ----------
    slots : how many there are; more than rows of a round, so that a row can be taken over while
        its last owner's slot is still named by a replay in flight.
    rows : most requests seated at once.
    caches : every paged cache; a request needs its pages in all of them.
    prompts, table : write the request's tokens and its state.
    lane : where that is enqueued; the replays' stream.

    Attributes
    ----------
    seated : by slot, in the order of joining.
    """

    def __init__(
        self,
        slots: int,
        rows: int,
        caches: Sequence[Cache],
        prompts: Prompts,
        table: SlotTable,
        lane: Any,
    ):
        self._rows, self._caches, self._lane = rows, caches, lane
        self._prompts, self._table = prompts, table
        self.seated: dict[int, Running] = {}
        self._free = list(range(slots))
        self._leaving: dict[int, int] = {}  # slot: replay that must have retired
        self._joined: dict[int, int] = {}  # slot: replays launched when it joined
        self._epochs = itertools.count(1)

    @property
    def leaving(self) -> int:
        """Slots that left the batch and cannot be given to anybody yet."""
        return len(self._leaving)

    def join(self, running: Running, launched: int, **sampling: Any) -> bool:
        """Give a request a slot and its pages, and enqueue what its first round needs.

        Its tokens so far are prefilled, all but the last, which its first round feeds; a request
        that was preempted goes on where it stopped.

        Parameters
        ----------
        launched : replays launched so far.
        sampling : handed to the slot table.

        Returns
        -------
        bool
            False, with nothing changed, while there is no row, slot or page for it.
        """
        if len(self.seated) >= self._rows or not self._free:
            return False
        slot, tokens = self._free[0], running.tokens
        if not self._allocate(slot, running.limit):
            return False
        self._free.pop(0)
        running.slot = slot
        self.seated[slot] = running
        for cache in self._caches:
            cache.set_table(self._lane, slot)
        self._prompts.run(self._lane, slot, tokens)
        running.epoch, running.stalls = next(self._epochs), 0
        running.position, running.before = len(tokens) - 1, tuple(running.output.tokens)
        self._joined[slot] = launched
        self._table.join(
            self._lane,
            slot,
            position=running.position,
            last=tokens[-1],
            epoch=running.epoch,
            limit=running.limit,
            stop_ids=running.stop_ids,
            **sampling,
        )
        return True

    def leave(self, running: Running, launched: int, *, told: bool) -> None:
        """Take a request off its slot; the slot is free once what was launched has retired.

        Parameters
        ----------
        told : whether the device ended the request itself and needs no telling.
        """
        slot = running.slot
        if not told:
            self._table.leave(self._lane, slot)
        del self.seated[slot]
        # If it was never launched, its prefill is over when the next replay is.
        self._leaving[slot] = launched + (self._joined.pop(slot) == launched)
        running.slot, running.matcher = -1, None

    def reclaim(self, retired: int) -> None:
        """Free the slots and pages that no replay after `retired` names."""
        for slot in [s for s, replay in self._leaving.items() if replay <= retired]:
            del self._leaving[slot]
            for cache in self._caches:
                cache.release(slot)
            self._free.append(slot)

    def reclaim_idle(self) -> None:
        """Free every slot that was left: the device is idle, nothing is in flight."""
        self.reclaim(max(self._leaving.values(), default=0))

    def check_reserve(self, running: Running, ahead: int) -> None:
        """Refuse a launch that could write past the request's pages.

        Pages for the whole request are reserved when it joins, so this holds by construction.

        Parameters
        ----------
        ahead : positions beyond the tokens that the host knows of, which replays in flight and the
            one to be launched can write.

        Raises
        ------
        GraftError
            Naming the slot and both numbers.
        """
        needed = min(len(running.prompt) + len(running.output.tokens) + ahead, running.limit)
        for cache in self._caches:
            reserved = len(cache.pages_of(running.slot)) * cache.page_size
            if reserved < needed:
                raise GraftError(
                    f"slot {running.slot} has pages for {reserved} positions; "
                    f"a replay may write {needed}"
                )

    def _allocate(self, slot: int, positions: int) -> bool:
        for i, cache in enumerate(self._caches):
            if not cache.allocate(slot, positions):
                for earlier in self._caches[:i]:
                    earlier.release(slot)
                return False
        return True
