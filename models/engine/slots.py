"""Slot manager: assigns request slots and KV-cache pages, and enqueues chunked prefill.

Invariants
----------
1. A slot and its pages belong to a request from `join` until every replay launched before `leave`
   has retired. Only then they are assigned again. Until then a replay in flight may still write
   the slot's pages and state and advance its matcher.
2. A replay is launched after all prefill enqueued so far, on the same stream. A slot's prompt
   staging buffer is rewritten only by the next owner of the slot, hence after it has been read.
3. Prompts are prefilled one after another, chunk by chunk, with replays between the chunks. A
   prompt is enqueued completely before the next one begins, because they share the row arrays on
   the device. While a request is running, at most the number of tokens that `PrefillScheduler`
   allows is enqueued between two replays.
4. Shared pages are only read, see `graft.models.cache.prefix`.
5. Pages cover every position that a replay in flight can write. A request for which `grow` found
   no pages is left out of the next round. A single request always has enough pages; a request that
   would need more is refused at submission.
"""

from __future__ import annotations

import itertools
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from graft.cudagraph.errors import GraftError
from graft.cudagraph.lanes import StreamLane
from graft.models.cache.kv import PagedKV
from graft.models.cache.prefix import PageGroup, PrefixCache
from graft.models.engine.request_state import RequestState
from graft.models.round.prefill import Prefill, PrefillChunk, PrefillScheduler
from graft.sampling.params import SamplingParams
from graft.sampling.state import SlotState

__all__ = ["SlotManager"]

#: Number of free pages that are allocated in advance, so that few rounds have to allocate.
PAGES_AHEAD = 4


@dataclass(frozen=True)
class _PrefillingRequest:
    """A request that has a slot and is being prefilled.

    Attributes
    ----------
    state
        The request.
    chunks
        Enqueues one prefill chunk per iteration.
    last_token
        Last token of the prompt, processed by the first round of the request.
    params
        Sampling parameters, with seed, verification mode and all stop ids.
    """

    state: RequestState
    chunks: Iterator[PrefillChunk]
    last_token: int
    params: SamplingParams


