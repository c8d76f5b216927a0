"""Replays of round graphs: launch, wait, read results and retire.

A *replay* is one launch of the CUDA graph of a round. It reads the slots of its batch rows from an
entry of an input ring, and publishes its results in an entry of an output ring. Both rings are in
pinned memory.

Several replays may be in flight. A replay is *unread* from its launch until the host has read its
results. It is *retired* once the host knows that all its work is complete. A replay retires later
than it can be read, because it generates the next drafts after it has published its results.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from graft.cudagraph.device import Stream
from graft.cudagraph.driver.stacks import describe_running
from graft.cudagraph.errors import DeviceError, GraftError, HostWorkError
from graft.cudagraph.graph.exec import GraphExec
from graft.grammar.decoder import GuidedRequest
from graft.models.engine.interrupt import Shield
from graft.models.engine.request_state import RequestState
from graft.models.engine.stats import EngineStats
from graft.models.request import Logprob
from graft.models.round.budget import DraftBudget
from graft.models.round.ema import Ema
from graft.models.round.round import RoundGraph, RoundResources
from graft.sampling.results import ROUND_ROW
from graft.sampling.state import LOGPROBS

__all__ = ["ReplayInFlight", "Replays", "RowAssignment", "RowResult"]

#: Maximum time in seconds that the host waits for a result. The time starts anew whenever a prefill
#: chunk completes.
ROUND_DEADLINE_S = 120.0
#: Interval in seconds at which a wait checks for device failures and Ctrl-C.
POLL_S = 0.1
#: Weight of the latest sample in the moving average of the round time.
ROUND_SHARE = 0.2
#: Number of int32 words that precede the tokens in a result row.
_HEADER_WORDS = ROUND_ROW.itemsize // 4


@dataclass(frozen=True)
class RowAssignment:
    """The request that a batch row was launched with, and the request's slot and epoch at launch.

    The request may have left the slot since, because of a stop string, cancellation or preemption.
    The same request may even have left the slot and got it again, which changes its epoch. In these
    cases, the assignment is stale and the results of the row are discarded.
    """

    state: RequestState
    slot: int
    epoch: int

    @property
    def stale(self) -> bool:
        """Whether the request has left the slot since the launch."""
        return self.state.slot != self.slot or self.state.epoch != self.epoch


@dataclass(frozen=True)
class ReplayInFlight:
    """A launched replay.

    Attributes
    ----------
    number
        Number of the replay; the first replay of an engine has number 1.
    graph
        Graph that was launched.
    graph_number
        Number of the replay among the replays of this graph. Errors of host steps report this
        number.
    rows
        Requests of the batch rows, without padding rows.
    repeats
        Whether the replay belongs to a generation loop, so that another replay may follow it
        without a launch.
    """

    number: int
    graph: RoundGraph
    graph_number: int
    rows: tuple[RowAssignment, ...]
    repeats: bool = False


@dataclass(frozen=True)
class RowResult:
    """Results of one batch row of a replay.

    Attributes
    ----------
    slot
        Slot of the row; -1 for a padding row.
    reason
        Finish reason, a REASON_* code of native/records/exchange.h; 0 if the request continues.
    accepted
        Number of drafts accepted.
    tested
        Number of drafts verified.
    cut
        Number of drafts that the round did not verify, because it had no forward rows for them.
    relaxed
        Number of accepted drafts that exact verification would have rejected.
    tokens
        Committed tokens in order.
    logprobs
        Log probabilities of the tokens; empty unless requested.
    """

    slot: int
    reason: int
    accepted: int
    tested: int
    cut: int
    relaxed: int
    tokens: list[int]
    logprobs: list[Logprob] = field(default_factory=list)


class Replays:
    """Launches rounds one after another on one stream and reads their results.

    Replays run in order, so replay ``r - 1`` is complete when replay ``r`` has published its
    results. The host then retires replay ``r - 1``, which means that it releases the snapshot of
    the grammar matchers that the replay used, and reads the replay's time stamps.

    Parameters
    ----------
    resources
        Resources that all graphs share, such as rings, grammar decoder, drafter and timeline.
    stream
        Stream of the replays.
    budget
        Receives the measured time of each replay.

    Attributes
    ----------
    launched
        Number of the last replay launched. A counter on the device has the same value.
    retired
        Number of the last replay known to be complete.
    unread
        Launched replays whose results have not been read, oldest first.
    looping
        Whether a generation loop is running. It may run more replays than the host knows of, so
        nothing may be launched meanwhile.
    on_parts
        Function to call for each complete replay, or None. Its arguments are the replay and the
        replay's time stamps in order, in device nanoseconds.
    on_row
        Function to call for each row that is read, or None. Its arguments are the row's
        `RowAssignment` and `RowResult`.
    """

    def __init__(self, resources: RoundResources, stream: Stream, budget: DraftBudget):
        self._resources = resources
        self._stream = stream
        self._budget = budget
        self.launched = 0
        self.retired = 0
        self._round_s = Ema(ROUND_SHARE, max_ratio=2.0)
        self.unread: deque[ReplayInFlight] = deque()
        self.looping = False
        # Replays whose results have been read, but which may still be running.
        self._unretired: deque[ReplayInFlight] = deque()
        # Number of launches of each graph, by `id` of the graph.
        self._launches: Counter[int] = Counter()
        self.on_parts: Callable[[ReplayInFlight, list[int]], None] | None = None
        self.on_row: Callable[[RowAssignment, RowResult], None] | None = None

    @property
    def round_s(self) -> float:
        """Moving average of the round time in seconds; 0.0 before the first round.

        Only rounds with at least one request are included. A sample is clamped to at most twice the
        average.
        """
        return self._round_s.value or 0.0

    def launch(
        self,
        graph: RoundGraph,
        states: Sequence[RequestState],
        served: Sequence[GuidedRequest],
        max_rounds: int = 1,
    ) -> None:
        """Publish the slot of each batch row and launch one replay.

        The host and the device exchange inputs and outputs through rings in pinned memory, with one
        entry per replay. The host writes the number of the replay into the replay's ring entries
        and into the snapshot of the grammar matchers. A replay that reads a different number there
        treats every row as padding. If the results of an earlier replay in the same ring entry have
        not been read yet, the ring raises an error before anything is overwritten.

        Parameters
        ----------
        graph
            Graph of the replay.
        states
            Requests of the batch rows.
        served
            Those of the requests for which the host runs grammar steps.
        max_rounds
            Maximum number of rounds that the launch runs.
        """
        resources = self._resources
        number = self.launched + 1
        resources.outputs.reserve(number)
        resources.inputs.reserve(number)
        slots = resources.inputs.row("slot", number)
        reserved = resources.inputs.row("reserved", number)
        timeline = resources.timeline
        timeline["ns"].array[number % timeline.slots] = 0
        slots[:] = -1
        for row, state in enumerate(states):
            slots[row] = state.slot
            reserved[row] = state.reserved_positions
        resources.inputs.row("max_rounds", number)[:] = max_rounds
        if graph.has_host_steps:
            resources.decoder.publish(number, served)
        else:
            resources.decoder.skip(number)
        resources.inputs.publish(number)
        self.launched = number
        rows = tuple(RowAssignment(state, state.slot, state.epoch) for state in states)
        graph_id = id(graph)
        self._launches[graph_id] += 1
        flight = ReplayInFlight(number, graph, self._launches[graph_id], rows, max_rounds > 1)
        self.unread.append(flight)
        with self._renumber_errors(flight):
            graph.launch(self._stream)

    def leave_loop(self) -> None:
        """Ask the running generation loop to end.

        This class launches no loops, so it does nothing here; `LoopReplays` overrides it.
        """

    def wait(
        self, stats: EngineStats, shield: Shield, count_progress: Callable[[], int] = lambda: 0
    ) -> ReplayInFlight:
        """Wait until the oldest unread replay has published its results, and return it.

        Parameters
        ----------
        stats
            Counters to which the times of retired replays are added.
        shield
            Shield that defers Ctrl-C. While this method waits, deferred signals are passed on, so
            that Ctrl-C raises KeyboardInterrupt.
        count_progress
            Function that returns the number of completed pieces of work that were enqueued before
            the replay, such as prefill chunks. The deadline starts anew when this number changes.

        Raises
        ------
        DeviceError
            If the device has failed, or if the replay published no result and no other work
            completed for `ROUND_DEADLINE_S` seconds. In the second case, a note of the error
            contains the stacks of the waiting thread and of the running host functions.
        HostWorkError
            If a host step of a replay failed. A host step is CPU work that a graph runs as a node.
        """
        # The traceback of a KeyboardInterrupt keeps the local variables of this frame alive. None
        # of them may own device resources.
        self._wait_until_published(self.unread[0].number, shield, count_progress)
        flight = self.unread[0]
        self._retire(flight.number - 1, stats)
        self._check(flight)
        wait_for = partial(self._wait_until_published, flight.number, shield, count_progress)
        with self._renumber_errors(flight):
            flight.graph.finish(self._stream, wait_for)
        return flight

    def grammar_error(self, state: RequestState) -> str:
        """Return the grammar backend's error message of a failed request, or an empty string."""
        return self._resources.decoder.error(state.slot)

    def drafter_error(self, assignment: RowAssignment) -> GraftError | None:
        """Return the error with which the drafter failed for the request of a row, or None."""
        drafter = self._resources.drafter
        return None if drafter is None else drafter.failure(assignment.slot, assignment.epoch)

    def _wait_until_published(
        self,
        number: int,
        shield: Shield,
        count_progress: Callable[[], int],
        graph: GraphExec | None = None,
    ) -> None:
        """Wait until a replay has published its results.

        If `graph` is given, wait until this graph is complete instead. `shield` and
        `count_progress` are as in `wait`.
        """
        progress = count_progress()
        deadline = time.monotonic() + ROUND_DEADLINE_S
        shield.check()
        outputs = self._resources.outputs
        wait = graph.wait if graph else partial(outputs.wait, number, stream=self._stream.handle)
        while not wait(POLL_S):
            self._stream.query()  # raises if the device has faulted
            new_progress = count_progress()
            now = time.monotonic()
            if new_progress != progress:
                progress = new_progress
                deadline = now + ROUND_DEADLINE_S
            if now > deadline:
                error = DeviceError(
                    f"replay {number} published no result within {ROUND_DEADLINE_S:.0f} s"
                )
                error.add_note(describe_running())
                raise error
            shield.check()

    @contextmanager
    def _renumber_errors(self, flight: ReplayInFlight) -> Iterator[None]:
        """In errors of host steps, replace the graph's replay number by the engine's replay number.

        An error contains `graph_number`, which counts only the replays of one graph.
        `ReplayInFlight.number` counts the replays of all graphs.
        """
        try:
            yield
        except HostWorkError as error:
            number = self._find_number(flight, error.replay)
            if number is None:
                raise
            text = str(error)
            text = text.replace(f" in replay {error.replay}", f" in replay {number}", 1)
            renumbered = HostWorkError(text, node=error.node, replay=number)
            for note in getattr(error, "__notes__", ()):
                renumbered.add_note(note)
            raise renumbered from error.__cause__

    def _find_number(self, flight: ReplayInFlight, graph_number: int) -> int | None:
        """Return the engine's number of a replay; None if the replay has retired.

        It is replay number `graph_number` of the graph of `flight`.
        """
        for other in (flight, *self._unretired, *self.unread):
            if other.graph is flight.graph and other.graph_number == graph_number:
                return other.number
        return None

    def row(self, index: int) -> RowResult:
        """Return the results of a batch row of the oldest unread replay.

        `wait` must have returned this replay.
        """
        outputs = self._resources.outputs
        flight = self.unread[0]
        row = outputs.row("rows", flight.number)[index]
        slot, count, reason, accepted, tested, cut, relaxed = row[:7].tolist()
        tokens = row[_HEADER_WORDS : _HEADER_WORDS + count].tolist()
        result = RowResult(slot, reason, accepted, tested, cut, relaxed, tokens)
        assignment = flight.rows[index]
        num_top = assignment.state.request.logprobs
        if num_top is not None:
            records = outputs.row("logprobs", flight.number)[index].view(LOGPROBS)
            for record in records[:count]:
                result.logprobs.append(_read_logprob(record, num_top))
        if self.on_row is not None:
            self.on_row(assignment, result)
        return result

    def finish(self) -> None:
        """Remove the oldest replay from `unread`, the replays whose results have not been read.

        The caller must have read the results of this replay. The method also releases the replay's
        entries in the rings of inputs and outputs, so that later replays can use them.
        """
        flight = self.unread.popleft()
        self._resources.inputs.release(flight.number)
        self._resources.outputs.release(flight.number)
        self._unretired.append(flight)

    def wait_idle(self, stats: EngineStats) -> None:
        """Wait until the device is idle and retire all replays.

        The caller must already have read the results of all replays.
        """
        self._stream.synchronize()
        self._retire(self.launched, stats)

    def drain(self) -> None:
        """Wait for the device and retire all replays, even those whose results were not read.

        No replay may be launched after this call.

        Raises
        ------
        DeviceError
            If the device failed. The snapshots of the grammar matchers are released nevertheless.
        """
        try:
            self._stream.synchronize()
        finally:
            for flight in (*self._unretired, *self.unread):
                self._resources.decoder.retire(flight.number)
            self._unretired.clear()
            self.unread.clear()
            self.retired = self.launched

    def close(self) -> None:
        """Drop the references to device objects. Call this method after `drain`."""
        del self._resources, self._stream

    def _retire(self, number: int, stats: EngineStats) -> None:
        """Retire the replays up to `number`. They must be complete, and their results read."""
        while self._unretired and self._unretired[0].number <= number:
            flight = self._unretired.popleft()
            self._resources.decoder.retire(flight.number)
            self.retired = flight.number
            self._record_times(flight, stats)
            self._check(flight)

    def _check(self, flight: ReplayInFlight) -> None:
        """If a host step of the replay's graph has failed in any replay so far, raise its error."""
        with self._renumber_errors(flight):
            flight.graph.check()

    def _record_times(self, flight: ReplayInFlight, stats: EngineStats) -> None:
        """Add the device times of a complete replay to `stats`, `round_s` and the budget.

        The budget estimates from them how long a round takes, depending on its number of drafts.
        """
        timeline = self._resources.timeline
        graph = flight.graph
        parts = graph.timed
        entry = timeline["ns"].array[flight.number % timeline.slots]
        stamps = entry[: len(parts) + 1].tolist()
        if self.on_parts is not None:
            self.on_parts(flight, stamps)
        if stamps[0] > 0:
            ns = max(stamps) - stamps[0]
            is_idle = not flight.rows
            stats.round_ns += ns
            if not is_idle:
                self._round_s.update(1e-9 * ns)
            self._budget.record_time(graph.batch, graph.drafts, ns, idle=is_idle)
        if not self._resources.every_part:
            return
        for part, start, end in zip(parts, stamps, stamps[1:], strict=False):
            if start <= 0 or end <= 0:
                continue
            total = stats.part_ns.get(part.name, 0)
            stats.part_ns[part.name] = total + end - start


def _read_logprob(record: np.void, num_top: int) -> Logprob:
    """Convert a `LOGPROBS` record of the device to a `Logprob` with the `num_top` most likely ids.

    Ids of probability 0 are left out.
    """
    ids = record["ids"].tolist()
    logprobs = record["logprobs"].tolist()
    top = []
    for token, logprob in zip(ids[:num_top], logprobs[:num_top], strict=True):
        if logprob > -math.inf:
            top.append((token, logprob))
    return Logprob(float(record["logprob"]), tuple(top), int(record["rank"]))
