"""The scheduler: which requests the next replay holds, and what a replay brought to whom.

It is the engine without its models: it sees replays, slots and requests, never a tensor. Up to
`depth` replays are in flight; with two, round i+1 is launched before the host has read round i, and
the device never waits for the host. What that costs is decided here: a request that ended in round
i sits in round i+1 all the same, and what its row brings there is discarded.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from graft.cudagraph.errors import GraftError
from graft.models.engine.interrupt import Shield
from graft.models.engine.replay import Replays, RowResult
from graft.models.engine.slots import RequestState, SlotManager
from graft.models.engine.stats import EngineStats
from graft.models.errors import RequestTimeoutError
from graft.models.request import DEVICE_REASONS, VERIFY_MODES, Event, Output
from graft.models.round.budget import DraftBudget
from graft.models.round.round import RoundGraph

LOG = logging.getLogger("graft")
#: A slot that commits nothing for so many rounds and seconds on end is stuck, not late.
MAX_STALLS = 256
MAX_STALL_S = 30.0
REST_S = 0.1
#: Of those ready so many are looked at for what the prefix cache has of them; and the first of them
#: is passed over at most so often.
LOOKED_AT = 16
MOST_PASSED = 16


class Outbox:
    """Events that nobody has fetched.

    Who drives requests of its own claims them, and alone gets their events; everybody else's are
    fetched together. So users of one engine may take turns, or one begin within another's turn.

    Attributes
    ----------
    posted : events so far.
    """

    def __init__(self) -> None:
        self._events: dict[str, list[Event]] = {}
        self._claimed: set[str] = set()
        self.posted = 0

    @property
    def pending(self) -> bool:
        """Whether there are events that nobody has claimed."""
        return not self._claimed.issuperset(self._events)

    def post(self, event: Event) -> None:
        self._events.setdefault(event.id, []).append(event)
        self.posted += 1

    def claim(self, request_id: str) -> None:
        self._claimed.add(request_id)

    def release(self, ids: Iterable[str]) -> None:
        """End claims; what has not been fetched is forgotten."""
        for request_id in ids:
            self._claimed.discard(request_id)
            self._events.pop(request_id, None)

    def fetch(self, claimed: Collection[str]) -> list[Event]:
        """The events of requests that the caller has claimed."""
        return self._take([i for i in self._events if i in claimed])

    def fetch_rest(self) -> list[Event]:
        """The events of requests that nobody has claimed."""
        return self._take([i for i in self._events if i not in self._claimed])

    def _take(self, ids: list[str]) -> list[Event]:
        return [event for request_id in ids for event in self._events.pop(request_id)]


#: Someone's place in line: priority, negative; number; and who.
_Place = tuple[int, int, RequestState]


class Scheduler:
    """Requests wait, join, are run round by round, leave, and may be preempted and come back.

    Parameters
    ----------
    replays, seating : what is launched, and who sits where.
    rounds : graphs by the number of rows they hold, and of drafts.
    stats : counters; may be exchanged for fresh ones at any time.
    budget : chooses the drafts of every round; its rows are the fewest that suffice.
    depth : replays in flight, at most.
    verify : verification mode of requests that name none.

    Attributes
    ----------
    unfinished : every unfinished request by its id.
    waiting : those without a slot. Once their grammar is ready they get one by priority, and within
        one by what the prefix cache has of them; who was first in line is passed over for that
        `MOST_PASSED` times at most.
    outbox : events that nobody has fetched yet.
    """

    def __init__(
        self,
        replays: Replays,
        seating: SlotManager,
        rounds: Mapping[tuple[int, int], RoundGraph],
        stats: EngineStats,
        budget: DraftBudget,
        *,
        depth: int,
        verify: str = "rejection",
    ):
        self.replays = replays
        self.seating = seating
        self.rounds = rounds
        self.stats = stats
        self.budget = budget
        self.depth = depth
        self._verify = verify
        self.unfinished: dict[str, RequestState] = {}
        self.waiting: dict[str, RequestState] = {}
        self.outbox = Outbox()
        self._places = itertools.count()
        self._first_places = itertools.count(-2, -1)
        self._ready: list[_Place] = []  # in order
        self._compiled: deque[tuple[int, RequestState]] = (
            deque()
        )  # filled by the compiler's threads
        self._woken = threading.Event()
        self._deadlines: list[tuple[float, int, weakref.ref[RequestState]]] = []  # a heap

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished or has an event for whoever asks."""
        return bool(self.unfinished) or self.outbox.pending

    def submit(self, running: RequestState) -> None:
        """Let a request wait for its grammar and a slot."""
        self.unfinished[running.id] = running
        self._wait(running)
        if running.request.timeout_s is not None:
            at = running.submitted + running.request.timeout_s
            heapq.heappush(self._deadlines, (at, running.place, weakref.ref(running)))

    def _wait(self, running: RequestState, first: bool = False) -> None:
        self.waiting[running.id] = running
        running.keys = None
        place = running.place = next(self._first_places if first else self._places)
        if running.grammar is None or running.grammar.done():
            self._line_up(place, running)
            return

        def compiled(_: object) -> None:
            self._compiled.append((place, running))
            self._woken.set()

        running.grammar.add_done_callback(compiled)

    def _line_up(self, place: int, running: RequestState) -> None:
        bisect.insort(self._ready, (-running.request.priority, place, running))

    # Phases of a step ---------------------------------------------------------------------------

    def step(self, shield: Shield) -> None:
        """Let ready requests join, launch what may be in flight, and read the oldest round."""
        posted = self.outbox.posted
        self._expire()
        while len(self.replays.unread) < self.depth:
            self.admit()
            if not self.launch():
                break
        if self.replays.unread:
            self.read(shield)
        elif self.waiting and posted == self.outbox.posted and not self.outbox.pending:
            self._woken.wait(REST_S)  # for a grammar, or `wake`
            self._woken.clear()

    def wake(self) -> None:
        """End a step's rest, or the next one's; any thread may."""
        self._woken.set()

    def _expire(self) -> None:
        """End the requests whose time is up."""
        while self._deadlines and self._deadlines[0][0] <= time.monotonic():
            running = heapq.heappop(self._deadlines)[2]()
            if running is not None and self.unfinished.get(running.id) is running:
                error = RequestTimeoutError(
                    f"not done within {running.request.timeout_s} s (timeout_s)"
                )
                self.end(running, "timeout", error)

    def admit(self) -> None:
        """Give slots to requests whose grammar is ready, in order; nobody waits for another's."""
        while self._compiled:
            place, running = self._compiled.popleft()
            if running.place == place:
                self._line_up(place, running)
        self.seating.reclaim(self.replays.retired)
        while self._ready:
            first = self._ready[0][2]
            chosen = self._choose()
            if not self._admit(chosen):
                break
            first.passed += chosen is not first

    def _choose(self) -> RequestState:
        """Who gets the next slot of those who are ready."""
        priority, place, first = self._ready[0]
        if place < 0 or first.passed >= MOST_PASSED or not self.seating.open:
            return first
        near = (one[2] for one in self._ready[:LOOKED_AT] if one[0] == priority)
        return max(near, key=self.seating.cached)  # of equals the first

    def _step_out(self, running: RequestState) -> None:
        """Let it wait no more, if it does."""
        self.waiting.pop(running.id, None)
        place = -running.request.priority, running.place
        at = bisect.bisect_left(self._ready, place, key=lambda one: one[:2])
        if at < len(self._ready) and self._ready[at][2] is running:
            del self._ready[at]
        running.place = -1

    def _admit(self, running: RequestState) -> bool:
        """Give one a slot, or refuse it; False when there is none for it yet."""
        try:
            if running.matcher is None:
                running.matcher = running.make_matcher()
        except Exception as error:  # a backend may raise anything
            self.end(running, "error" if running.output.tokens else "refused", error)
            return True
        if self._join(running):
            return True
        if self.seating.taken or self.replays.unread or not self.seating.leaving:
            return False
        # No launch will follow that could retire the last replay: wait for its tail.
        self.replays.settle(self.stats)
        self.seating.reclaim_idle()
        return self._join(running)

    def _join(self, running: RequestState) -> bool:
        request = running.request
        output = running.output
        verify = request.verify or self._verify
        output.exact = verify != "relaxed"
        if not output.exact and request.relaxed.until in output.tokens:
            verify = "coupled"
        sampling: dict[str, Any] = {
            "seed": output.seed,
            "sample": request.sample,
            "temperature": float(request.temperature),
            "top_k": request.top_k,
            "top_p": float(request.top_p),
            "min_p": float(request.min_p),
            "verify": VERIFY_MODES.index(verify),
            "relaxed": request.relaxed,
            "adjust": replace(running.adjust, output=output.tokens),
        }
        joined = self.seating.join(running, **sampling)
        if joined:
            self._step_out(running)
            if output.queue_s is None:
                output.queue_s = running.age_s
            self.stats.joins += 1
        return joined

    def launch(self) -> bool:
        """Launch a round of everybody seated who has pages for it; False when there is nobody."""
        seated = self.seating.seated
        while len(short := self._short_of_pages()) == len(seated) > 0:
            if self.replays.unread:
                return False  # what is read may end someone, and what retires gives pages back
            self.replays.settle(self.stats)
            self.seating.reclaim_idle()
        self.seating.prefill(self.replays.round_s)
        # From here on a replay must be launched, see `Seating`.
        rows = [running for running in seated.values() if running not in short]
        if not rows:
            return False
        size = min(size for size, _ in self.rounds if size >= len(rows))
        drafts = self.budget.choose(size, rows)
        self.stats.rounds += 1
        self.stats.rounds_by_length[drafts] += 1
        self.replays.launch(self.rounds[size, drafts], rows)
        return True

    def _short_of_pages(self) -> list[RequestState]:
        """Who is seated and sits the next round out, for want of pages.

        While nobody's are on their way back, the last in rank loses its own, so that the others can
        go on; it is the next to join. Where it alone is short it waits, and they go on anyway.
        """
        seated = self.seating.seated
        short = [running for running in seated.values() if not self.seating.grow(running)]
        if short and not self.seating.leaving:
            last = self.seating.last
            if short != [last] or len(seated) == 1:
                self.preempt(last, first=True)
        return [running for running in short if running.slot >= 0]

    def read(self, shield: Shield) -> None:
        """Wait for the oldest round in flight and hand out what it brought.

        Raises
        ------
        KeyboardInterrupt
            While it waits; the round can be read all the same, later.
        """
        flight = self.replays.wait(self.stats, shield, self.seating.progress)
        for b, seat in enumerate(flight.seats):
            row = self.replays.row(b)
            if seat.stale:
                self.stats.count_stale(len(row.tokens))
                continue
            if row.slot != seat.slot:
                error = self.replays.drafter_error(seat)
                if error is None:
                    raise GraftError(
                        f"row {b} of replay {flight.replay} answered for slot {row.slot}, "
                        f"not {seat.slot}"
                    )
                self.end(seat.running, "error", error, told=True)
                continue
            self._collect(seat.running, row, flight.graph)
        self.replays.finish()

    def _collect(self, running: RequestState, row: RowResult, graph: RoundGraph) -> None:
        """Take a row's tokens; ends the request when the device or a stop string says so."""
        tokens = row.tokens
        output = running.output
        self.stats.count_row(len(tokens), row.tested, row.accepted)
        if tokens or row.reason:
            running.stalls = 0
        else:
            running.stalled_at = running.stalled_at if running.stalls else time.monotonic()
            running.stalls += 1
        if tokens:
            known = row.tested if row.cut else running.drafts
            self.budget.brought(
                running, graph.batch, graph.drafts, running.drafts, known, row.accepted
            )
            running.drafts = graph.made
            if output.first_token_s is None:
                output.first_token_s = running.age_s
            output.rounds += 1
            output.drafted += row.tested
            output.accepted += row.accepted
        elif row.cut:
            running.drafts = row.tested  # what is left of them
        running.untaken = len(tokens) if row.reason else 0
        text, stopped = running.push(tokens)
        if output.logprobs is not None:
            output.logprobs += row.logprobs[: len(output.tokens) - len(output.logprobs)]
        if stopped:
            self.end(running, "stop_string", text=text)
        elif row.reason:
            reason = DEVICE_REASONS[row.reason]
            error = self._cause(running) if reason == "error" else None
            self.end(running, reason, error, text=text, told=True)
        elif running.stalls > MAX_STALLS and time.monotonic() - running.stalled_at > MAX_STALL_S:
            stuck = GraftError(f"no mask row came for {running.stalls} rounds")
            self.end(running, "error", stuck)
        elif tokens:
            self.outbox.post(_event(output, running.hand_out(), text))

    def settle(self, shield: Shield) -> None:
        """Read everything in flight, wait for the device's last tail and reclaim what was left."""
        while self.replays.unread:
            self.read(shield)
        self.replays.settle(self.stats)
        self.seating.reclaim_idle()

    def close(self) -> None:
        """Let go of the device's objects, whoever still holds this one; after `Replays.drain`."""
        self.seating.close()
        self.replays.close()
        del self.replays, self.seating, self.rounds

    # Leaving ------------------------------------------------------------------------------------

    def preempt(self, running: RequestState, first: bool = False) -> None:
        """Take a request's slot and pages away; it waits behind those of its priority, or is first.

        What replays in flight bring for it is discarded. It joins again with its tokens so far as
        its prompt: every position is decided by the same logits, mask and random numbers as if it
        had stayed.
        """
        self.seating.leave(running, self.replays.number, told=False)
        running.output.preempted += 1
        self.stats.preemptions += 1
        self._wait(running, first)

    def end(
        self,
        running: RequestState,
        reason: str,
        error: Exception | None = None,
        *,
        text: str = "",
        told: bool = False,
    ) -> None:
        """Finish a request, wherever it is."""
        output = running.output
        output.reason = reason
        text += running.flush()
        del self.unfinished[running.id]
        self._step_out(running)
        if running.slot >= 0:
            self.seating.leave(running, self.replays.number, told=told)
        self.deliver(output, error, running.hand_out(), text, running.age_s)

    def deliver(
        self,
        output: Output,
        error: Exception | None,
        tokens: tuple[int, ...] = (),
        text: str = "",
        total_s: float = 0.0,
    ) -> None:
        """Post the last event of a request, with its output."""
        output.total_s = total_s
        if error is not None:
            output.error = str(error)
            output.error_type = type(error).__name__
            LOG.warning("request %s %s: %s", output.id, output.reason, output.error)
        self.outbox.post(_event(output, tokens, text, output))

    def _cause(self, running: RequestState) -> GraftError:
        """Why the device ended a request with an error."""
        logits = "the model's logits are NaN or infinite"
        if running.matcher is None:
            return GraftError(logits)
        said = self.replays.grammar_error(running.slot)
        return GraftError(said or f"{logits}, or the grammar refused what verification accepted")


def _event(
    output: Output, tokens: tuple[int, ...], text: str, whole: Output | None = None
) -> Event:
    known = output.logprobs
    told = None if known is None else tuple(known[len(output.tokens) - len(tokens) :])
    return Event(output.id, tokens, text, whole, told)