class SlotManager:
    """Assigns slots and KV-cache pages, and reclaims them once no replay can touch them.

    Parameters
    ----------
    num_slots
        Number of slots. There are more slots than batch rows, so that a batch row can be reused
        while a replay in flight still refers to the slot of its previous request.
    max_batch_size
        Maximum number of requests that have a slot at the same time.
    caches
        All paged caches of the engine. A request needs pages in each of them.
    prefix_cache
        Pages of earlier requests.
    prefill
        Writes the prompts' entries into the caches.
    slot_state
        Device state of the slots.
    lane
        Lane on which prefill and slot updates are enqueued; that of the replays.
    prefill_scheduler
        Chooses how many prompt tokens are enqueued between two rounds.
    positions_ahead
        Maximum number of positions after the last token known to the host that the replays in
        flight, the next replay and its drafts can write.
    slack_positions
        Additional positions, also after the last token of a request, that draft trees use.

    Attributes
    ----------
    running
        Requests that take part in rounds, by slot in the order of joining. A request that is being
        prefilled is not included.
    prefill_scheduler
        As given.
    """

    def __init__(
        self,
        num_slots: int,
        max_batch_size: int,
        *,
        caches: Sequence[PagedKV],
        prefix_cache: PrefixCache,
        prefill: Prefill,
        slot_state: SlotState,
        lane: StreamLane,
        prefill_scheduler: PrefillScheduler,
        positions_ahead: int,
        slack_positions: int = 0,
    ):
        self._max_batch_size = max_batch_size
        self._caches = caches
        self._prefix_cache = prefix_cache
        self._prefill = prefill
        self._slot_state = slot_state
        self._lane = lane
        self.prefill_scheduler = prefill_scheduler
        self._positions_ahead = positions_ahead
        self._slack_positions = slack_positions
        self.running: dict[int, RequestState] = {}
        self._prefilling: dict[int, _PrefillingRequest] = {}
        self._free = list(range(num_slots))
        self._leaving: dict[int, int] = {}  # slot: number of the replay that must have retired
        self._epochs = itertools.count(1)
        self._rows_left = 0  # prompt tokens that may still be enqueued before the next replay
        self._chunks: deque[PrefillChunk] = deque()  # enqueued and not known to be complete
        self._completed_chunks = 0

    @property
    def num_assigned(self) -> int:
        """Number of slots that requests have."""
        return len(self.running) + len(self._prefilling)

    @property
    def num_leaving(self) -> int:
        """Number of slots that have left the batch and cannot be assigned yet."""
        return len(self._leaving)

    @property
    def has_free_slot(self) -> bool:
        """Whether another request can get a slot, given enough pages."""
        return self.num_assigned < self._max_batch_size and bool(self._free)

    @property
    def preemption_candidate(self) -> RequestState:
        """The request with a slot that is preempted first."""
        prefilling = (request.state for request in self._prefilling.values())
        states = itertools.chain(self.running.values(), prefilling)
        return max(states, key=lambda state: state.preemption_key)

    def cached_pages(self, state: RequestState) -> int:
        """Return the number of pages of a waiting request that the prefix cache has."""
        if not len(self._prefix_cache):
            return 0
        if state.prefix_keys is None:
            state.prefix_keys = self._prefix_cache.keys(state.tokens)
        return self._prefix_cache.count_hits(state.prefix_keys)

    def join(self, state: RequestState, params: SamplingParams) -> bool:
        """Give a request a slot and the pages for its first rounds.

        The request is prefilled by later calls of `prefill` and then takes part in rounds. All its
        tokens except for the last one are prefilled; a request that was preempted continues after
        its output. Pages that the running requests need, at least one for each, are left free;
        otherwise the new request would be the next one to be preempted.

        Parameters
        ----------
        state
            Waiting request.
        params
            Sampling parameters, with seed, verification mode and all stop ids.

        Returns
        -------
        bool
            False, with nothing changed, if no batch row, slot or pages are available.
        """
        if not self.has_free_slot:
            return False
        slot = self._free[0]
        tokens = state.tokens
        if state.prefix_keys is None:
            state.prefix_keys = self._prefix_cache.keys(tokens)
        shared = self._prefix_cache.match(state.prefix_keys)
        spare = len(self._prefilling) + self._pages_for_next_round()
        if not self._allocate(state, slot, shared, spare):
            return False
        self._free.pop(0)
        state.slot = slot
        state.epoch = next(self._epochs)
        state.stalled_rounds = 0
        state.draft_capacity = 0
        state.start_position = len(tokens) - 1
        state.start_output = tuple(state.output.tokens)
        num_cached = len(shared) * self._caches[0].page_size
        self._prefix_cache.hit_tokens += num_cached
        state.output.cached_tokens += num_cached
        chunks = self._prefill.run(self._lane, slot, tokens, num_cached, self._max_chunk_rows)
        self._prefilling[slot] = _PrefillingRequest(state, chunks, tokens[-1], params)
        for cache in self._caches:
            cache.set_table(self._lane, slot)
        return True

    def grow(self, state: RequestState) -> bool:
        """Allocate the pages that a running request needs for another round.

        Returns
        -------
        bool
            False, with nothing changed, if there are not enough pages.
        """
        if self._required_positions(state) <= state.reserved_positions:
            return True
        if not self._allocate(state, state.slot):
            return False
        for cache in self._caches:
            cache.set_table(self._lane, state.slot)
        return True

    def prefill(self, round_s: float) -> None:
        """Enqueue prefill chunks in the order of joining, and start the requests that are complete.

        If any request has joined, at least one is running afterwards. A replay must be launched
        next.

        Parameters
        ----------
        round_s
            Seconds of a round, which limit the chunk size while a request is running. If none is,
            the first prompt is prefilled completely.
        """
        if not self._prefilling:
            return
        self._rows_left = self.prefill_scheduler.rows(round_s)
        while self._prefilling and (self._rows_left > 0 or not self.running):
            request = next(iter(self._prefilling.values()))
            chunk = next(request.chunks, None)
            if chunk is None:
                self._start(request)
            else:
                self._rows_left -= self.prefill_scheduler.charged_rows(
                    chunk.rows, max(self._rows_left, 1)
                )
                self._chunks.append(chunk)

    def _max_chunk_rows(self) -> int:
        """Return the maximum number of rows of the next chunk."""
        return self._rows_left if self.running else sys.maxsize

    def count_completed_chunks(self) -> int:
        """Return the number of prefill chunks that the device has completed."""
        while self._chunks and self._chunks[0].is_done():
            chunk = self._chunks.popleft()
            self.prefill_scheduler.record_time(chunk.rows, chunk.elapsed_s())
            self._completed_chunks += 1
        return self._completed_chunks

    def _start(self, request: _PrefillingRequest) -> None:
        """Add a request whose prefill is enqueued completely to the running requests."""
        state = request.state
        self._prefix_cache.insert(state.slot, state.tokens)
        del self._prefilling[state.slot]
        self.running[state.slot] = state
        self._slot_state.join(
            self._lane,
            state.slot,
            request.params,
            position=state.start_position,
            last=request.last_token,
            epoch=state.epoch,
            limit=state.position_limit,
            capacity=state.position_limit + self._slack_positions,
            prompt=state.prompt,
            output=state.start_output,
        )

    def leave(self, state: RequestState, last_replay: int, *, ended_on_device: bool) -> None:
        """Take a request off its slot. The slot is free once `last_replay` has retired.

        Parameters
        ----------
        state
            Request with a slot.
        last_replay
            Number of the last replay launched.
        ended_on_device
            Whether the device has ended the request itself; otherwise its slot is deactivated.
        """
        slot = state.slot
        prefilling = self._prefilling.pop(slot, None)
        if prefilling is None:
            if not ended_on_device:
                self._slot_state.leave(self._lane, slot)
            del self.running[slot]
            num_cached = state.num_tokens - state.undrafted_tokens
            self._prefix_cache.insert(slot, state.tokens[:num_cached])
        self._leaving[slot] = last_replay
        state.slot = -1
        state.matcher = None
        state.reserved_positions = 0

    def reclaim(self, retired: int) -> None:
        """Free the slots and pages to which no replay after number `retired` refers."""
        for slot in [slot for slot, replay in self._leaving.items() if replay <= retired]:
            del self._leaving[slot]
            for cache in self._caches:
                cache.release(slot)
            self._free.append(slot)

    def reclaim_all(self) -> None:
        """Free all slots that have left the batch. The device must be idle."""
        self.reclaim(max(self._leaving.values(), default=0))

    def close(self) -> None:
        """Drop the references to device objects, which a traceback could keep alive otherwise."""
        self._prefilling.clear()
        del self._caches, self._prefix_cache, self._prefill, self._slot_state, self._lane

    def _required_positions(self, state: RequestState) -> int:
        """Return the number of positions for which a request needs pages at the next launch."""
        end = min(state.num_tokens + self._positions_ahead, state.position_limit)
        return end + self._slack_positions

    def _pages_for_next_round(self) -> int:
        """Return the pages that the running requests need for a round, at least one for each."""
        page_size = self._caches[0].page_size
        pages = 0
        for state in self.running.values():
            positions = self._required_positions(state) - state.reserved_positions
            pages += max(1, -(-positions // page_size))
        return pages

    def _allocate(
        self,
        state: RequestState,
        slot: int,
        shared: Sequence[PageGroup] = (),
        spare: int = 0,
    ) -> bool:
        """Allocate pages in all caches for the next round, or in none.

        `PAGES_AHEAD` more pages are taken if they are free. Cached prefixes are evicted only for
        the pages that the request needs.

        Parameters
        ----------
        state
            Request that needs pages.
        slot
            Its slot.
        shared
            Prefix-cache pages that are used as the first pages of the slot.
        spare
            Number of free pages to leave.

        Returns
        -------
        bool
            False, with no page taken, if there are not enough pages.
        """
        page_size = self._caches[0].page_size
        max_pages = -(-(state.position_limit + self._slack_positions) // page_size)
        needed = -(-self._required_positions(state) // page_size)
        reserved = state.reserved_positions // page_size
        present = len(shared) + reserved
        pages = min(needed + PAGES_AHEAD, max_pages)
        if not self._has_free_pages(pages - present + spare):
            pages = needed
            self._prefix_cache.evict_until_free(pages - present + spare, shared)
            if not self._has_free_pages(pages - present + spare):
                return False
        for i, cache in enumerate(self._caches):
            if not cache.allocate(slot, pages * page_size, [group[i] for group in shared]):
                raise GraftError(f"slot {slot} cannot hold {pages} pages")
        state.reserved_positions = pages * page_size
        return True

    def _has_free_pages(self, pages: int) -> bool:
        return all(len(cache.free) >= pages for cache in self._caches)
