"""Slot manager: assigns request slots and KV-cache pages, and enqueues chunked prefill.

A *slot* is the index of a request's state on the device and of its row in the page tables. A
*replay* is one launch of the CUDA graph of a round. It is *retired* once the host knows that all
its work is complete.

Invariants
----------
1. A slot and its pages belong to a request from `join` until every replay launched before `leave`
   has retired. Only then are they assigned again. Until then a replay in flight may still write
   the slot's pages and state and advance its matcher.
2. Prefill is enqueued on the stream of the replays and is always followed by a replay. A slot is
   assigned again after that replay has retired. The next request of the slot can therefore
   overwrite the slot's staging buffer for prompts, because the device has read it.
3. Prompts are prefilled one after another, chunk by chunk, with replays between the chunks. All
   chunks of a prompt are enqueued before the first chunk of the next prompt, because all prompts
   use the same row arrays on the device. While a request is running, at most the number of tokens
   that `PrefillScheduler` allows is enqueued between two replays.
4. Pages that requests share through the prefix cache are never written.
5. A request has pages for every position that a replay in flight can write. If `grow` finds no
   pages for a request, the request is left out of the next round. A request that runs alone always
   has enough pages, because a request that would need more is refused at submission.
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
from graft.models.engine.promotion import Promotion
from graft.models.engine.request_state import RequestState
from graft.models.round.prefill import Prefill, PrefillChunk, PrefillScheduler
from graft.sampling.params import SamplingParams
from graft.sampling.state import SlotRequest, SlotState

__all__ = ["SlotManager"]

#: Greatest epoch (`RequestState.epoch`). The epoch after it is 1 again. By then, no round of the
#: first slot assignment with epoch 1 is in flight.
MAX_EPOCH = 2**31 - 1

#: Number of pages that a request gets in advance if they are free, so that most rounds need not
#: allocate pages.
PAGES_AHEAD = 4

#: Maximum number of pages that a request gets in advance for the rounds that follow the first round
#: of a generation loop.
LOOP_PAGES_AHEAD = 16


@dataclass(frozen=True)
class _PrefillingRequest:
    """A request that has a slot and is being prefilled.

    Attributes
    ----------
    state
        The request.
    chunks
        Iterator; each iteration enqueues one prefill chunk.
    last_token
        Last token of the prompt or, after a preemption or migration, of the output so far. The
        first round of the request processes this token.
    """

    state: RequestState
    chunks: Iterator[PrefillChunk]
    last_token: int


class SlotManager:
    """Assigns slots and KV-cache pages to requests, and reclaims them when no replay uses them.

    Parameters
    ----------
    num_slots
        Number of slots. There are more slots than batch rows, so that a new request can join while
        a replay in flight still refers to the slot of a request that has left.
    max_batch_size
        Maximum number of requests that have a slot at the same time.
    caches
        All paged caches of the engine. A request needs pages in each of them.
    prefix_cache
        Keeps KV-cache pages of requests that have left.
    prefill
        Runs the forward passes that write the KV-cache entries of prompts.
    slot_state
        Device state of the slots.
    lane
        In-order work queue of the replays, on which prefill and slot updates are enqueued too.
    prefill_scheduler
        Chooses how many prompt tokens are enqueued between two rounds.
    positions_ahead
        Number of positions after the last token known to the host that must have pages. It is the
        maximum number of positions that the replays in flight, the next replay and its drafts can
        write.
    slack_positions
        Number of additional positions that draft trees use. They get pages even after the last
        position that the request may generate.
    promotion
        Decides, when a request starts to take part in rounds, whether kernels do its grammar steps.

    Attributes
    ----------
    running
        Requests that take part in rounds, by slot, in the order in which their prefill was
        completed. A request that is being prefilled is not included.
    prefill_scheduler
        Parameter of the same name.
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
        promotion: Promotion,
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
        self._promotion = promotion
        self.running: dict[int, RequestState] = {}
        self._prefilling: dict[int, _PrefillingRequest] = {}
        self._free = list(range(num_slots))
        # Slots that requests have left but that are not free yet. The value is the number of the
        # last replay that may write to the slot. The slot becomes free when this replay is retired.
        self._leaving: dict[int, int] = {}
        self._last_epoch = 0
        # Number of prompt tokens that may still be enqueued before the next replay.
        self._rows_left = 0
        # Enqueued chunks that the host does not yet know to be complete, oldest first.
        self._chunks: deque[PrefillChunk] = deque()
        self._completed_chunks = 0

    @property
    def num_assigned(self) -> int:
        """Number of slots that are assigned to requests."""
        return len(self.running) + len(self._prefilling)

    @property
    def num_prefilling(self) -> int:
        """Number of requests that have a slot and are being prefilled."""
        return len(self._prefilling)

    @property
    def num_leaving(self) -> int:
        """Number of slots that requests have left and that cannot be assigned again yet."""
        return len(self._leaving)

    @property
    def has_free_slot(self) -> bool:
        """Whether another request can get a slot if there are enough pages."""
        return self.num_assigned < self._max_batch_size and bool(self._free)

    @property
    def num_free_pages(self) -> int:
        """Number of pages that can be allocated in every cache."""
        return min(len(cache.free) for cache in self._caches)

    @property
    def preemption_candidate(self) -> RequestState:
        """The request that would be preempted first among the requests with a slot."""
        prefilling = (request.state for request in self._prefilling.values())
        states = itertools.chain(self.running.values(), prefilling)
        return max(states, key=lambda state: state.preemption_key)

    def cached_pages(self, state: RequestState) -> int:
        """Return how many pages of a waiting request the prefix cache has."""
        num_cached, _ = self._prefix_hits(state)
        return num_cached

    def _prefix_hits(self, state: RequestState) -> tuple[int, int]:
        """Return how many pages of a waiting request the prefix cache has.

        The second number counts the pages among them that no slot uses.
        """
        if not len(self._prefix_cache):
            return 0, 0
        if state.prefix_keys is None:
            state.prefix_keys = self._prefix_cache.keys(state.tokens)
            state.prefix_version = None
        version = self._prefix_cache.version
        if state.prefix_version != version:
            state.prefix_hits = self._prefix_cache.count_hits(state.prefix_keys)
            state.prefix_version = version
        return state.prefix_hits

    def may_join(self, states: Sequence[RequestState]) -> list[RequestState]:
        """Return the waiting requests among `states` for which there are a slot and pages.

        A request may wait for many rounds, so this method must be fast. Its work depends on the
        lengths of the prompts only if the set of cached pages or the set of unused pages has
        changed since the last call.
        """
        if not self.has_free_slot:
            return []
        page_size = self._caches[0].page_size
        available = self.num_free_pages + self._prefix_cache.num_unused
        num_spare: int | None = None
        found = []
        for state in states:
            num_pages = -(-self._required_positions(state) // page_size)
            num_cached, num_unused = self._prefix_hits(state)
            # `available` includes the unused cached pages. Those that the request itself will use
            # cannot be evicted for it, so they are added to the needed pages.
            needed = num_pages - num_cached + num_unused
            # The assigned requests keep `num_spare` pages, at least one each. The check with
            # `num_assigned` is therefore weaker than the check below. It comes first, because
            # `num_spare` takes longer to compute.
            if needed > available - self.num_assigned:
                continue
            if num_spare is None:
                num_spare = self._num_spare_pages()
            if needed <= available - num_spare:
                found.append(state)
        return found

    def join(self, state: RequestState, params: SamplingParams) -> bool:
        """Give a request a slot and the pages for its first rounds.

        Later calls of `prefill` prefill all tokens of the request except for the last one. The
        request then takes part in rounds. If it was preempted, it continues after its output.

        The request does not join if it would take pages that the running requests need for the next
        round. At least one page is kept free for each running request. Otherwise the pages would
        soon run out, and the new request would be the first to be preempted.

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
        if not self._allocate(state, slot, shared, self._num_spare_pages()):
            return False
        self._free.pop(0)
        state.slot = slot
        # Epochs wrap around, because the stamp of a mask row has 32 bits for the epoch. This is
        # safe, because epochs are only compared for equality.
        self._last_epoch = self._last_epoch % MAX_EPOCH + 1
        state.epoch = self._last_epoch
        state.stalled_rounds = 0
        state.draft_capacity = 0
        state.start_position = len(tokens) - 1
        state.params = params
        state.start_output = tuple(state.output.tokens)
        num_cached = len(shared) * self._caches[0].page_size
        self._prefix_cache.hit_tokens += num_cached
        state.output.cached_tokens += num_cached
        chunks = self._prefill.run(self._lane, slot, tokens, num_cached, self._max_chunk_rows)
        self._prefilling[slot] = _PrefillingRequest(state, chunks, tokens[-1])
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

    def reserve_ahead(self, states: Sequence[RequestState]) -> None:
        """Allocate pages for the rounds of a generation loop after its first round.

        The free pages are divided among the requests. If a request gets fewer than `PAGES_AHEAD`
        free pages, unused pages of the prefix cache are evicted until the request has got
        `PAGES_AHEAD` pages. No more pages are evicted, because the request may end long before it
        uses them.

        Parameters
        ----------
        states
            Running requests.
        """
        page_size = self._caches[0].page_size
        for index, state in enumerate(states):
            limit = -(-(state.position_limit + self._slack_positions) // page_size)
            needed = -(-self._required_positions(state) // page_size)
            present = state.reserved_positions // page_size
            num_wanted = min(limit, needed + LOOP_PAGES_AHEAD) - present
            num_shared = self.num_free_pages // (len(states) - index)
            num_ahead = needed + PAGES_AHEAD - present
            pages = min(num_wanted, max(num_shared, num_ahead))
            if pages <= 0:
                continue
            self._prefix_cache.evict_until_free(pages, ())
            pages = min(pages, self.num_free_pages)
            if pages <= 0:
                continue
            self._set_pages(state, state.slot, present + pages)
            for cache in self._caches:
                cache.set_table(self._lane, state.slot)

    def prefill(self, round_s: float) -> None:
        """Enqueue prefill chunks and start the requests whose prompts are enqueued completely.

        Prompts are prefilled in the order in which their requests got slots. If any request has a
        slot, at least one request is running afterwards. The caller must launch a replay next
        (invariant 2 of this module).

        Parameters
        ----------
        round_s
            Duration of a round in seconds. It limits the chunk size while a request is running. If
            no request is running, the first prompt is prefilled completely.
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
                max_rows = max(self._rows_left, 1)
                charged_rows = self.prefill_scheduler.charged_rows(chunk.rows, max_rows)
                self._rows_left -= charged_rows
                self._chunks.append(chunk)

    def _max_chunk_rows(self) -> int:
        return self._rows_left if self.running else sys.maxsize

    def count_completed_chunks(self) -> int:
        """Return how many prefill chunks the device has completed since the engine was created."""
        while self._chunks and self._chunks[0].is_done():
            chunk = self._chunks.popleft()
            self.prefill_scheduler.record_time(chunk.rows, chunk.elapsed_s())
            self._completed_chunks += 1
        return self._completed_chunks

    def _start(self, request: _PrefillingRequest) -> None:
        """Make a request take part in rounds, after its last prefill chunk has been enqueued."""
        state = request.state
        self._prefix_cache.insert(state.slot, state.tokens)
        del self._prefilling[state.slot]
        self.running[state.slot] = state
        self._promotion.start(state)
        self._slot_state.join(
            self._lane,
            state.slot,
            SlotRequest(
                params=state.params,
                position=state.start_position,
                last=request.last_token,
                epoch=state.epoch,
                limit=state.position_limit,
                capacity=state.position_limit + self._slack_positions,
                prompt=state.prompt,
                output=state.start_output,
            ),
        )

    def outgrew_kernels(self, state: RequestState) -> bool:
        """Return whether an error of a request has the cause that `Promotion.outgrew` finds.

        Such a request must leave its slot, and can continue with grammar steps on the host.
        """
        return self._promotion.outgrew(state)

    def leave(self, state: RequestState, last_replay: int, *, ended_on_device: bool) -> None:
        """Remove a request from its slot.

        The slot becomes free when replay `last_replay` has retired.

        Parameters
        ----------
        state
            Request with a slot.
        last_replay
            Number of the last replay launched.
        ended_on_device
            Whether the device has already deactivated the slot. If not, this method enqueues the
            deactivation.
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
        self._promotion.leave(state)
        state.reserved_positions = 0

    def reclaim(self, retired: int) -> None:
        """Free the slots that requests have left and that no unfinished replay refers to.

        The pages of these slots are freed too. `retired` is the number of the last replay known to
        be complete.
        """
        reclaimable = [slot for slot, replay in self._leaving.items() if replay <= retired]
        for slot in reclaimable:
            del self._leaving[slot]
            for cache in self._caches:
                cache.release(slot)
            self._promotion.release(slot)
            self._free.append(slot)

    def reclaim_all(self) -> None:
        """Free all slots that requests have left. The device must be idle."""
        last_replay = max(self._leaving.values(), default=0)
        self.reclaim(last_replay)

    def close(self) -> None:
        """Drop the references to device objects.

        The frames of a traceback may keep this slot manager alive after `Engine.close`.
        """
        self._prefilling.clear()
        del self._caches, self._prefix_cache, self._prefill, self._slot_state, self._lane
        del self._promotion

    def _required_positions(self, state: RequestState) -> int:
        """Return the number of positions of a request that need pages for the next round."""
        end = min(state.num_tokens + self._positions_ahead, state.position_limit)
        return end + self._slack_positions

    def _num_spare_pages(self) -> int:
        """Return how many pages must remain free when another request gets a slot."""
        return len(self._prefilling) + self._pages_for_next_round()

    def _pages_for_next_round(self) -> int:
        """Return an upper bound of the pages that running requests will take for the next round.

        The bound counts at least one page per request, even for a request that needs none.
        """
        page_size = self._caches[0].page_size
        pages = 0
        for state in self.running.values():
            positions = self._required_positions(state) - state.reserved_positions
            pages += max(1, -(-positions // page_size))
        return pages

    def _allocate(
        self, state: RequestState, slot: int, shared: Sequence[PageGroup] = (), spare: int = 0
    ) -> bool:
        """Allocate the pages that a request needs for the next round, in all KV caches.

        Return False, without allocating any page, if one of the caches has too few. `shared` are
        prefix-cache pages that become the first pages of `slot`. At least `spare` pages remain
        free.

        `PAGES_AHEAD` more pages than needed are allocated if they are free. Pages are evicted from
        the prefix cache only for pages that the request needs for the next round.
        """
        page_size = self._caches[0].page_size
        max_positions = state.position_limit + self._slack_positions
        max_pages = -(-max_positions // page_size)
        needed = -(-self._required_positions(state) // page_size)
        reserved = state.reserved_positions // page_size
        present = len(shared) + reserved
        pages = min(needed + PAGES_AHEAD, max_pages)
        if not self._has_free_pages(pages - present + spare):
            pages = needed
            self._prefix_cache.evict_until_free(pages - present + spare, shared)
            if not self._has_free_pages(pages - present + spare):
                return False
        self._set_pages(state, slot, pages, shared)
        return True

    def _set_pages(
        self, state: RequestState, slot: int, pages: int, shared: Sequence[PageGroup] = ()
    ) -> None:
        """Allocate free pages until `slot` has `pages` pages in all KV caches.

        The pages `shared` become the first pages of the slot; a slot that already has pages must
        get none.
        """
        positions = pages * self._caches[0].page_size
        for i, cache in enumerate(self._caches):
            shared_pages = [group[i] for group in shared]
            if not cache.allocate(slot, positions, shared_pages):
                raise GraftError(f"slot {slot} cannot hold {pages} pages")
        state.reserved_positions = positions

    def _has_free_pages(self, pages: int) -> bool:
        return self.num_free_pages >= pages
