"""Replays as the host sees them: published, launched, awaited, read and retired."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from graft.cudagraph.device import Stream
from graft.cudagraph.errors import DeadlineError, DeviceError
from graft.grammar.decoder import GuidedRequest
from graft.models.interrupt import Shield
from graft.models.round import PARTS, STAMPS, RoundGraph, RoundParts
from graft.models.running import Running
from graft.models.stats import EngineStats

ROUND_DEADLINE_S = 120.0
POLL_S = 0.1


@dataclass(frozen=True)
class RowResult:
    """What one batch row of a replay brought.

    Attributes
    ----------
    slot : who sat there, -1 for a padding row.
    reason : REASON_* of cudagraph/kernels/graft.cuh; 0 goes on.
    accepted, tested : drafts accepted and drafts there were.
    tokens : what was committed, in order.
    """

    slot: int
    reason: int
    accepted: int
    tested: int
    tokens: list[int]


class Replays:
    """The rounds' replays, one after another on one stream.

    A replay's results are published by its verification; its tail still drafts while the host
    reads them and launches the next. So when replay r has published, replay r-1 is wholly over, and
    only then its snapshot is retired and its timeline read.

    Attributes
    ----------
    number : of the last replay launched; the device counts the same.
    launched : graph launches so far.
    pending : who sits in the rows of the replay whose results were not read yet, else None.
    on_parts : told each replay's number and stamps, by name, on the device's clock.
    """

    def __init__(self, parts: RoundParts, stream: Stream):
        self._parts, self._stream = parts, stream
        self.number = 0
        self.launched = 0
        self.pending: list[Running] | None = None
        self.on_parts: Callable[[int, dict[str, int]], None] | None = None

    def launch(self, graph: RoundGraph, rows: list[Running]) -> None:
        """Publish who sits in which row, and launch one replay.

        The input entry, the matchers' snapshot and the output entry carry the replay's number: a
        replay that finds another number treats every row as padding.
        """
        parts = self._parts
        replay = self.number + 1
        entry = replay % parts.inputs.entries
        parts.timeline.field("ns").array[entry] = 0
        slots = parts.inputs.field("slot").array[entry]
        slots[:] = -1
        slots[: len(rows)] = [r.slot for r in rows]
        guided = [GuidedRequest(r.slot, r.epoch, r.matcher, len(r.prompt) - 1) for r in rows]
        parts.decoder.publish(replay, guided)
        parts.inputs.publish(replay)
        parts.outputs.reserve(replay)
        self.number = replay
        self.pending = rows
        graph.exec.launch(self._stream)
        self.launched += 1

    def wait(self, stats: EngineStats, shield: Shield) -> None:
        """Wait until the last replay's results are published.

        Raises
        ------
        DeviceError
            The device failed, or published nothing within 120 s.
        HostWorkError
            A host step of the replay failed.
        """
        parts, replay = self._parts, self.number
        deadline = time.monotonic() + ROUND_DEADLINE_S
        while True:
            shield.check()
            try:
                parts.outputs.poll(replay, timeout_s=POLL_S)
                break
            except DeadlineError as error:
                self._stream.query()  # a faulted device says so here
                if time.monotonic() > deadline:
                    raise DeviceError(
                        f"replay {replay} published no result within {ROUND_DEADLINE_S:.0f} s"
                    ) from error
        parts.inputs.consumed(replay)
        if replay > 1:
            parts.decoder.retire(replay - 1)
            self._time_parts(replay - 1, stats)

    def row(self, b: int) -> RowResult:
        """Read row `b` of the replay that was waited for."""
        outputs = self._parts.outputs
        entry = self.number % outputs.entries
        slot, count, reason, accepted, tested = (
            int(outputs.field(name).array[entry, b])
            for name in ("slot", "count", "reason", "accepted", "draft_len")
        )
        tokens = outputs.field("tokens").array[entry, b, :count].tolist()
        return RowResult(slot, reason, accepted, tested, tokens)

    def finish(self) -> None:
        """The last replay's results were read: its output entry may be used again."""
        self._parts.outputs.consumed(self.number)
        self.pending = None

    def drain(self) -> None:
        """Wait for the device and retire the last replay; nothing is launched afterwards."""
        self._stream.synchronize()
        if self.pending is not None and self.number > 1:
            self._parts.decoder.retire(self.number - 1)  # its wait was interrupted
        if self.number:
            self._parts.decoder.retire(self.number)

    def _time_parts(self, replay: int, stats: EngineStats) -> None:
        timeline = self._parts.timeline
        row: Sequence[int] = timeline.field("ns").array[replay % timeline.slots].tolist()
        ns = dict(zip(STAMPS, row, strict=True))
        if self.on_parts is not None:
            self.on_parts(replay, ns)
        for name, start, end in PARTS:
            if ns[start] > 0 and ns[end] > 0:
                stats.part_ns[name] = stats.part_ns.get(name, 0) + ns[end] - ns[start]
