"""Replays as the host sees them: published, launched, awaited, read and retired.

Several may be in flight. A replay is *unread* from its launch until its results were read, and
*retired* once it is wholly over: its tail still drafts while the host reads what its verification
published.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from graft.cudagraph.device import Stream
from graft.cudagraph.errors import DeviceError, GraftError, HostWorkError
from graft.cudagraph.exec import GraphExec
from graft.cudagraph.stacks import describe_running
from graft.grammar.decoder import GuidedRequest
from graft.models.engine.interrupt import Shield
from graft.models.engine.slots import RequestState
from graft.models.engine.stats import EngineStats
from graft.models.request import Logprob
from graft.models.round.budget import DraftBudget
from graft.models.round.round import RoundGraph, RoundParts
from graft.sampling.sampler import ROUND_ROW
from graft.sampling.state import LOGPROBS

ROUND_DEADLINE_S = 120.0
POLL_S = 0.1
#: Of the last round in the average of their times.
ROUND_SHARE = 0.2
_HEAD = ROUND_ROW.itemsize // 4


@dataclass(frozen=True)
class RowAssignment:
    """Who sat in a row when its replay was launched.

    The request may have left since, by a stop string, a cancel or a preemption, and may even be
    back under another epoch: then the seat is stale, and what its row brought is nobody's.
    """

    running: RequestState
    slot: int
    epoch: int

    @property
    def stale(self) -> bool:
        return self.running.slot != self.slot or self.running.epoch != self.epoch


@dataclass(frozen=True)
class ReplayInFlight:
    """One launched replay: its number, and its own number among its graph's."""

    replay: int
    graph: RoundGraph
    own: int
    seats: tuple[RowAssignment, ...]


@dataclass(frozen=True)
class RowResult:
    """What one batch row of a replay brought.

    Attributes
    ----------
    slot : who sat there, -1 for a padding row.
    reason : REASON_* of native/records/exchange.h; 0 goes on.
    accepted, tested, cut : drafts accepted, drafts there were, and more that had no place.
    tokens : what was committed, in order.
    logprobs : of the tokens, where the request asks for them.
    """

    slot: int
    reason: int
    accepted: int
    tested: int
    cut: int
    tokens: list[int]
    logprobs: list[Logprob] = field(default_factory=list)


