"""Scheduler: selects the requests of each round and distributes the results.

A *replay* is one launch of the CUDA graph of a round. A *slot* is the index of a request's state on
the device. A *row* is the index of a request in the batch of one replay. The scheduler works with
these numbers on the host, and neither reads nor writes tensors.

Up to `max_in_flight` replays are in flight. With two, round ``i + 1`` is launched before the host
has read round ``i``, so the device never waits for the host. The cost of this overlap is that a
request which finishes in round ``i`` still occupies a row of round ``i + 1``. The scheduler
discards the tokens of that row.
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
from collections.abc import Collection, Iterable
from concurrent.futures import Future
from functools import partial

from graft.cudagraph.errors import GraftError
from graft.grammar.errors import GrammarBackendError, MatcherError, describe
from graft.grammar.matcher import CompiledGrammar
from graft.models.engine.closing import plan_closing
from graft.models.engine.interrupt import Shield
from graft.models.engine.replay import Replays, RowResult
from graft.models.engine.request_state import RequestState
from graft.models.engine.selection import GraphSelector
from graft.models.engine.slots import SlotManager
from graft.models.engine.stats import EngineStats
from graft.models.errors import RequestTimeoutError, TokenizerError
from graft.models.request import DEVICE_REASONS, Event, Output
from graft.models.round.budget import DraftBudget
from graft.models.round.round import RoundGraph
from graft.sampling.params import SamplingParams

LOG = logging.getLogger("graft")

#: A request fails as stuck when it has committed no token for more than `MAX_STALLED_ROUNDS`
#: consecutive rounds and for more than `MAX_STALL_S` seconds.
MAX_STALLED_ROUNDS = 256
MAX_STALL_S = 30.0

#: Maximum time that a step blocks while every request waits for its grammar.
IDLE_WAIT_S = 0.1

#: Number of requests at the front of the queue that are compared by prefix-cache hits.
PREFIX_LOOKAHEAD = 16

#: Maximum number of times that the first request in the queue is bypassed, because another request
#: has more cache hits or because there are too few pages for the first request.
MAX_BYPASSES = 16

#: Deadlines of finished requests are removed from the heap of deadlines when it has more entries
#: than this number plus twice the number of unfinished requests.
MIN_DEADLINES = 64

#: A warning is logged after this many consecutive rounds in which a drafter that computes logits
#: had no drafts.
MAX_UNDRAFTED_ROUNDS = 64

#: Entry of the ready queue: (-priority, sequence number, request).
_QueueEntry = tuple[int, int, RequestState]


def _sort_key(entry: _QueueEntry) -> tuple[int, int]:
    priority, number, _ = entry
    return priority, number


class Outbox:
    """Events that have not been fetched.

    A caller such as `Engine.stream` claims the requests that it has submitted, and only this caller
    receives their events. `Engine.step` fetches the events of all other requests. Several streams
    of one engine can therefore be interleaved or nested without receiving each other's events.

    Requests are identified by their submission numbers, because the id of a finished request may be
    used again before its events have been fetched.

    Attributes
    ----------
    posted
        Number of events that have been posted since the outbox was created.
    """

    def __init__(self) -> None:
        self._events: dict[int, list[Event]] = {}
        self._claimed: set[int] = set()
        self.posted = 0

    @property
    def pending(self) -> bool:
        """Whether there are events that `Engine.step` would fetch."""
        return not self._claimed.issuperset(self._events)

    def post(self, submission: int, event: Event) -> None:
        """Add an event of the request with submission number `submission`."""
        self._events.setdefault(submission, []).append(event)
        self.posted += 1

    def claim(self, submission: int) -> None:
        """Reserve the events of a request for the caller; `Engine.step` does not return them."""
        self._claimed.add(submission)

    def release(self, submissions: Iterable[int]) -> None:
        """Undo `claim` for requests, and drop their events that have not been fetched.

        `submissions` are the submission numbers of the requests.
        """
        for submission in submissions:
            self._claimed.discard(submission)
            self._events.pop(submission, None)

    def fetch(self, claimed: Collection[int]) -> list[tuple[int, Event]]:
        """Return and remove the events of requests that the caller has claimed.

        Each event is returned with the submission number of its request.
        """
        found = []
        for submission in [key for key in self._events if key in claimed]:
            found += [(submission, event) for event in self._events.pop(submission)]
        return found

    def fetch_rest(self) -> list[Event]:
        """Return and remove the events of requests that no caller has claimed."""
        found = []
        for submission in [key for key in self._events if key not in self._claimed]:
            found += self._events.pop(submission)
        return found


class Scheduler:
    """Schedules requests: continuous batching with priorities, chunked prefill and preemption.

    A request can get a slot once its grammar is compiled. The next slot goes to a request of the
    highest priority in the queue. Among the first `PREFIX_LOOKAHEAD` requests of this priority, the
    scheduler selects the request with the most prefix-cache hits for which there are enough pages.
    To prevent starvation, it bypasses the first request in the queue at most `MAX_BYPASSES` times.

    Parameters
    ----------
    replays
        Launches the graphs of decoding rounds and reads their results.
    slots
        Assigns request slots and KV-cache pages.
    selector
        Selects the graph of each launch.
    stats
        Counters to update. `Engine.reset_stats` replaces this attribute with a new object.
    budget
        Chooses the number of drafts of each round.
    max_in_flight
        Maximum number of replays in flight.
    verify
        Verification mode of requests that do not specify one.
    drafts_from_logits
        Whether drafts are chosen from logits that the drafter computes. Such a drafter normally has
        drafts in every round, so the scheduler warns if it has none for long (`_check_drafts`).

    Attributes
    ----------
    unfinished
        All unfinished requests by id.
    waiting
        Unfinished requests without a slot, by id.
    outbox
        Events that have not been fetched.
    """

    def __init__(
        self,
        replays: Replays,
        slots: SlotManager,
        selector: GraphSelector,
        stats: EngineStats,
        budget: DraftBudget,
        *,
        max_in_flight: int,
        verify: str = "rejection",
        drafts_from_logits: bool = False,
    ):
        self.replays = replays
        self.slots = slots
        self.selector = selector
        self.stats = stats
        self.budget = budget
        self.max_in_flight = max_in_flight
        self._verify = verify
        self._drafts_from_logits = drafts_from_logits
        self._undrafted_rounds = 0
        self.unfinished: dict[str, RequestState] = {}
        self.waiting: dict[str, RequestState] = {}
        self.outbox = Outbox()
        self._numbers = itertools.count()
        # Queue numbers of requests that were preempted because pages ran out: -2, -3, ..., because
        # -1 means that a request is not waiting.
        self._front_numbers = itertools.count(-2, -1)
        # Waiting requests whose grammar is compiled or that have none, sorted by `_sort_key`.
        self._ready: list[_QueueEntry] = []
        # Requests whose grammar is being compiled, by queue number. A grammar's future refers only
        # to the queue numbers, so that it does not keep requests alive.
        self._compiling: dict[int, RequestState] = {}
        # Queue numbers of the requests whose grammars have just been compiled. Compiler threads
        # append to this deque.
        self._compiled: deque[int] = deque()
        self._woken = threading.Event()
        # Heap of (deadline, sequence number, request).
        self._deadlines: list[tuple[float, int, weakref.ref[RequestState]]] = []

    @property
    def busy(self) -> bool:
        """Whether a request is unfinished or has events that `Engine.step` would return."""
        return bool(self.unfinished) or self.outbox.pending

    def submit(self, state: RequestState) -> None:
        """Queue a request until its grammar is compiled and a slot is free."""
        self.unfinished[state.id] = state
        self._enqueue(state)
        if state.request.timeout_s is not None:
            deadline = state.submitted_at + state.request.timeout_s
            entry = (deadline, state.queue_number, weakref.ref(state))
            heapq.heappush(self._deadlines, entry)
            self._drop_deadlines()

    def _enqueue(self, state: RequestState, to_front: bool = False) -> None:
        """Add a request to the queue, at the front of its priority if `to_front` is true."""
        self.waiting[state.id] = state
        state.prefix_keys = None
        number = next(self._front_numbers if to_front else self._numbers)
        state.queue_number = number
        if state.grammar is None or state.grammar.done():
            self._insert_ready(number, state)
            return
        self._compiling[number] = state
        on_compiled = partial(_report_compiled, number, self._compiled, self._woken)
        state.grammar.add_done_callback(on_compiled)

    def _insert_ready(self, number: int, state: RequestState) -> None:
        entry = (-state.request.priority, number, state)
        bisect.insort(self._ready, entry)

    # Phases of a step ---------------------------------------------------------------------------

    def step(self, shield: Shield) -> None:
        """Admit requests, launch rounds, and read the results of the oldest unread launch.

        Rounds are launched until `max_in_flight` launches are unread or there is nothing to launch.
        """
        posted = self.outbox.posted
        self._expire()
        # While a loop is running, `launch` launches nothing. It may ask the loop to end.
        while self.replays.looping or len(self.replays.unread) < self.max_in_flight:
            self.admit()
            if not self.launch():
                break
        if self.replays.unread:
            self.read(shield)
        elif self.waiting and posted == self.outbox.posted and not self.outbox.pending:
            # All requests wait for their grammars. Block until a grammar is compiled or `wake` is
            # called.
            self._woken.wait(IDLE_WAIT_S)
            self._woken.clear()

    def wake(self) -> None:
        """Wake a `step` that is blocked on grammar compilation. Thread-safe.

        If no step is blocked, the next step does not block.
        """
        self._woken.set()

    def _expire(self) -> None:
        """Finish the requests whose timeout has elapsed."""
        while self._deadlines and self._deadlines[0][0] <= time.monotonic():
            _, _, reference = heapq.heappop(self._deadlines)
            state = reference()
            if state is not None and self.unfinished.get(state.id) is state:
                error = RequestTimeoutError(
                    f"request did not finish within timeout_s = {state.request.timeout_s} s"
                )
                self.end(state, "timeout", error)

    def _drop_deadlines(self) -> None:
        """Drop the deadlines of finished requests if they are the majority."""
        if len(self._deadlines) <= 2 * len(self.unfinished) + MIN_DEADLINES:
            return
        kept = []
        for entry in self._deadlines:
            state = entry[2]()
            if state is not None and self.unfinished.get(state.id) is state:
                kept.append(entry)
        heapq.heapify(kept)
        self._deadlines = kept

    def admit(self) -> None:
        """Assign slots to ready requests until none of `_candidates` can get one.

        A waiting request is ready when its grammar is compiled or if it has none.
        """
        while self._compiled:
            number = self._compiled.popleft()
            compiled = self._compiling.pop(number, None)
            if compiled is not None:  # otherwise, the request has left the queue
                self._insert_ready(number, compiled)
        self.slots.reclaim(self.replays.retired)
        while self._ready and self._admit_next():
            pass

    def _admit_next(self) -> bool:
        """Give a slot to the first of `_candidates` that can get one, or refuse a candidate.

        Return False if there is neither a slot for a candidate nor a reason to refuse one.
        """
        first = self._ready[0][2]
        for state in self._candidates():
            if self._admit(state):
                if state is not first and state.slot >= 0:
                    first.bypass_count += 1
                return True
        return False

    def _candidates(self) -> list[RequestState]:
        """Return the ready requests that may get the next slot, in the order of preference."""
        priority, number, first = self._ready[0]
        # Requests that were preempted because pages ran out have negative numbers. They go first.
        at_front = number < 0
        if at_front or first.bypass_count >= MAX_BYPASSES or not self.slots.has_free_slot:
            return [first]
        candidates = []
        for entry_priority, _, state in self._ready[:PREFIX_LOOKAHEAD]:
            if entry_priority == priority:
                candidates.append(state)
        candidates = self.slots.may_join(candidates)
        # The sort is stable: requests with equally many cached pages stay in the queue's order.
        candidates.sort(key=self.slots.cached_pages, reverse=True)
        return candidates or [first]

    def _dequeue(self, state: RequestState) -> None:
        self.waiting.pop(state.id, None)
        self._compiling.pop(state.queue_number, None)
        entry = (-state.request.priority, state.queue_number)
        index = bisect.bisect_left(self._ready, entry, key=_sort_key)
        if index < len(self._ready):
            _, _, found = self._ready[index]
            if found is state:
                del self._ready[index]
        state.queue_number = -1

    def _admit(self, state: RequestState) -> bool:
        """Give a ready request a slot or refuse it; return False if no slot is available yet."""
        try:
            if state.matcher is None:
                state.matcher = state.make_matcher()
                if state.matcher is not None:
                    plan_closing(state, state.matcher)
        except Exception as exception:  # a grammar backend may raise anything
            error = _backend_error(exception)
            failed = state.output.tokens or isinstance(error, GrammarBackendError)
            self.end(state, "error" if failed else "refused", error)
            return True
        if self._join(state):
            return True
        if self.slots.num_assigned or self.replays.unread or not self.slots.num_leaving:
            return False
        # The slots of requests that have left become free when the last replay is retired. This
        # normally happens when a later replay is read. Here no later replay has been launched, so
        # wait until the device is idle, and retire the last replay then.
        self.replays.wait_idle(self.stats)
        self.slots.reclaim_all()
        return self._join(state)

    def _join(self, state: RequestState) -> bool:
        """Give a ready request a slot if one is available, and record how long it was queued."""
        if not self.slots.may_join([state]):
            return False
        request = state.request
        output = state.output
        verify = request.verify or self._verify
        if verify == "relaxed" and request.relaxed.until in output.tokens:
            verify = "coupled"
        params = SamplingParams.from_fields(
            request, seed=output.seed, verify=verify, stop_ids=state.stop_ids
        )
        if not self.slots.join(state, params):
            return False
        self._dequeue(state)
        if output.queue_s is None:
            output.queue_s = state.age_s
        self.stats.joins += 1
        return True

    def launch(self) -> bool:
        """Launch a round of all running requests that have pages for it.

        Returns
        -------
        bool
            Whether a round was launched.
        """
        running = self.slots.running
        if self.replays.looping:
            if self._should_leave_loop():
                self.replays.leave_loop()
            return False
        short = self._allocate_pages()
        while short and len(short) == len(running):
            if self.replays.unread:
                return False  # the caller reads a replay first, which may free pages
            self.replays.wait_idle(self.stats)
            self.slots.reclaim_all()
            short = self._allocate_pages()
        self.slots.prefill(self.replays.round_s)
        # If `prefill` has enqueued work, a replay must be launched after it. When a request leaves,
        # its slot is freed as soon as the replay that was launched last at this time has retired.
        # Without a replay after `prefill`, the slot of a request that leaves might therefore be
        # freed while its prefill is still running.
        states = [state for state in running.values() if state not in short]
        if not states:
            return False
        batch = self.selector.batch_bucket(len(states))
        drafts = self.budget.choose(batch, states)
        may_loop = not short and not self.slots.num_prefilling
        graph, served, max_rounds = self.selector.select(batch, drafts, states, may_loop=may_loop)
        self.stats.launches += 1
        if max_rounds > 1:
            self.slots.reserve_ahead(states)
            self.stats.loops += 1
        self.stats.count_round(graph)
        self.replays.launch(graph, states, served, max_rounds)
        return True

    def _should_leave_loop(self) -> bool:
        """Return whether the host should ask the running generation loop to end.

        There are three reasons to do so. A prompt is being prefilled. Ready requests wait for slots
        or pages of requests that have left, which become free only after the loop. Or so many
        requests have left that a graph with fewer batch rows can run the remaining ones.
        """
        if self.slots.num_prefilling or (self._ready and self.slots.num_leaving):
            return True
        num_running = len(self.slots.running)
        # The last unread replay is a round of the running loop. Earlier ones may be rounds of older
        # launches.
        batch = self.replays.unread[-1].graph.batch
        return num_running > 0 and self.selector.batch_bucket(num_running) < batch

    def _allocate_pages(self) -> list[RequestState]:
        """Allocate KV-cache pages for the next round; preempt a request if pages have run out.

        The request with the greatest `preemption_key` is preempted: it loses its slot and pages, so
        that the other requests can continue. In two cases no request is preempted. If a request has
        left its slot and the slot is not yet reclaimed, reclaiming it will free pages. If only the
        request that would be preempted lacks pages, it waits for pages, because the other requests
        can continue anyway.

        Returns
        -------
        list of RequestState
            Running requests without pages for the next round. They are left out of it.
        """
        running = self.slots.running
        short = [state for state in running.values() if not self.slots.grow(state)]
        if short and not self.slots.num_leaving:
            candidate = self.slots.preemption_candidate
            if short != [candidate] or len(running) == 1:
                self.preempt(candidate, to_front=True)
        return [state for state in short if state.slot >= 0]

    def read(self, shield: Shield) -> None:
        """Wait for the oldest round in flight and process its results.

        Raises
        ------
        KeyboardInterrupt
            On Ctrl-C during the wait. The round remains unread, and the next call reads it.
        """
        flight = self.replays.wait(self.stats, shield, self.slots.count_completed_chunks)
        for index, assignment in enumerate(flight.rows):
            row = self.replays.row(index)
            if assignment.stale:
                # The request has left this row, so the row's tokens are discarded. If a generation
                # loop had already removed the request, the row is empty (slot -1).
                if row.slot == assignment.slot:
                    self.stats.count_stale(len(row.tokens))
            elif row.slot == assignment.slot:
                self._process_row(assignment.state, row, flight.graph)
            else:
                error = self.replays.drafter_error(assignment)
                if error is None:
                    raise GraftError(
                        f"row {index} of replay {flight.number} has results of slot {row.slot}, "
                        f"expected slot {assignment.slot}"
                    )
                self.end(assignment.state, "error", error, ended_on_device=True)
        self.replays.finish()
        if self.replays.looping and flight.repeats:  # another replay of the loop follows
            self.stats.count_round(flight.graph)

    def _process_row(self, state: RequestState, row: RowResult, graph: RoundGraph) -> None:
        """Append a row's committed tokens to its request, and end the request if it is complete."""
        self.stats.count_row(len(row.tokens), row.tested, row.accepted)
        self._update_stall(state, row)
        if row.tokens:
            self._record_drafts(state, row, graph)
        elif row.cut:
            # No token was committed, so the next round verifies the same drafts, except those that
            # had no forward row in this round.
            state.draft_capacity = row.tested
        output = state.output
        num_before = len(output.tokens)
        undecodable: TokenizerError | None = None
        try:
            text, stopped = state.append_tokens(row.tokens)
        except TokenizerError as failure:  # the tokenizers library may panic
            text, stopped, undecodable = "", False, failure
        # If a stop string ended the request, the row's tokens after it were not appended.
        num_new = len(output.tokens) - num_before
        state.undrafted_tokens = num_new if row.reason else 0
        if row.relaxed:
            output.exact = False
        if output.logprobs is not None:
            output.logprobs += row.logprobs[:num_new]
        if undecodable is not None:
            self.end(state, "error", undecodable, ended_on_device=bool(row.reason))
        elif stopped:
            self.end(state, "stop_string", text=text)
        elif row.reason:
            reason = DEVICE_REASONS[row.reason]
            if reason == "error" and self.slots.outgrew_kernels(state):
                state.stays_on_host = True
                self.preempt(state, to_front=True)
                return
            error: Exception | None = None
            if reason == "error":
                error = self._device_error(state)
            elif reason == "stop":
                try:
                    output.satisfies_grammar = state.satisfies_grammar()
                except Exception as exception:  # a grammar backend may raise anything
                    reason = "error"
                    error = _backend_error(exception)
            self.end(state, reason, error, text=text, ended_on_device=True)
        elif self._is_stuck(state):
            stuck = GraftError(f"no mask row was filled for {state.stalled_rounds} rounds")
            self.end(state, "error", stuck)
        elif row.tokens:
            self.outbox.post(state.submission, _make_event(output, state.take_new_tokens(), text))

    def _update_stall(self, state: RequestState, row: RowResult) -> None:
        """Update the number of consecutive rounds in which the request committed no token."""
        if row.tokens or row.reason:
            state.stalled_rounds = 0
            return
        if not state.stalled_rounds:
            state.stalled_since = time.monotonic()
        state.stalled_rounds += 1

    def _is_stuck(self, state: RequestState) -> bool:
        if state.stalled_rounds <= MAX_STALLED_ROUNDS:
            return False
        return time.monotonic() - state.stalled_since > MAX_STALL_S

    def _record_drafts(self, state: RequestState, row: RowResult, graph: RoundGraph) -> None:
        """Record how many drafts were verified and accepted in a round that committed tokens."""
        self._check_drafts(state, row)
        num_known = row.tested if row.cut else state.draft_capacity
        self.budget.record_acceptance(
            state,
            graph.batch,
            graph.drafts,
            capacity=state.draft_capacity,
            num_known=num_known,
            accepted=row.accepted,
        )
        state.draft_capacity = graph.max_new_drafts
        output = state.output
        if output.first_token_s is None:
            output.first_token_s = state.age_s
        output.rounds += 1
        output.drafted += row.tested
        output.accepted += row.accepted

    def _check_drafts(self, state: RequestState, row: RowResult) -> None:
        """Warn if a drafter that computes logits has made no drafts for a request in many rounds.

        The outputs are then correct but slow. Rounds with another reason for having no drafts do
        not count: the request has a grammar, the round had no forward rows for its drafts, or its
        output is about to end.
        """
        num_left = state.position_limit - state.num_tokens
        may_have_none = state.matcher is not None or row.cut or num_left <= state.draft_capacity
        if not self._drafts_from_logits or not state.draft_capacity or may_have_none:
            return
        self._undrafted_rounds = 0 if row.tested else self._undrafted_rounds + 1
        if self._undrafted_rounds == MAX_UNDRAFTED_ROUNDS:
            LOG.warning(
                "the drafter had no drafts in %d consecutive rounds of requests without a grammar: "
                "its logits are NaN or infinite, or the requests allow none of its tokens",
                MAX_UNDRAFTED_ROUNDS,
            )

    def _device_error(self, state: RequestState) -> GraftError:
        """Return the error for a request that the device ended with reason "error"."""
        invalid_logits = "the model's logits are NaN or infinite"
        if state.matcher is None:
            return GraftError(invalid_logits)
        grammar_error = self.replays.grammar_error(state)
        # Kernels do the grammar steps of a promoted request (`Promotion`). An error that the
        # grammar worker on the host has recorded for its slot belongs to an earlier request.
        if grammar_error and self.selector.is_served(state):
            found = MatcherError(grammar_error)
            found.__cause__ = state.matcher.failure
            return found
        return GraftError(f"{invalid_logits}, or the grammar rejected a verified token")

    def wait_idle(self, shield: Shield) -> None:
        """Read all rounds in flight, wait for the device, and free the slots of ended requests."""
        self.replays.leave_loop()
        while self.replays.unread:
            self.read(shield)
        self.replays.wait_idle(self.stats)
        self.slots.reclaim_all()

    def close(self) -> None:
        """Drop the references to device objects. Call this method after `Replays.drain`."""
        self.slots.close()
        self.replays.close()
        del self.replays, self.slots, self.selector

    # Leaving a slot -----------------------------------------------------------------------------

    def preempt(self, state: RequestState, to_front: bool = False) -> None:
        """Preempt a request: take its slot and pages, and put the request back into the queue.

        The results that replays in flight produce for this request are discarded. When the request
        gets a slot again, its prompt and its output are prefilled. The logits, mask and random
        numbers at each position are then the same as without preemption.

        Parameters
        ----------
        state
            Request with a slot.
        to_front
            Whether the request goes to the front of the queue of its priority instead of the end.
        """
        self.replays.leave_loop()
        self.slots.leave(state, self.replays.launched, ended_on_device=False)
        state.output.preempted += 1
        self.stats.preemptions += 1
        self._enqueue(state, to_front)

    def end(
        self,
        state: RequestState,
        reason: str,
        error: Exception | None = None,
        *,
        text: str = "",
        ended_on_device: bool = False,
    ) -> None:
        """Finish a request, waiting or running, and post its last event.

        Parameters
        ----------
        state
            Unfinished request.
        reason
            Finish reason, see `Output.reason`.
        error
            Cause, if the request failed.
        text
            Text that `RequestState.append_tokens` has returned and no event has reported.
        ended_on_device
            Whether the device has already deactivated the slot.
        """
        output = state.output
        output.reason = reason
        text += state.finish_text()
        del self.unfinished[state.id]
        self._dequeue(state)
        state.grammar = None
        if state.slot >= 0:
            if not ended_on_device:
                self.replays.leave_loop()
            self.slots.leave(state, self.replays.launched, ended_on_device=ended_on_device)
        self.deliver(state.submission, output, error, state.take_new_tokens(), text, state.age_s)

    def deliver(
        self,
        submission: int,
        output: Output,
        error: Exception | None,
        tokens: tuple[int, ...] = (),
        text: str = "",
        total_s: float = 0.0,
    ) -> None:
        """Post the last event of a request, which contains its output.

        `error` is the cause of a failure. It is logged and recorded in the output. `tokens` and
        `text` are those that no event has reported yet, and `total_s` is the time since submission.
        """
        output.total_s = total_s
        if error is not None:
            output.error = str(error) if isinstance(error, GraftError) else describe(error)
            output.error_type = type(error).__name__
            output.error_param = getattr(error, "param", None)
            cause: BaseException | None = None  # exception of user code, whose traceback is logged
            if not isinstance(error, GraftError):
                cause = error
            elif isinstance(error, GrammarBackendError | MatcherError):
                cause = error.__cause__
            LOG.warning("request %s %s: %s", output.id, output.reason, output.error, exc_info=cause)
        self.outbox.post(submission, _make_event(output, tokens, text, finished=True))


def _report_compiled(
    number: int, compiled: deque[int], woken: threading.Event, _: Future[CompiledGrammar]
) -> None:
    """Tell a scheduler that the grammar of the request with queue number `number` is compiled.

    `compiled` and `woken` are attributes of the scheduler. The function gets them instead of the
    scheduler itself, so that the grammar's future does not keep the scheduler alive.
    """
    compiled.append(number)
    woken.set()


def _backend_error(exception: Exception) -> GraftError:
    """Convert an exception that a matcher raised to the error with which its request ends."""
    if isinstance(exception, GraftError):
        return exception
    return GrammarBackendError.of("matcher", exception)


def _make_event(
    output: Output, tokens: tuple[int, ...], text: str, *, finished: bool = False
) -> Event:
    """Return an event that reports `tokens`, which are the last tokens of `output`."""
    logprobs = None
    if output.logprobs is not None:
        first = len(output.tokens) - len(tokens)
        logprobs = tuple(output.logprobs[first:])
    final_output = output if finished else None
    return Event(output.id, tokens, text, final_output, logprobs)
