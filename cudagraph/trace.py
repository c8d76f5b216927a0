"""Timelines of replays: which node ran when, on which lane, and which waits were exposed.

On the soft device the driver tells the begin and end of every node. CUDA tells neither, so there
the events are those that somebody stamped on the device's clock (a round's parts), and host steps
on the host's clock, tied to the device's with an error that the trace states.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from graft.cudagraph import softtrace, timeline_svg
from graft.cudagraph.errors import OptionError

if TYPE_CHECKING:
    from graft.cudagraph.device import Device
    from graft.cudagraph.graph import Graph, GraphExec

__all__ = ["Trace", "TraceEvent", "Wait"]


@dataclass(frozen=True)
class TraceEvent:
    """Something that ran, in nanoseconds of ``time.monotonic_ns``.

    Attributes
    ----------
    name, kind, lane : as of the graph's node.
    graph : name of the graph.
    replay : which launch, from 1, in the order of the trace.
    start_ns, end_ns : begin of the first and end of the last worker's share.
    workers : device workers that took a share.
    """

    name: str
    kind: str
    lane: str
    graph: str
    replay: int
    start_ns: int
    end_ns: int
    workers: int = 1


@dataclass(frozen=True)
class Wait:
    """A lane's device work stood still for host work, with nothing of its own lane left to do.

    Attributes
    ----------
    lane, node : who waited.
    cause : the host step of another lane that ended last.
    replay, start_ns, end_ns : as of an event.
    """

    lane: str
    node: str
    cause: str
    replay: int
    start_ns: int
    end_ns: int

    @property
    def ns(self) -> int:
        """Length in nanoseconds."""
        return self.end_ns - self.start_ns


@dataclass
class Trace:
    """Events of replays.

    Attributes
    ----------
    device : one line that names the device; written into every picture.
    events : by begin.
    waits : exposed waits between lanes, by begin.
    clock_error_ns : how far host and device events may be apart; 0 where the clock is one.
    lost : device spans that found no room.
    """

    device: str
    events: list[TraceEvent] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    clock_error_ns: int = 0
    lost: int = 0

    @classmethod
    @contextmanager
    def record(
        cls, device: Device, watched: Mapping[GraphExec, Graph], capacity: int = 1 << 20
    ) -> Iterator[Trace]:
        """Record every replay of executables while the block runs; the trace is full afterwards.

        Parameters
        ----------
        device : Device
            The soft device; on CUDA add the events that were stamped.
        watched : mapping of GraphExec to Graph
            Executables and the definitions they were made from; open until the block has ended.

        Raises
        ------
        OptionError
            The device is not the soft one.
        """
        if device.kind != "soft":
            raise OptionError("the driver of CUDA hardware does not tell when a node runs")
        trace = cls(device.describe())
        with softtrace.recording(capacity) as recorded:
            yield trace
            device.synchronize()
            spans = recorded.read()
            trace.lost = recorded.lost
        for executable, graph in watched.items():
            own = [span for span in spans if span.exec == executable.handle]
            trace._add_graph(graph, own)
        trace.sort()

    def sort(self) -> None:
        """Order events and waits by begin."""
        self.events.sort(key=lambda event: event.start_ns)
        self.waits.sort(key=lambda wait: wait.start_ns)

    def _add_graph(self, graph: Graph, spans: Sequence[softtrace.SoftSpan]) -> None:
        index = {node: graph.node_index(node) for node in {span.node for span in spans}}
        known = [(i, span) for span in spans if (i := index[span.node]) is not None]
        number = max((e.replay for e in self.events if e.graph == graph.name), default=0)
        for launch in split_launches(known):
            number += 1
            shares: dict[int, list[softtrace.SoftSpan]] = defaultdict(list)
            for i, span in launch:
                shares[i].append(span)
            ran = {
                i: TraceEvent(
                    graph.nodes[i].name,
                    graph.nodes[i].kind,
                    graph.nodes[i].lane,
                    graph.name,
                    number,
                    min(s.begin_ns for s in own),
                    max(s.end_ns for s in own),
                    len(own),
                )
                for i, own in shares.items()
            }
            self.events.extend(ran.values())
            self.waits.extend(exposed_waits(ran, graph.edges))

    def replays(self) -> list[tuple[str, int]]:
        """Return (graph, replay) of every replay that has events, in order of begin."""
        seen: dict[tuple[str, int], None] = {}
        for event in self.events:
            seen.setdefault((event.graph, event.replay))
        return list(seen)

    def only(self, graph: str, replay: int) -> Trace:
        """Return the part of one replay."""
        events = [e for e in self.events if (e.graph, e.replay) == (graph, replay)]
        if not events:
            raise OptionError(f"the trace has no replay {replay} of graph {graph!r}")
        begin, end = events[0].start_ns, max(e.end_ns for e in events)
        waits = [w for w in self.waits if w.replay == replay and begin <= w.start_ns <= end]
        return Trace(self.device, events, waits, self.clock_error_ns, self.lost)

    def exposed(self) -> dict[str, list[int]]:
        """Return, per causing node, how long each wait for it was, in nanoseconds."""
        found: dict[str, list[int]] = defaultdict(list)
        for wait in self.waits:
            found[wait.cause].append(wait.ns)
        return dict(found)

    def summary(self) -> dict[str, Any]:
        """Return busy time per lane and exposed waits per cause, ready for JSON."""
        busy: dict[str, int] = defaultdict(int)
        for event in self.events:
            busy[event.lane] += event.end_ns - event.start_ns
        replays = len(self.replays())
        return {
            "device": self.device,
            "replays": replays,
            "busy_ns": dict(busy),
            "exposed_ns": {
                cause: {
                    "waits": len(ns),
                    "total": sum(ns),
                    "median": int(statistics.median(ns)),
                    "largest": max(ns),
                    "per_replay": sum(ns) // max(replays, 1),
                }
                for cause, ns in sorted(self.exposed().items())
            },
            "clock_error_ns": self.clock_error_ns,
            "lost_spans": self.lost,
        }

    def to_chrome(self) -> str:
        """Return JSON in Chrome's trace event format, which Perfetto opens; times in µs."""
        begin = min((event.start_ns for event in self.events), default=0)
        lanes = list(dict.fromkeys(event.lane for event in self.events))
        rows: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": self.device}}
        ]
        rows += [
            {"ph": "M", "name": "thread_name", "pid": 1, "tid": i, "args": {"name": lane}}
            for i, lane in enumerate(lanes, 1)
        ]

        def complete(name: str, kind: str, lane: int, start: int, end: int, **args: object) -> None:
            rows.append(
                {
                    "ph": "X", "name": name, "cat": kind, "pid": 1, "tid": lane,
                    "ts": (start - begin) / 1000, "dur": (end - start) / 1000, "args": args,
                }
            )  # fmt: skip

        for e in self.events:
            lane = lanes.index(e.lane) + 1
            complete(e.name, e.kind, lane, e.start_ns, e.end_ns, graph=e.graph, replay=e.replay,
                     workers=e.workers)  # fmt: skip
        waiting = sorted({wait.lane for wait in self.waits})
        for i, name in enumerate(waiting, len(lanes) + 1):
            title = f"exposed waits of {name}"
            rows.append(
                {"ph": "M", "name": "thread_name", "pid": 1, "tid": i, "args": {"name": title}}
            )
            for w in self.waits:
                if w.lane == name:
                    complete(f"waits for {w.cause}", "exposed wait", i, w.start_ns, w.end_ns,
                             replay=w.replay)  # fmt: skip
        return json.dumps(
            {"traceEvents": rows, "displayTimeUnit": "ns", "otherData": self.summary()}
        )

    def to_svg(self, title: str = "") -> str:
        """Return a picture: a row per lane, exposed waits marked. Best of one replay, `only()`."""
        return timeline_svg.draw(self, title)