class Replays:
    """The rounds' replays, one after another on one stream.

    When replay r has published its results, replay r-1 is wholly over; only then its snapshot is
    retired and its timeline read.

    Parameters
    ----------
    parts : rings, snapshots and timeline.
    stream : where replays run.
    budget : told how long each took.

    Attributes
    ----------
    number : of the last replay launched; the device counts the same.
    retired : of the last replay known to be over.
    unread : launched replays whose results were not read yet, oldest first.
    round_s : seconds that a round takes, of those who carried anybody a running average, in which
        none counts for more than twice as long.
    on_parts : told each replay that is over, and its stamps in order, on the device's clock.
    on_row : told what each row that was read brought, and who sat there.
    """

    def __init__(self, parts: RoundParts, stream: Stream, budget: DraftBudget):
        self._parts = parts
        self._stream = stream
        self._budget = budget
        self.number = 0
        self.retired = 0
        self.round_s = 0.0
        self.unread: deque[ReplayInFlight] = deque()
        self._tails: deque[ReplayInFlight] = deque()  # read, not retired
        self._behind: deque[GraphExec] = deque()  # graphs of the last round, yet to be launched
        self._launches: Counter[int] = Counter()  # by the id() of a graph
        self.on_parts: Callable[[ReplayInFlight, list[int]], None] | None = None
        self.on_row: Callable[[RowAssignment, RowResult], None] | None = None

    def launch(self, graph: RoundGraph, rows: Sequence[RequestState]) -> None:
        """Publish who sits in which row, and launch one replay.

        The input entry, the matchers' snapshot and the output entry carry the replay's number: a
        replay that finds another number treats every row as padding. Rings refuse an entry that
        an unread replay still holds, so a replay too many raises before anything is overwritten.
        """
        parts = self._parts
        replay = self.number + 1
        parts.outputs.reserve(replay)
        parts.inputs.reserve(replay)
        slots = parts.inputs.row("slot", replay)
        parts.timeline.field("ns").array[replay % parts.timeline.slots] = 0
        slots[:] = -1
        slots[: len(rows)] = [r.slot for r in rows]
        parts.decoder.publish(
            replay, [GuidedRequest(r.slot, r.epoch, r.matcher, r.position) for r in rows]
        )
        parts.inputs.publish(replay)
        self.number = replay
        seats = tuple(RowAssignment(r, r.slot, r.epoch) for r in rows)
        self._launches[id(graph)] += 1
        flight = ReplayInFlight(replay, graph, self._launches[id(graph)], seats)
        self.unread.append(flight)
        with self._numbered(flight):
            graph.execs[0].launch(self._stream)
        self._behind.extend(graph.execs[1:])

    def wait(
        self, stats: EngineStats, shield: Shield, progress: Callable[[], int] = lambda: 0
    ) -> ReplayInFlight:
        """Wait until the oldest unread replay's results are published, and return it.

        Of a round in several graphs the others are launched then, each when the one before is over.

        Parameters
        ----------
        progress : counts what the device has done of the work before the replay, such as prompts.

        Raises
        ------
        DeviceError
            The device failed, or published nothing and made no progress for 120 s; a note tells
            both sides' stacks then.
        HostWorkError
            A host step of a replay failed.
        """
        # No local of a frame that Ctrl-C leaves may hold what close() gives back.
        self._await(self.unread[0].replay, shield, progress)
        flight = self.unread[0]
        self._retire(flight.replay - 1, stats)
        self._check(flight)
        while self._behind:
            graph = self._behind.popleft()
            with self._numbered(flight):
                graph.launch(self._stream)
            if self._behind:
                self._await(flight.replay, shield, progress, graph)
                self._check(flight)
        return flight

    def grammar_error(self, slot: int) -> str:
        """What the grammar backend said when a slot's request failed, or empty."""
        return self._parts.decoder.error(slot)

    def drafter_error(self, seat: RowAssignment) -> GraftError | None:
        """Why the drafter has ended who sits there, if it has."""
        drafter = self._parts.drafter
        return None if drafter is None else drafter.failure(seat.slot, seat.epoch)

    def _await(
        self,
        replay: int,
        shield: Shield,
        progress: Callable[[], int],
        graph: GraphExec | None = None,
    ) -> None:
        """Wait until a replay has published its results, or one of its graphs is over."""
        known = progress()
        deadline = time.monotonic() + ROUND_DEADLINE_S
        shield.check()
        over = graph.wait if graph else partial(self._parts.outputs.wait, replay)
        while not over(POLL_S):
            self._stream.query()  # a faulted device says so here
            done = progress()
            now = time.monotonic()
            if done != known:
                known = done
                deadline = now + ROUND_DEADLINE_S
            if now > deadline:
                late = DeviceError(
                    f"replay {replay} published no result within {ROUND_DEADLINE_S:.0f} s"
                )
                late.add_note(describe_running())
                raise late
            shield.check()

    @contextmanager
    def _numbered(self, flight: ReplayInFlight) -> Iterator[None]:
        """Errors of a graph's host steps count that graph's replays: name the engine's instead."""
        try:
            yield
        except HostWorkError as error:
            numbers = [
                f.replay
                for f in (flight, *self._tails, *self.unread)
                if f.graph is flight.graph and f.own == error.replay
            ]
            if not numbers:
                raise
            text = str(error).replace(f" in replay {error.replay}", f" in replay {numbers[0]}", 1)
            engine = HostWorkError(text, node=error.node, replay=numbers[0])
            for note in getattr(error, "__notes__", ()):
                engine.add_note(note)
            raise engine from error.__cause__

    def row(self, b: int) -> RowResult:
        """Read row `b` of the oldest unread replay, which was waited for."""
        outputs = self._parts.outputs
        flight = self.unread[0]
        replay = flight.replay
        most = flight.seats[b].running.request.logprobs
        row = outputs.row("rows", replay)[b]
        slot, count, reason, accepted, tested, cut = row[:6].tolist()
        tokens = row[_HEAD : _HEAD + count].tolist()
        result = RowResult(slot, reason, accepted, tested, cut, tokens)
        if most is not None:
            told = outputs.row("logprobs", replay)[b].view(LOGPROBS)[:count]
            for token in told:
                top = tuple(zip(token["ids"].tolist(), token["logprobs"].tolist(), strict=True))
                legal = tuple(pair for pair in top[:most] if pair[1] > -math.inf)
                result.logprobs.append(Logprob(float(token["logprob"]), legal))
        if self.on_row is not None:
            self.on_row(flight.seats[b], result)
        return result

    def finish(self) -> None:
        """The oldest unread replay was read: its entries may be used again."""
        flight = self.unread.popleft()
        self._parts.inputs.release(flight.replay)
        self._parts.outputs.release(flight.replay)
        self._tails.append(flight)

    def settle(self, stats: EngineStats) -> None:
        """Wait for the tail of the last replay, where all were read: the device is idle then."""
        self._stream.synchronize()
        self._retire(self.number, stats)

    def drain(self) -> None:
        """Wait for the device and retire everything, read or not; nothing is launched afterwards.

        Raises
        ------
        DeviceError
            The device failed; snapshots are given back all the same.
        """
        try:
            self._stream.synchronize()
        finally:
            for flight in (*self._tails, *self.unread):
                self._parts.decoder.retire(flight.replay)
            self._tails.clear()
            self.unread.clear()
            self._behind.clear()
            self.retired = self.number

    def close(self) -> None:
        """Let go of the device's objects, whoever still holds this one; after `drain`."""
        del self._parts, self._stream

    def _retire(self, replay: int, stats: EngineStats) -> None:
        """Replays up to `replay`, all of them read, are over."""
        while self._tails and self._tails[0].replay <= replay:
            flight = self._tails.popleft()
            self._parts.decoder.retire(flight.replay)
            self.retired = flight.replay
            self._time_parts(flight, stats)
            self._check(flight)

    def _check(self, flight: ReplayInFlight) -> None:
        """Raise what a host step of its graphs raised, in this replay or one before."""
        with self._numbered(flight):
            for graph in flight.graph.execs:
                graph.check()

    def _time_parts(self, flight: ReplayInFlight, stats: EngineStats) -> None:
        timeline = self._parts.timeline
        replay = flight.replay
        parts = flight.graph.timed
        stamps = timeline.field("ns").array[replay % timeline.slots][: len(parts) + 1].tolist()
        if self.on_parts is not None:
            self.on_parts(flight, stamps)
        if stamps[0] > 0:
            ns = max(stamps) - stamps[0]
            graph = flight.graph
            stats.round_ns += ns
            if flight.seats:
                known = self.round_s or 1e-9 * ns
                self.round_s = known + ROUND_SHARE * (min(1e-9 * ns, 2 * known) - known)
            self._budget.took(graph.batch, graph.drafts, ns, idle=not flight.seats)
        told = parts if self._parts.every_part else ()
        for part, start, end in zip(told, stamps, stamps[1:], strict=False):
            if start > 0 and end > 0:
                stats.part_ns[part.name] = stats.part_ns.get(part.name, 0) + end - start
