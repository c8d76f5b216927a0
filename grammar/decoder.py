"""Guided decoder: constrained decoding (structured output) inside the CUDA graph.

The guided decoder fills the token bitmasks of all requests of a batch. Terms used here:

replay
    One launch of the graph. A replay executes one round of speculative decoding.
step
    Host work inside the graph, which the device waits for. A step is either a host node of the
    graph or runs on a worker thread (see `STEP_TRANSPORTS`).
mask row
    Token bitmask of one position, as int32 words. Row ``j`` of a request constrains the token that
    follows its draft ``j``; row 0 constrains the token that follows the committed tokens.
slot
    Index of a request in the memory shared with the device.

A matcher holds the state of one request in its grammar. The decoder owns the matchers of the
requests in flight. Before the engine launches a replay, it passes the requests that take part in
the replay to `GuidedDecoder.publish`. The steps of the replay advance the matchers of these
requests and fill their mask rows. Steps run no Python code, unless a grammar backend is written in
Python.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from graft.cudagraph.errors import OptionError
from graft.cudagraph.graph.graph import GraphLane
from graft.cudagraph.graph.mailbox import MailboxWorker
from graft.cudagraph.host.hostwork import NativeWork
from graft.grammar.errors import GuideError
from graft.grammar.forced import ForcedTokens
from graft.grammar.matcher import Matcher
from graft.native import _native
from graft.sampling.exchange import Exchange

__all__ = ["GuidedDecoder", "GuidedRequest", "StepSpan"]

#: Number of candidates per draft, or per tree level, among which draft steps find legal tokens.
CANDIDATES = 16

#: Implementations of a step in a graph. ``"native"``: a host node. ``"mailbox"``: a worker thread
#: that the device waits for with memory operations. ``"spinkernel"``: a worker thread that the
#: device waits for with a spinning kernel.
STEP_TRANSPORTS = ("native", "mailbox", "spinkernel")

#: Names of the kinds of steps, in the order of the native worker's enumeration `Step`.
STEPS = ("open", "commit", "draft")
_OPEN, _COMMIT, _DRAFT = range(3)


@dataclass(frozen=True)
class GuidedRequest:
    """A request of one replay.

    Attributes
    ----------
    slot
        Slot of the request, less than `GuidedDecoder.slots`.
    epoch
        Number of requests that have used the slot so far, including this request. It distinguishes
        the request from earlier requests in the same slot.
    matcher
        Matcher of the request; None if the request is unconstrained. The matcher must already have
        accepted all output tokens that were known when the request joined the batch.
    position
        Position of the last token that was known when the request joined the batch. It must be the
        same in all replays of the request.
    closing_end
        Exclusive upper bound of the positions of the request's tokens if its text must be complete
        before it; -1 otherwise. The mask row after the token at position `p` is filled with the
        budget ``closing_end - p - 1`` (`Matcher.fill`), and drafts outside the row are illegal.
    """

    slot: int
    epoch: int
    matcher: Matcher | None
    position: int
    closing_end: int = -1


class StepSpan(NamedTuple):
    """Start and end of one step of one replay. The times are ``time.monotonic_ns`` values."""

    replay: int
    step: str
    start_ns: int
    end_ns: int


def default_threads(batch: int, cores: int | None = None) -> int:
    """Return the default number of worker threads that run matchers.

    The number is one thread per 8 requests, but at most half of the usable cores.

    Parameters
    ----------
    batch
        Maximum number of requests of a step.
    cores
        Number of usable cores; None for the number of cores that this process may use.
    """
    usable = len(os.sched_getaffinity(0)) if cores is None else cores
    return max(1, min(usable // 2, batch // 8))


class GuidedDecoder:
    """Advances matchers by the tokens of a round and fills mask rows.

    A round has up to three kinds of steps. The open step rolls back each matcher to the last
    committed token and fills the mask rows of the drafts that the round verifies. The commit step
    advances the matchers by the tokens that verification accepted. The draft steps constrain the
    drafts for the next verification. The draft mode of `exchange` selects how the draft steps work:

    * Fill: a draft step fills the mask row under which the next draft is sampled.
    * Probe: a draft step tests the drafter's candidates for one draft and finds the first legal
      candidate. The open step of the next round fills the mask rows.
    * Lattice probe: a single draft step tests the candidates of all levels of the draft tree and
      finds legal drafts among these candidates.

    Parameters
    ----------
    exchange
        Memory shared with the device: drafted and committed tokens, mask rows, candidates. A graph
        has draft steps if the draft mode of `exchange` masks drafts.
    forced
        Determines the forced token of each filled mask row. Where the grammar allows only one text,
        the device drafts this token. None: no forced tokens are drafted. If the graph has no draft
        steps, the commit step itself drafts a chain of forced tokens and fills their mask rows
        (jump-forward decoding).
    transport
        Implementation of the steps, one of `STEP_TRANSPORTS`.
    deadline_s
        Maximum time of one step on a worker thread, in seconds; see
        `graft.cudagraph.graph.graph.GraphLane.mailbox`.
    max_in_flight
        Maximum number of replays that are published but not yet retired; see `retire`.
    threads
        Number of worker threads that run the matchers of a step; None for `default_threads`.
    budget_us
        Processor time that the matcher of one slot may use per step, in microseconds, at least 1;
        None for no limit. A request that exceeds the budget is called late. The device uses the
        mask rows of the request that are already filled, and the request takes no part in further
        rounds until the worker thread has finished the request's work. With rejection sampling, a
        budget can change the tokens of a request, because it changes the positions at which rounds
        end. Otherwise, the tokens do not depend on the budget. ``native/guide/matcher.h`` describes
        the cost of a budget.

        A request fails in two cases. Its matcher is too slow: a step of the request is slow if it
        takes more than 20 times the budget (at least 100 ms) of processor time, and the request
        fails when its slow steps have taken more than 400 times the budget (at least 2 s) in total.
        Or its matcher is too large: the process has grown by more than 256 MiB during late steps of
        the request.
    """

    def __init__(
        self,
        exchange: Exchange,
        *,
        forced: ForcedTokens | None = None,
        transport: str = "native",
        deadline_s: float = 10.0,
        max_in_flight: int = 8,
        threads: int | None = None,
        budget_us: float | None = None,
    ):
        if threads is None:
            threads = default_threads(exchange.slots)
        _check_minimum("max_in_flight", max_in_flight, 2)
        _check_minimum("threads", threads, 1)
        if budget_us is not None:
            _check_minimum("budget_us", budget_us, 1)
        if transport not in STEP_TRANSPORTS:
            known = ", ".join(STEP_TRANSPORTS)
            raise OptionError(f"guided decoder: transport is {transport!r}, must be one of {known}")
        self.slots = exchange.slots
        self.draft_length = exchange.drafts
        self.vocab_size = exchange.vocab_size
        self.transport = transport
        self.max_in_flight = max_in_flight
        self.threads = threads
        self.budget_us = budget_us
        self._exchange = exchange  # steps write to its memory, so it must stay alive
        self._last_published = 0  # last replay that was published or skipped
        self._last_with_steps = 0  # last replay that was published
        self._skipped: set[int] = set()  # numbers of skipped replays that have not been retired
        # Late requests: their replay has been retired, but a worker thread still uses their
        # matcher.
        self._late: list[GuidedRequest] = []
        self._in_flight: dict[int, tuple[GuidedRequest, ...]] = {}  # requests by replay number
        self._owners: dict[int, GuidedRequest] = {}  # latest request of each slot
        self._closed = False
        self._deadline_s = deadline_s
        # One thread runs all steps that are added with the transport "mailbox" or "spinkernel",
        # because the steps run one after another.
        self._mailbox_worker: MailboxWorker | None = None
        self._worker = _native.guide.Worker(
            exchange.host_ptr,
            exchange.layout.tobytes(),
            vocab_size=self.vocab_size,
            forced=None if forced is None else forced.native,
            follow_forced=forced is not None and not exchange.mode.masked,
            ring=max_in_flight,
            threads=threads,
            budget_ns=0 if budget_us is None else int(budget_us * 1000),
        )

    def publish(self, replay: int, requests: Sequence[GuidedRequest]) -> None:
        """Declare the requests of a replay. Call this method before the replay is launched.

        The decoder keeps the matchers of the requests until the replay is retired.

        Parameters
        ----------
        replay
            Number of the replay. Replays are numbered from 1 in the order in which they are
            published.
        requests
            Requests in the order of their batch rows. With an empty list, the steps of the replay
            do nothing; warm-up replays use this.

        Raises
        ------
        GuideError
            Replays are not published in order, `max_in_flight` replays are already in flight, a
            slot is out of range or listed twice, or a matcher belongs to another request or
            vocabulary.
        """
        self._require_next(replay)
        if len(self._in_flight) >= self.max_in_flight:
            raise GuideError(
                f"replay {replay} cannot be published before replay {min(self._in_flight)} "
                f"has been retired (max_in_flight is {self.max_in_flight})"
            )
        new_owners = self._check_requests(requests)
        for slot in new_owners:
            self._exchange.renew_records(slot, replay - 1)
        snapshot = tuple(requests)
        self._worker.publish(
            replay,
            [_native_request(request) for request in snapshot],
            previous=self._last_with_steps,
        )
        self._owners.update(new_owners)
        self._in_flight[replay] = snapshot
        self._last_published = self._last_with_steps = replay

    def skip(self, replay: int) -> None:
        """Declare a replay whose graph has no grammar steps, instead of publishing it.

        Raises
        ------
        GuideError
            Replays are not published or skipped in order.
        """
        self._require_next(replay)
        self._skipped.add(replay)
        self._last_published = replay

    def retire(self, replay: int) -> None:
        """Retire a replay that has completed on the device, and release its matchers."""
        if replay in self._skipped:
            self._skipped.remove(replay)
            return
        if replay not in self._in_flight:
            raise GuideError(f"replay {replay} is not in flight")
        self._worker.retire(replay)
        # Keep the requests whose matchers a worker thread still uses.
        requests = (*self._late, *self._in_flight.pop(replay))
        self._late = [request for request in requests if self._worker.busy(request.slot)]

    def add(self, lane: GraphLane, work: NativeWork, *, name: str) -> None:
        """Append a step to a graph lane. The decoder's `transport` selects the implementation.

        Any later work of the lane waits until the step has completed.

        Parameters
        ----------
        lane
            In-order sequence of graph nodes that the step is appended to.
        work
            The step, as returned by `open_work`, `commit_work` or `draft_work`.
        name
            Name of the graph node.
        """
        if self.transport == "native":
            lane.host(work, name=name)
            return
        if self._mailbox_worker is None:
            self._mailbox_worker = MailboxWorker(name="grammar")
        add = lane.mailbox if self.transport == "mailbox" else lane.spinkernel
        add(work, worker=self._mailbox_worker, deadline_s=self._deadline_s, name=name)

    def open_work(self) -> NativeWork:
        """Return the open step, the first step of a replay.

        The open step rolls back each matcher to the last committed token and fills the mask rows of
        the drafts that this round verifies.
        """
        return self._step_work(_OPEN, 0)

    def commit_work(self) -> NativeWork:
        """Return the commit step, which runs after verification.

        The commit step advances the matchers by the committed tokens and fills mask row 0, which
        constrains the token after the committed tokens.
        """
        return self._step_work(_COMMIT, 0)

    def draft_work(self, j: int) -> NativeWork:
        """Return a draft step.

        Parameters
        ----------
        j
            Number of the draft, from 1. The draft mode of `exchange` (an argument of the
            constructor) selects how the step works:

            * Fill: the step runs after draft `j` was sampled and fills mask row `j`, for
              ``1 <= j < draft_length``.
            * Probe: the step runs after the drafter has written the candidates of draft `j` and
              finds the first legal candidate, for ``1 <= j <= draft_length``.
            * Lattice probe: the step tests candidates with the matcher, the best ones first, and
              finds legal drafts for all levels of the draft tree. The step tests at most ``4 *
              drafts + candidates`` tokens, where ``candidates`` is the number per level. `j` must
              be 1.

        Raises
        ------
        OptionError
            The draft mode of the exchange does not mask drafts, or `j` is out of range.
        """
        mode = self._exchange.mode
        if not mode.masked:
            raise OptionError("guided decoder: the draft mode does not mask drafts")
        if mode.is_lattice:
            end = 2
        elif mode.probes:
            end = self.draft_length + 1
        else:
            end = self.draft_length
        if not 1 <= j < end:
            raise OptionError(f"guided decoder: draft step {j} is outside [1, {end})")
        return self._step_work(_DRAFT, j)

    def counters(self) -> dict[str, int]:
        """Return event counts and step times since the decoder was created, by name.

        Counters whose names end in ``_ns`` are the host time of each kind of step in nanoseconds.
        """
        return dict(self._worker.counters())

    def error(self, slot: int) -> str:
        """Return the error message of a slot's latest request, or an empty string."""
        return str(self._worker.error(slot))

    def timeline(self) -> list[StepSpan]:
        """Return the start and end times of the steps of the last 256 replays, sorted by start."""
        spans = []
        for replay, index, start_ns, end_ns in self._worker.timeline():
            step = STEPS[index] if index < _DRAFT else f"draft {index - _COMMIT}"
            spans.append(StepSpan(replay, step, start_ns, end_ns))
        return sorted(spans, key=lambda span: span.start_ns)

    def close(self) -> None:
        """Release all matchers.

        Graphs that contain steps of this decoder can still be launched; the steps then do nothing.

        Raises
        ------
        GuideError
            A published replay has not been retired.
        """
        if self._in_flight:
            raise GuideError(
                f"replays {sorted(self._in_flight)} have not been retired; "
                "retire them before close()"
            )
        self._worker.wait_idle()
        self._closed = True
        self._late.clear()
        self._owners.clear()

    def __del__(self) -> None:
        worker = getattr(self, "_worker", None)
        if worker is not None:
            # The worker's threads may still use matchers that only this decoder keeps alive.
            worker.wait_idle()

    def _require_open(self) -> None:
        if self._closed:
            raise GuideError("the guided decoder is closed")

    def _require_next(self, replay: int) -> None:
        self._require_open()
        if replay != self._last_published + 1:
            raise GuideError(
                f"replay {replay} published after replay {self._last_published}; publish replay "
                f"{self._last_published + 1} next"
            )

    def _step_work(self, kind: int, j: int) -> NativeWork:
        self._require_open()
        name = f"draft {j}" if kind == _DRAFT else STEPS[kind]
        return NativeWork(
            _native.guide.STEP, self._worker.record(kind, j), keep=self, name=f"grammar {name}"
        )

    def _check_requests(self, requests: Sequence[GuidedRequest]) -> dict[int, GuidedRequest]:
        """Check the requests of a replay, and claim the matchers of new requests for this decoder.

        Returns
        -------
        dict
            New requests by slot. A request is new if earlier replays had no request or another one
            in its slot.
        """
        seen: set[int] = set()
        new_owners: dict[int, GuidedRequest] = {}
        for request in requests:
            slot = request.slot
            if not 0 <= slot < self.slots or slot in seen:
                raise GuideError(f"slot {slot} is outside [0, {self.slots}) or listed twice")
            seen.add(slot)
            owner = self._owners.get(slot)
            if owner == request:
                continue
            if owner is not None and owner.epoch == request.epoch:
                raise GuideError(
                    f"slot {slot}: epoch {request.epoch} belongs to another request; a new request "
                    "needs a new epoch"
                )
            self._check_matcher(request, new_owners)
            new_owners[slot] = request
        for request in new_owners.values():
            matcher = request.matcher
            if matcher is not None:
                matcher.claimed = True
                matcher.native.timing = matcher.compiled.timing
        return new_owners

    def _check_matcher(self, request: GuidedRequest, new_owners: dict[int, GuidedRequest]) -> None:
        """Raise `GuideError` if a new request's matcher has another vocabulary or is in use."""
        matcher = request.matcher
        if matcher is None:
            return
        if matcher.size != self.vocab_size:
            raise GuideError(
                f"slot {request.slot}: the matcher's vocabulary has {matcher.size} columns, "
                f"the decoder requires {self.vocab_size}"
            )
        if matcher.claimed or any(matcher is other.matcher for other in new_owners.values()):
            raise GuideError(f"slot {request.slot}: the matcher already belongs to a request")


def _check_minimum(name: str, value: float, minimum: float) -> None:
    if not value >= minimum:
        raise OptionError(f"guided decoder: {name} is {value}, must be at least {minimum}")


def _native_request(request: GuidedRequest) -> tuple[int, int, int, Any, int]:
    """Return a request as the tuple that the native worker's ``publish`` method takes."""
    native_matcher = None if request.matcher is None else request.matcher.native
    return request.slot, request.epoch, request.position, native_matcher, request.closing_end
