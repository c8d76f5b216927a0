"""Seating: requests on their way from submission to output, and which has which slot and pages.

Invariants
----------
1. A slot and its pages belong to a request from `join` until every replay launched before `leave`
   has retired; only then anybody else gets them. Until then a replay in flight may still write
   the slot's pages and state and advance its matcher.
2. A replay is launched behind whatever prefill is enqueued, on the same stream; so a prompt's
   staging area is rewritten only by the slot's next owner, hence after it was read.
3. Prompts are prefilled one after another, chunk by chunk, with replays in between: a prompt has
   been enqueued as a whole before the next one begins, for they share the rows on the device.
   While anybody is seated, two replays have no more rows between them than `Pieces` says.
4. Pages that are shared are only read, see `prefix`.
5. Pages cover every position that a replay in flight can write: whoever has none for another
   (`grow`) is left out of it. One request alone has always enough, or it is refused.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from graft.cudagraph.errors import GraftError
from graft.cudagraph.lanes import StreamLane
from graft.grammar.matcher import CompiledGrammar, Matcher
from graft.models.cache.kv import PagedKV
from graft.models.cache.prefix import Pages, PrefixCache
from graft.models.request import Output, Request
from graft.models.round.prefill import Prefill, PrefillChunk, PrefillScheduler
from graft.models.text.stream import IncrementalDecoder, StopFinder
from graft.sampling.adjust import NOTHING, Adjust
from graft.sampling.state import SlotState

#: Pages beyond those needed that are taken at once if there are any, for few rounds to need some.
STRIDE = 4


@dataclass(eq=False)
class RequestState:
    """Everything the engine knows about one unfinished request.

    Attributes
    ----------
    grammar : what it waits for outside the batch.
    adjust : what is done to its logits, but for the output so far.
    place : its place among those waiting, -1 while it does not wait; never used twice.
    passed : how often another got a slot while it was the first in line.
    keys : of the pages that its tokens fill, for the prefix cache; None: nobody has asked.
    slot : where it sits, -1 while it waits.
    epoch : number of this stay in a slot; never used twice.
    position : of the last token known when it joined its slot.
    before : tokens it had generated before that, when it was preempted.
    reserved : positions for which its slot has pages.
    drafts : most that the round which made its present ones could make, 0 after it has joined.
    untaken : of its last tokens, those of the round that ended it on the device: no drafter has
        taken them in.
    stalls, stalled_at : rounds on end in which it committed nothing, and when the first of them was
        read, by `time.monotonic`.
    submitted : when it was, by `time.monotonic`.
    """

    request: Request
    output: Output
    prompt: list[int]
    max_tokens: int
    stop_ids: tuple[int, ...]
    decoder: IncrementalDecoder
    grammar: Future[CompiledGrammar] | None = None
    adjust: Adjust = NOTHING
    matcher: Matcher | None = None
    place: int = -1
    passed: int = 0
    keys: list[bytes] | None = None
    slot: int = -1
    epoch: int = 0
    position: int = 0
    before: tuple[int, ...] = ()
    reserved: int = 0
    drafts: int = 0
    untaken: int = 0
    stalls: int = 0
    stalled_at: float = 0.0
    submitted: float = field(default_factory=time.monotonic)
    _streamed: int = field(default=0, repr=False)  # tokens that somebody was told of
    _texts: list[str] = field(default_factory=list, repr=False)  # that somebody was told of
    _told: int = field(default=0, repr=False)  # their characters
    _untold: str = field(default="", repr=False)
    _stops: StopFinder | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._stops = StopFinder(self.request.stop) if self.request.stop else None

    @property
    def id(self) -> str:
        return self.output.id

    @property
    def tokens(self) -> list[int]:
        """Prompt and output so far: what a slot's caches must hold for it to go on."""
        return [*self.prompt, *self.output.tokens]

    @property
    def length(self) -> int:
        """How many those are."""
        return len(self.prompt) + len(self.output.tokens)

    @property
    def limit(self) -> int:
        """Exclusive end of its positions."""
        return len(self.prompt) + self.max_tokens

    @property
    def age_s(self) -> float:
        """Seconds since it was submitted."""
        return time.monotonic() - self.submitted

    @property
    def rank(self) -> tuple[int, float]:
        """Of those who run the greatest is the first to lose its pages."""
        return -self.request.priority, self.submitted

    def make_matcher(self) -> Matcher | None:
        """A matcher that has taken the output; None for a free request.

        Raises
        ------
        GrammarError
            When the grammar could not be compiled, or refuses a token.
        """
        if self.grammar is None:
            return None
        return self.grammar.result().matcher(self.stop_ids, self.output.tokens)

    def push(self, tokens: list[int]) -> tuple[str, bool]:
        """Take a round's tokens, up to the one that completes a stop string.

        Returns
        -------
        tuple
            The text to emit, and whether a stop string ended the request.
        """
        if self._stops is None:
            self._take(tokens)
            return self._tell(), False
        for token in tokens:
            begin = self._stops.feed(self._take([token]))
            if begin is not None:
                self._untold = self._untold[: begin - self._told]
                return self._tell(), True
        return self._tell(self._stops.held), False

    def hand_out(self) -> tuple[int, ...]:
        """Tokens that nobody has been told of."""
        first = self._streamed
        self._streamed = len(self.output.tokens)
        return tuple(self.output.tokens[first:])

    def flush(self) -> str:
        """The rest of the text, once nothing can follow here; sets the output's."""
        moved = self.output.reason == "moved"
        if not moved and self.output.reason != "stop_string":
            self._untold += self.decoder.finish(cut=self.output.reason != "stop")
        text = self._tell(len(self._untold) if moved else 0)
        self.output.text = "".join(self._texts)
        return text

    def _take(self, tokens: list[int]) -> str:
        self.output.tokens.extend(tokens)
        text = self.decoder.push([t for t in tokens if t not in self.stop_ids])
        self._untold += text
        return text

    def _tell(self, held: int = 0) -> str:
        """All text but the last `held` characters, as far as nobody has been told of it."""
        end = len(self._untold) - held
        text = self._untold[:end]
        self._untold = self._untold[end:]
        self._texts.append(text)
        self._told += len(text)
        return text