def split_launches(
    spans: Sequence[tuple[int, softtrace.SoftSpan]],
) -> list[list[tuple[int, softtrace.SoftSpan]]]:
    """Split one executable's spans, by begin, into launches.

    Launches of an executable run one after another, and each runs a node once, though several
    workers may share it. So a launch begins with a node that was seen when nothing runs any more.
    """
    launches: list[list[tuple[int, softtrace.SoftSpan]]] = []
    seen: set[int] = set()
    over = 0
    for node, span in spans:
        if not launches or (node in seen and span.begin_ns >= over):
            launches.append([])
            seen, over = set(), 0
        launches[-1].append((node, span))
        seen.add(node)
        over = max(over, span.end_ns)
    return launches


def exposed_waits(ran: Mapping[int, TraceEvent], edges: Sequence[tuple[int, int]]) -> list[Wait]:
    """Return where device work stood still for host work of another lane, in one replay.

    A node that depends on other lanes is ready on its own lane when its own lane's nodes have
    ended. What the other lane's host step takes longer is exposed.
    """
    before: dict[int, list[int]] = defaultdict(list)
    for start, end in edges:
        before[end].append(start)
    waits = []
    for i, event in ran.items():
        own = [ran[d].end_ns for d in before[i] if d in ran and ran[d].lane == event.lane]
        others = [ran[d] for d in before[i] if d in ran and ran[d].lane != event.lane]
        others = [other for other in others if other.kind == "host"]
        if event.kind == "host" or not own or not others:
            continue
        ready, last = max(own), max(others, key=lambda other: other.end_ns)
        if last.end_ns > ready:
            waits.append(
                Wait(event.lane, event.name, last.name, event.replay, ready, last.end_ns)
            )
    return waits
