"""The scheduler: which requests the next replay holds, and what a replay brought to whom.

It is the engine without its models: it sees replays, slots and requests, never a tensor. Up to
`depth` replays are in flight; with two, round i+1 is launched before the host has read round i, and
the device never waits for the host. What that costs is decided here: a request that ended in round
i sits in round i+1 all the same, and what its row brings there is discarded.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, wait
from typing import Any

from graft.cudagraph.errors import GraftError
from graft.models.interrupt import Shield
from graft.models.replay import Launchable, Replays, RowResult
from graft.models.request import DEVICE_REASONS, VERIFY_MODES, Event, Output
from graft.models.running import Running
from graft.models.seating import Seating
from graft.models.stats import EngineStats

#: A slot that commits nothing for so many rounds and seconds on end is stuck, not late.
MAX_STALLS, MAX_STALL_S = 256, 30.0
REFUSED_TOKEN = "the grammar refused a token that verification had accepted"


class Scheduler:
    """Requests wait, join, are run round by round, leave, and may be preempted and come back.

    Parameters
    ----------
    replays, seating : what is launched, and who sits where.
    rounds : graphs by the number of rows they hold; the smallest that fits is launched.
    stats : counters; may be exchanged for fresh ones at any time.
    depth : replays in flight, at most.
    width : positions that one replay commits at most.
    verify : verification mode of requests that name none.

    Attributes
    ----------
    waiting : requests without a slot, in the order in which they get one.
    events : what nobody has fetched yet.
    """

    def __init__(
        self,
        replays: Replays,
        seating: Seating,
        rounds: Mapping[int, Launchable],
        stats: EngineStats,
        *,
        depth: int,
        width: int,
        verify: str = "rejection",
    ):
        self.replays, self.seating, self.rounds, self.stats = replays, seating, rounds, stats
        self.depth, self._width, self._verify = depth, width, verify
        self.waiting: list[Running] = []
        self.events: list[Event] = []
        self._bucket = 0

    @property
    def requests(self) -> list[Running]:
        """Every unfinished request."""
        return [*self.waiting, *self.seating.seated.values()]

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished or has an event to deliver."""
        return bool(self.waiting or self.seating.seated or self.events)

    def knows(self, request_id: str) -> bool:
        """Whether a request of this name has not had its last event."""
        return self.find(request_id) is not None

    def find(self, request_id: str) -> Running | None:
        """The unfinished request of this name."""
        return next((r for r in self.requests if r.id == request_id), None)

    # Phases of a step ---------------------------------------------------------------------------

    def step(self, shield: Shield) -> None:
        """Let ready requests join, launch what may be in flight, and read the oldest round."""
        while len(self.replays.unread) < self.depth:
            self.admit()
            if not self.launch():
                break
        if self.replays.unread:
            self.read(shield)
        if not self.events and not self.replays.unread:
            self._rest()

    def _rest(self) -> None:
        """With nobody to run, wait a while for a grammar."""
        pending = [r.grammar for r in self.waiting if r.grammar is not None and not r.ready]
        if pending and not self.seating.seated:
            wait(pending, timeout=0.1, return_when=FIRST_COMPLETED)

    def admit(self) -> None:
        """Give slots to requests whose grammar is ready, in order; nobody waits for another."""
        self.seating.reclaim(self.replays.retired)
        for running in [r for r in self.waiting if r.ready]:
            try:
                if running.matcher is None:
                    running.matcher = running.make_matcher()
            except Exception as error:  # a backend may raise anything
                self._drop(running, error)
                continue
            if self._join(running):
                continue
            if self.seating.seated or self.replays.unread or not self.seating.leaving:
                return
            # No launch will follow that could retire the last replay: wait for its tail.
            self.replays.settle(self.stats)
            self.seating.reclaim_idle()
            if not self._join(running):
                return

    def _join(self, running: Running) -> bool:
        request = running.request
        sampling: dict[str, Any] = {
            "seed": running.output.seed,
            "temperature": float(request.temperature),
            "top_k": request.top_k,
            "top_p": float(request.top_p),
            "min_p": float(request.min_p),
            "verify": VERIFY_MODES.index(
                self._verify if request.verify is None else request.verify
            ),
        }
        joined = self.seating.join(running, self.replays.number, **sampling)
        if joined:
            self.waiting.remove(running)
            self.stats.joins += 1
            self.stats.prefills += 1
            self.stats.prefill_tokens += running.position
        return joined

    def launch(self) -> bool:
        """Launch a round of everybody seated; False when there is nobody."""
        rows = list(self.seating.seated.values())
        if not rows:
            self.replays.resting = not self.replays.unread
            return False
        ahead = (len(self.replays.unread) + 1) * self._width
        for running in rows:
            self.seating.check_reserve(running, ahead)
        size = next(s for s in sorted(self.rounds) if s >= len(rows))
        self.stats.bucket_changes += size != self._bucket
        self._bucket = size
        self.stats.rounds += 1
        self.replays.launch(self.rounds[size], rows)
        self.stats.launches += 1
        return True

    def read(self, shield: Shield) -> None:
        """Wait for the oldest round in flight and hand out what it brought.

        Raises
        ------
        KeyboardInterrupt
            While it waits; the round can be read all the same, later.
        """
        flight = self.replays.wait(self.stats, shield)
        for b, seat in enumerate(flight.seats):
            row = self.replays.row(b)
            if seat.stale:
                self.stats.count_stale(len(row.tokens))
                continue
            if row.slot != seat.slot:
                raise GraftError(
                    f"row {b} of replay {flight.replay} answered for slot {row.slot}, "
                    f"not {seat.slot}"
                )
            self._collect(seat.running, row)
        self.replays.finish()

    def _collect(self, running: Running, row: RowResult) -> None:
        """Take a row's tokens; ends the request when the device or a stop string says so."""
        tokens, output = row.tokens, running.output
        self.stats.count_row(len(tokens), row.tested, row.accepted)
        if tokens or row.reason:
            running.stalls = 0
        else:
            running.stalled_at = running.stalled_at if running.stalls else time.monotonic()
            running.stalls += 1
        if tokens:
            output.rounds += 1
            output.drafted += row.tested
            output.accepted += row.accepted
        text, stopped = running.push(tokens)
        if stopped:
            self.end(running, "stop_string", text=text)
        elif row.reason:
            reason = DEVICE_REASONS[row.reason]
            error = REFUSED_TOKEN if reason == "error" else None
            self.end(running, reason, error, text=text, told=True)
        elif running.stalls > MAX_STALLS and time.monotonic() - running.stalled_at > MAX_STALL_S:
            self.end(running, "error", f"no mask row came for {running.stalls} rounds")
        elif tokens:
            self.events.append(Event(running.id, running.hand_out(), text))

    def settle(self, shield: Shield) -> None:
        """Read everything in flight, wait for the device's last tail and reclaim what was left."""
        while self.replays.unread:
            self.read(shield)
        self.replays.settle(self.stats)
        self.seating.reclaim_idle()

    # Leaving ------------------------------------------------------------------------------------

    def preempt(self, running: Running) -> None:
        """Take a seated request's slot and pages away; it waits behind those who wait already.

        What replays in flight bring for it is discarded. It joins again with its tokens so far as
        its prompt: every position is decided by the same logits, mask and random numbers as if it
        had stayed.
        """
        self.seating.leave(running, self.replays.number, told=False)
        running.output.preempted += 1
        self.stats.preemptions += 1
        self.waiting.append(running)

    def end(
        self,
        running: Running,
        reason: str,
        error: str | None = None,
        *,
        text: str = "",
        told: bool = False,
    ) -> None:
        """Finish a request, wherever it is."""
        running.output.reason, running.output.error = reason, error
        text += running.flush()
        if running.slot >= 0:
            self.seating.leave(running, self.replays.number, told=told)
        else:
            self.waiting.remove(running)
        self.events.append(Event(running.id, running.hand_out(), text, running.output))

    def refuse(self, output: Output, error: Exception) -> None:
        """End a request that never ran."""
        output.reason, output.error = "refused", str(error)
        self.events.append(Event(output.id, (), "", output))

    def _drop(self, running: Running, error: Exception) -> None:
        """A waiting request cannot join: refused, or failed when it had run before."""
        if running.before or running.output.tokens:
            self.end(running, "error", str(error))
        else:
            self.waiting.remove(running)
            self.refuse(running.output, error)