@dataclass(frozen=True)
class _Joining:
    """Who has a slot, the rest of its prefill, and how it samples."""

    running: RequestState
    chunks: Iterator[PrefillChunk]
    last: int
    sampling: dict[str, Any]


class SlotManager:
    """Gives slots and pages to requests, and takes them back when nothing can touch them.

    Parameters
    ----------
    slots : how many there are; more than rows of a round, so that a row can be taken over while
        its last owner's slot is still named by a replay in flight.
    rows : most requests with a slot at once.
    caches : every paged cache; a request needs its pages in all of them.
    prefixes : what earlier requests left in them.
    prompts, table : write the request's tokens and its state.
    lane : where that is enqueued; the replays' stream.
    pieces : how many rows of prompts may lie between two rounds.
    reach : positions beyond the tokens that the host knows of that replays in flight, one more and
        its drafts can write.
    slack : positions beyond that, even of a request's last: drafts that branch use them.

    Attributes
    ----------
    seated : by slot, in the order of joining; whose prompt is not prefilled yet is not seated.
    pieces : as given.
    """

    def __init__(
        self,
        slots: int,
        rows: int,
        caches: Sequence[PagedKV],
        prefixes: PrefixCache,
        prompts: Prefill,
        table: SlotState,
        lane: StreamLane,
        pieces: PrefillScheduler,
        reach: int,
        slack: int = 0,
    ):
        self._rows = rows
        self._caches = caches
        self._lane = lane
        self.pieces = pieces
        self._reach = reach
        self._slack = slack
        self._prefixes = prefixes
        self._prompts = prompts
        self._table = table
        self.seated: dict[int, RequestState] = {}
        self._joining: dict[int, _Joining] = {}
        self._free = list(range(slots))
        self._leaving: dict[int, int] = {}  # slot: replay that must have retired
        self._epochs = itertools.count(1)
        self._rows_left = 0  # of prompts, before the next replay
        self._chunks: deque[PrefillChunk] = deque()  # enqueued, and not known to be over
        self._chunks_over = 0

    @property
    def taken(self) -> int:
        """Slots that requests have."""
        return len(self.seated) + len(self._joining)

    @property
    def last(self) -> RequestState:
        """Who has a slot and is the first to lose it."""
        joining = (joining.running for joining in self._joining.values())
        return max(itertools.chain(self.seated.values(), joining), key=lambda one: one.rank)

    @property
    def open(self) -> bool:
        """Whether there is a slot for one more, given pages."""
        return self.taken < self._rows and bool(self._free)

    def cached(self, running: RequestState) -> int:
        """How many pages a waiting request would find in the prefix cache."""
        if not len(self._prefixes):
            return 0
        if running.keys is None:
            running.keys = self._prefixes.keys(running.tokens)
        return self._prefixes.count(running.keys)

    @property
    def leaving(self) -> int:
        """Slots that left the batch and cannot be given to anybody yet."""
        return len(self._leaving)

    def join(self, running: RequestState, **sampling: Any) -> bool:
        """Give a request a slot, and pages for its first rounds; `prefill` then seats it.

        What the others lack must be left, at least a page for each, or the one who joins would be
        the next to go.
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
        if not self.open:
            return False
        slot = self._free[0]
        tokens = running.tokens
        if running.keys is None:
            running.keys = self._prefixes.keys(tokens)
        shared = self._prefixes.match(running.keys)
        if not self._allocate(running, slot, shared, spare=len(self._joining) + self._lacking):
            return False
        self._free.pop(0)
        running.slot = slot
        running.epoch = next(self._epochs)
        running.stalls = running.drafts = 0
        running.position = len(tokens) - 1
        running.before = tuple(running.output.tokens)
        cached = len(shared) * self._caches[0].page_size
        self._prefixes.hits += cached
        running.output.cached_tokens += cached
        chunks = self._prompts.run(self._lane, slot, tokens, cached, self._most_rows)
        self._joining[slot] = _Joining(running, chunks, tokens[-1], sampling)
        for cache in self._caches:
            cache.set_table(self._lane, slot)
        return True

    def grow(self, running: RequestState) -> bool:
        """Have pages for another round of who is seated; False, with nothing changed, where there
        are none."""
        if self._needed(running) > running.reserved:
            if not self._allocate(running, running.slot):
                return False
            for cache in self._caches:
                cache.set_table(self._lane, running.slot)
        return True

    def prefill(self, round_s: float) -> None:
        """Enqueue prompts in the order of joining, and seat whose prompt was.

        Somebody is seated afterwards if anybody has joined, and a replay must be launched.

        Parameters
        ----------
        round_s : seconds of a round, for how many rows there may be while somebody is seated; else
            the first is prefilled as a whole.
        """
        if not self._joining:
            return
        self._rows_left = self.pieces.rows(round_s)
        while self._joining and (self._rows_left > 0 or not self.seated):
            joining = next(iter(self._joining.values()))
            chunk = next(joining.chunks, None)
            if chunk is None:
                self._seat(joining)
            else:
                self._rows_left -= self.pieces.used(chunk.rows, max(self._rows_left, 1))
                self._chunks.append(chunk)

    def _most_rows(self) -> int:
        """Rows that the next chunk may have."""
        return self._rows_left if self.seated else sys.maxsize

    def progress(self) -> int:
        """Chunks of prompts that the device is over."""
        while self._chunks and self._chunks[0].over():
            chunk = self._chunks.popleft()
            self.pieces.took(chunk.rows, chunk.took_s())
            self._chunks_over += 1
        return self._chunks_over

    def _seat(self, joining: _Joining) -> None:
        running = joining.running
        self._prefixes.keep(running.slot, running.tokens)
        del self._joining[running.slot]
        self.seated[running.slot] = running
        self._table.join(
            self._lane,
            running.slot,
            position=running.position,
            last=joining.last,
            epoch=running.epoch,
            limit=running.limit,
            room=running.limit + self._slack,
            stop_ids=running.stop_ids,
            **joining.sampling,
        )

    def leave(self, running: RequestState, launched: int, *, told: bool) -> None:
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
            self._prefixes.keep(slot, running.tokens[: running.length - running.untaken])
        self._leaving[slot] = launched
        running.slot = -1
        running.matcher = None
        running.reserved = 0

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

    def close(self) -> None:
        """Let go of the device's objects, whoever still holds this one."""
        self._joining.clear()
        del self._caches, self._prefixes, self._prompts, self._table, self._lane

    def _needed(self, running: RequestState) -> int:
        """Positions for which it must have pages when a replay with it is launched."""
        return min(running.length + self._reach, running.limit) + self._slack

    @property
    def _lacking(self) -> int:
        """Pages without which not all who are seated have another round, at least one for each."""
        size = self._caches[0].page_size
        return sum(
            max(1, -(-(self._needed(one) - one.reserved) // size)) for one in self.seated.values()
        )

    def _allocate(
        self, running: RequestState, slot: int, shared: Sequence[Pages] = (), spare: int = 0
    ) -> bool:
        """Own pages in all caches, of which the first are shared, and leave so many; or none."""
        size = self._caches[0].page_size
        whole = -(-(running.limit + self._slack) // size)
        needed = -(-self._needed(running) // size)
        for pages in (min(needed + STRIDE, whole), needed):
            new = pages - len(shared) - running.reserved // size + spare
            if pages == needed and not self._has_free(new):  # more are taken of free ones alone
                self._prefixes.make_room(new, shared)
            if self._has_free(new):
                break
        else:
            return False
        for i, cache in enumerate(self._caches):
            if not cache.allocate(slot, pages * size, [every[i] for every in shared]):
                raise GraftError(f"slot {slot} has no place for {pages} pages")
        running.reserved = pages * size
        return True

    def _has_free(self, pages: int) -> bool:
        return all(len(cache.free) >= pages for cache in self._caches)
