"""The guided decoder: masks for every request of a batch, made inside the graph.

It is the only owner of the requests' matchers while they are in flight. Before it launches a
replay, the engine publishes which requests that replay holds; its host nodes do the rest.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from graft.cudagraph.errors import OptionError
from graft.cudagraph.graph import GraphLane
from graft.cudagraph.hostwork import NativeWork
from graft.cudagraph.mailbox import MailboxWorker
from graft.grammar.errors import GuideError
from graft.grammar.forced import ForcedText
from graft.grammar.matcher import Matcher
from graft.native import _native
from graft.sampling.exchange import Exchange

__all__ = ["GuidedDecoder", "GuidedRequest", "Span"]

#: Ids that a drafter offers per draft in mode probe, or per level.
CANDIDATES = 16
#: Ways a step can be part of a graph.
STEP_TRANSPORTS = ("native", "mailbox", "spinkernel")
STEPS = ("open", "commit", "draft")


@dataclass(frozen=True)
class GuidedRequest:
    """What one replay is told about one slot.

    Attributes
    ----------
    slot
        Slot of the request, ``0 <= slot < slots``.
    epoch
        Number of this occupation of the slot; another number means another request.
    matcher
        The request's matcher, where its text is when it joins; ``None``: unconstrained.
    position
        Position of the last token known when the request joined. It stays the same in all
        snapshots of an epoch.
    """

    slot: int
    epoch: int
    matcher: Matcher | None
    position: int


class Span(NamedTuple):
    """When one step of one replay ran, in nanoseconds of ``time.monotonic_ns``."""

    replay: int
    step: str
    start_ns: int
    end_ns: int


def default_threads(batch: int, cores: int | None = None) -> int:
    """Threads for steps of so many requests: one per 8, at most half the usable cores."""
    usable = len(os.sched_getaffinity(0)) if cores is None else cores
    return max(1, min(usable // 2, batch // 8))


class GuidedDecoder:
    """Fills mask rows from the tokens that the device drafted and committed.

    Parameters
    ----------
    exchange
        Where it meets the device. With room for candidates they are probed: the first legal one is
        the draft, and the next round's open step fills all rows. Without, each masked draft is
        drawn under its row. With levels whose candidates come at once, one step finds all drafts.
    masked_drafts
        Whether the graph has draft steps, so that each draft is legal when it is drawn.
    forced
        Says of each filled row which token it forces, for the device to draft. Without draft steps
        the commit step follows forced tokens on its own and fills the rows behind them.
    transport
        ``"native"``: host nodes; ``"mailbox"``, ``"spinkernel"``: a worker thread, waited for by
        memory operations or by a spinning kernel.
    deadline_s
        Seconds that a worker has for one step; see :meth:`graft.cudagraph.graph.GraphLane.mailbox`.
    ring
        Replays that may be published and not yet retired.
    threads
        Threads that serve the slots of a step. Default: see :func:`default_threads`.
    budget_us
        Microseconds of processor time that one slot may take in a step, at least 1; None: as much
        as it needs. A slot that takes more is late: rows it has made by then are used, and it sits
        rounds out until its thread has finished. Tokens stay the same, but for rejection sampling,
        whose rounds then end elsewhere. See ``native/guide/matcher.h`` for what it costs.

    """

    def __init__(
        self,
        exchange: Exchange,
        *,
        masked_drafts: bool,
        forced: ForcedText | None = None,
        transport: str = "native",
        deadline_s: float = 10.0,
        ring: int = 8,
        threads: int | None = None,
        budget_us: float | None = None,
    ):
        threads = default_threads(exchange.slots) if threads is None else threads
        for name, value, low in (
            ("ring", ring, 2),
            ("threads", threads, 1),
            ("budget_us", 1 if budget_us is None else budget_us, 1),
        ):
            if not value >= low:
                raise OptionError(f"guided decoder: {name} is {value}, must be at least {low}")
        if transport not in STEP_TRANSPORTS:
            known = ", ".join(STEP_TRANSPORTS)
            raise OptionError(f"guided decoder: transport is {transport!r}, must be one of {known}")
        self.slots = exchange.slots
        self.draft_length = exchange.drafts
        self.vocab_size = exchange.vocab_size
        self.probes = bool(exchange.layout["candidates"] > 0) and self.draft_length > 0
        if self.probes and not masked_drafts:
            raise OptionError("guided decoder: candidates are probed for masked drafts only")
        self.masked_drafts = masked_drafts
        self.transport = transport
        self.ring = ring
        self.threads = threads
        self.budget_us = budget_us
        self._exchange = exchange  # its memory is written by steps as long as they can run
        self._published = 0
        self._late: list[GuidedRequest] = []
        self._live: dict[int, tuple[GuidedRequest, ...]] = {}
        self._owners: dict[int, GuidedRequest] = {}
        self._closed = False
        self._deadline_s = deadline_s
        # one thread answers all mailboxes, since steps run in order
        self._answers = None if transport == "native" else MailboxWorker(name="grammar")
        self._worker = _native.guide.Worker(
            exchange.host_ptr,
            exchange.layout.tobytes(),
            vocab_size=self.vocab_size,
            forced=None if forced is None else forced.native,
            chain=forced is not None and not masked_drafts,
            ring=ring,
            threads=threads,
            budget_ns=0 if budget_us is None else int(budget_us * 1000),
        )

    def publish(self, replay: int, requests: Sequence[GuidedRequest]) -> None:
        """Say which requests ``replay`` holds, in row order, before it is launched.

        An empty list makes the replay a no-op (warm-up). Matchers are kept until ``retire``.

        Raises
        ------
        GuideError
            If replays are not published one after the other, the ring is full, a slot is named
            twice or out of range, or a matcher is used for two requests.
        """
        self._require_open()
        if replay != self._published + 1:
            raise GuideError(f"replay {replay} published after replay {self._published}")
        if replay - self.ring in self._live:
            raise GuideError(
                f"replay {replay} would overwrite replay {replay - self.ring}, which has not been "
                f"retired (ring of {self.ring})"
            )
        owners = self._check(requests)
        snapshot = tuple(requests)
        matchers = [None if r.matcher is None else r.matcher.native for r in snapshot]
        rows = zip(snapshot, matchers, strict=True)
        self._worker.publish(replay, [(r.slot, r.epoch, r.position, m) for r, m in rows])
        self._owners.update(owners)
        self._live[replay] = snapshot
        self._published = replay

    def retire(self, replay: int) -> None:
        """Release the matchers of a replay that has completed on the device."""
        if replay not in self._live:
            raise GuideError(f"replay {replay} is not in flight")
        self._worker.retire(replay)
        # A late slot's thread still uses its matcher, though no replay may name it any more.
        requests = (*self._late, *self._live.pop(replay))
        self._late = [request for request in requests if self._worker.busy(request.slot)]

    def add(self, lane: GraphLane, work: NativeWork, *, name: str) -> None:
        """Add a step to a lane by the decoder's transport; what follows on the lane follows it."""
        if self.transport == "mailbox":
            lane.mailbox(work, worker=self._answers, deadline_s=self._deadline_s, name=name)
        elif self.transport == "spinkernel":
            lane.spinkernel(work, worker=self._answers, deadline_s=self._deadline_s, name=name)
        else:
            lane.host(work, name=name)

    def open_work(self) -> NativeWork:
        """First step of a replay: rows 0..v for the drafts at hand, scratch rolled back."""
        return self._work(0, 0)

    def commit_work(self) -> NativeWork:
        """After verification: advance by the committed tokens and fill row 0."""
        return self._work(1, 0)

    def draft_work(self, j: int) -> NativeWork:
        """The step that makes a draft legal.

        Mode fill: after draft ``j`` was drawn, ``1 <= j < draft_length``: fill row ``j``. Mode
        probe: once the candidates for draft ``j`` are known, ``1 <= j <= draft_length``: find the
        first legal one. Where those of all levels come at once ``j`` is 1: find legal drafts, best
        first, by at most 4 tests per draft and one per candidate of a level.
        """
        if not self.masked_drafts:
            raise OptionError("guided decoder: draft steps need masked_drafts=True")
        end = 2 if self._exchange.layout["levels"] > 0 else self.draft_length + self.probes
        if not 1 <= j < end:
            raise OptionError(f"guided decoder: draft step {j} is outside [1, {end})")
        return self._work(2, j)

    def counters(self) -> dict[str, int]:
        """What was done so far; ``*_ns`` are host nanoseconds per kind of step."""
        return dict(self._worker.counters())

    def error(self, slot: int) -> str:
        """Why the last request that failed in a slot did, in its backend's words, or empty."""
        return str(self._worker.error(slot))

    def timeline(self) -> list[Span]:
        """Start and end of the steps of the last 256 replays, by time."""
        spans = [
            Span(replay, STEPS[step] if step < 2 else f"draft {step - 1}", start, end)
            for replay, step, start, end in self._worker.timeline()
        ]
        return sorted(spans, key=lambda span: span.start_ns)

    def close(self) -> None:
        """Release everything. Graphs that hold steps keep them valid; they do nothing from now on.

        Raises
        ------
        GuideError
            If published replays have not been retired.
        """
        if self._live:
            raise GuideError(f"replays {sorted(self._live)} have not been retired")
        self._worker.wait_idle()
        self._closed = True
        self._late.clear()
        self._owners.clear()

    def __del__(self) -> None:
        worker = getattr(self, "_worker", None)
        if worker is not None:
            worker.wait_idle()  # matchers go with this object, their threads with the worker

    def _require_open(self) -> None:
        if self._closed:
            raise GuideError("the guided decoder is closed")

    def _work(self, kind: int, j: int) -> NativeWork:
        self._require_open()
        name = STEPS[kind] if kind < 2 else f"draft {j}"
        return NativeWork(
            _native.guide.STEP, self._worker.record(kind, j), keep=self, name=f"grammar {name}"
        )

    def _check(self, requests: Sequence[GuidedRequest]) -> dict[int, GuidedRequest]:
        """Owners that this snapshot brings in, by slot; refuses what the worker must not see."""
        seen: set[int] = set()
        owners: dict[int, GuidedRequest] = {}
        for request in requests:
            slot = request.slot
            matcher = request.matcher
            if not 0 <= slot < self.slots or slot in seen:
                raise GuideError(f"slot {slot} is out of range or named twice")
            seen.add(slot)
            if self._owners.get(slot) == request:
                continue
            if slot in self._owners and self._owners[slot].epoch == request.epoch:
                raise GuideError(f"slot {slot}: epoch {request.epoch} has another request")
            if matcher is not None:
                if matcher.size != self.vocab_size:
                    raise GuideError(
                        f"slot {slot}: the matcher's vocabulary has {matcher.size} columns, "
                        f"the decoder's {self.vocab_size}"
                    )
                if matcher.claimed or any(matcher is o.matcher for o in owners.values()):
                    raise GuideError(f"slot {slot}: the matcher already belongs to a request")
            owners[slot] = request
        for matcher in (owner.matcher for owner in owners.values()):
            if matcher is not None:
                matcher.claimed = True
                matcher.native.pace = matcher.compiled.pace
        return owners
