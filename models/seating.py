"""Seating: which request has which slot and pages, from joining until nothing names it any more.

Invariants
----------
1. A slot and its pages belong to a request from `join` until every replay launched before `leave`
   has retired; only then anybody else gets them. Until then a replay in flight may still write
   the slot's pages and state and advance its matcher.
2. A replay is launched behind whatever prefill is enqueued, on the same stream; so a prompt's
   staging area is rewritten only by the slot's next owner, hence after it was read.
3. Prompts are prefilled one after another, chunk by chunk, with replays in between: a prompt has
   been enqueued as a whole before the next one begins, for they share the rows on the device.
4. Pages cover every position that a replay in flight can write; see `check_reserve`.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from graft.cudagraph.errors import GraftError
from graft.cudagraph.lanes import StreamLane
from graft.models.kv import PagedKV
from graft.models.prefill import Prefill
from graft.models.running import Running
from graft.sampling.state import SlotState


@dataclass(frozen=True)
class _Joining:
    """Who has a slot, the rest of its prefill, and how it samples."""

    running: Running
    chunks: Iterator[tuple[int, Callable[[], bool]]]
    last: int
    sampling: dict[str, Any]


class Seating:
    """Gives slots and pages to requests, and takes them back when nothing can touch them.

    Parameters
    ----------
    slots : how many there are; more than rows of a round, so that a row can be taken over while
        its last owner's slot is still named by a replay in flight.
    rows : most requests with a slot at once.
    caches : every paged cache; a request needs its pages in all of them.
    prompts, table : write the request's tokens and its state.
    lane : where that is enqueued; the replays' stream.

    Attributes
    ----------
    seated : by slot, in the order of joining; whose prompt is not prefilled yet is not seated.
    """

    def __init__(
        self,
        slots: int,
        rows: int,
        caches: Sequence[PagedKV],
        prompts: Prefill,
        table: SlotState,
        lane: StreamLane,
    ):
        self._rows, self._caches, self._lane = rows, caches, lane
        self._prompts, self._table = prompts, table
        self.seated: dict[int, Running] = {}
        self._joining: dict[int, _Joining] = {}
        self._free = list(range(slots))
        self._leaving: dict[int, int] = {}  # slot: replay that must have retired
        self._epochs = itertools.count(1)
        self._chunks: deque[Callable[[], bool]] = deque()  # enqueued, and not known to be over
        self._chunks_over = 0

    @property
    def taken(self) -> int:
        """Slots that requests have."""
        return len(self.seated) + len(self._joining)

    @property
    def leaving(self) -> int:
        """Slots that left the batch and cannot be given to anybody yet."""
        return len(self._leaving)

    def join(self, running: Running, **sampling: Any) -> bool:
        """Give a request a slot and its pages; `prefill` then seats it.

        Its tokens so far are prefilled, all but the last, which its first round feeds; a request
        that was preempted goes on where it stopped.

        Parameters
        ----------
        sampling : handed to the slot table.

        Returns
        -------
        bool
            False, with nothing changed, while there is no row, slot or page for it.
        """
        if self.taken >= self._rows or not self._free:
            return False
        slot, tokens = self._free[0], running.tokens
        if not self._allocate(slot, running.limit):
            return False
        self._free.pop(0)
        running.slot, running.epoch, running.stalls = slot, next(self._epochs), 0
        running.position, running.before = len(tokens) - 1, tuple(running.output.tokens)
        running.reserved = min(len(c.pages_of(slot)) * c.page_size for c in self._caches)
        chunks = self._prompts.run(self._lane, slot, tokens)
        self._joining[slot] = _Joining(running, chunks, tokens[-1], sampling)
        for cache in self._caches:
            cache.set_table(self._lane, slot)
        return True

    def prefill(self, rows: int) -> None:
        """Enqueue prompts in the order of joining, and seat whose prompt was.

        Somebody is seated afterwards if anybody has joined, and a replay must be launched.

        Parameters
        ----------
        rows : how many at least, while there are any; more only until somebody is seated.
        """
        while self._joining and (rows > 0 or not self.seated):
            joining = next(iter(self._joining.values()))
            chunk = next(joining.chunks, None)
            if chunk is None:
                self._seat(joining)
            else:
                rows -= chunk[0]
                self._chunks.append(chunk[1])

    def progress(self) -> int:
        """Chunks of prompts that the device is over."""
        while self._chunks and self._chunks[0]():
            self._chunks.popleft()
            self._chunks_over += 1
        return self._chunks_over

    def _seat(self, joining: _Joining) -> None:
        running = joining.running
        del self._joining[running.slot]
        self.seated[running.slot] = running
        self._table.join(
            self._lane,
            running.slot,
            position=running.position,
            last=joining.last,
            epoch=running.epoch,
            limit=running.limit,
            stop_ids=running.stop_ids,
            **joining.sampling,
        )

    def leave(self, running: Running, launched: int, *, told: bool) -> None:
        """Take a request off its slot; the slot is free once what was launched has retired.

        Parameters
        ----------
        told : whether the device ended the request itself and needs no telling.
        """
        slot = running.slot
        if self._joining.pop(slot, None) is None:
            if not told:
                self._table.leave(self._lane, slot)
            del self.seated[slot]
        self._leaving[slot] = launched
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
        needed = min(running.length + ahead, running.limit)
        if running.reserved < needed:
            raise GraftError(
                f"slot {running.slot} has pages for {running.reserved} positions; "
                f"a replay may write {needed}"
            )

    def close(self) -> None:
        """Let go of the device's objects, whoever still holds this one."""
        self._joining.clear()
        del self._caches, self._prompts, self._table, self._lane

    def _allocate(self, slot: int, positions: int) -> bool:
        for i, cache in enumerate(self._caches):
            if not cache.allocate(slot, positions):
                for earlier in self._caches[:i]:
                    earlier.release(slot)
                return False
        return True
