"""Record timelines of graph replays on the soft device.

A timeline shows when each node ran and on which lane. A lane is an in-order sequence of graph
nodes. A host step is a graph node that runs on the host. In an exposed wait, all earlier nodes of a
lane have ended, but its next node waits for a host step of another lane, or for a copy that follows
that host step.
"""

from __future__ import annotations

import ctypes
import json
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from graft.cudagraph.device import Device
from graft.cudagraph.driver.chooser import soft_library
from graft.cudagraph.errors import OptionError
from graft.cudagraph.graph.graph import Graph, GraphExec
from graft.cudagraph.graph.nodes import Contents, Node
from graft.sampling.checks import check_integer

#: Kinds of nodes that run or await host steps.
HOST_KINDS = ("host", "request", "wait")
#: Default number of spans that a recording can hold. A span has 56 bytes.
CAPACITY = 1 << 20


class Span(ctypes.Structure):
    """Span of time in which one worker thread of the soft device executed a node or part of it.

    The fields are those of the C struct that ``softcuda_trace_read`` copies.
    """

    _fields_ = (
        ("exec", ctypes.c_uint64),
        ("node", ctypes.c_uint64),
        ("worker", ctypes.c_uint32),
        ("kind", ctypes.c_uint32),
        ("begin_ns", ctypes.c_uint64),
        ("end_ns", ctypes.c_uint64),
        ("launch", ctypes.c_uint64),
        ("run", ctypes.c_uint64),
    )


@dataclass(frozen=True)
class TraceEvent:
    """One execution of a graph node or of a part of a round.

    The times are ``time.monotonic_ns`` values. A node in the body of a conditional has one event
    per execution of the body, and its lane is named "<body>/<lane>". The event of the conditional
    node contains them.
    """

    name: str
    kind: str
    lane: str
    graph: str  #: name of the graph
    replay: int  #: number of the replay of the graph; the first one is 1
    start_ns: int
    end_ns: int
    node: Node | None = None  #: the node; None for a part of a round


@dataclass(frozen=True)
class Wait:
    """An exposed wait: a lane had no work to run because it waited for a host step."""

    lane: str
    node: str  #: name of the node that waited
    cause: str  #: name of the host step of another lane for which the node waited
    replay: int
    start_ns: int
    end_ns: int


@dataclass
class Trace:
    """Timeline of replays: events, and waits of lanes for host steps, sorted by start time."""

    device: str  #: description of the device
    events: list[TraceEvent] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    #: Maximum error of device times, after their conversion to the host's clock.
    clock_error_ns: int = 0
    #: Number of spans that did not fit into the recording.
    lost: int = 0

    @property
    def start_ns(self) -> int:
        """Start of the first event."""
        return self.events[0].start_ns

    @property
    def end_ns(self) -> int:
        """End of the last event."""
        return max(event.end_ns for event in self.events)

    def sort(self) -> None:
        """Sort events and waits by start time."""
        self.events.sort(key=lambda event: event.start_ns)
        self.waits.sort(key=lambda wait: wait.start_ns)

    def replays(self) -> list[tuple[str, int]]:
        """Return the pairs (graph name, replay number) of all recorded replays by start time."""
        keys = [(event.graph, event.replay) for event in self.events]
        return list(dict.fromkeys(keys))

    def select(self, graph: str, replay: int) -> Trace:
        """Return the timeline of one replay of the graph with this name."""
        events = [e for e in self.events if (e.graph, e.replay) == (graph, replay)]
        if not events:
            raise OptionError(f"the trace has no replay {replay} of graph {graph!r}")
        selected = Trace(self.device, events, [], self.clock_error_ns, self.lost)
        for wait in self.waits:
            if wait.replay == replay and selected.start_ns <= wait.start_ns <= selected.end_ns:
                selected.waits.append(wait)
        return selected

    def times(self) -> dict[Node, list[float]]:
        """Return the seconds of each execution of each node, for ``Graph.svg`` and ``Graph.dot``.

        Nodes in the bodies of conditionals are included, with one time per execution of the body.
        """
        seconds: dict[Node, list[float]] = defaultdict(list)
        for event in self.events:
            if event.node is not None:
                seconds[event.node].append((event.end_ns - event.start_ns) * 1e-9)
        return dict(seconds)

    def add_graph(self, graph: Graph, spans: Sequence[Span]) -> None:
        """Add the replays of one executable of `graph`, given its spans sorted by start time."""
        last_replay = max((e.replay for e in self.events if e.graph == graph.name), default=0)
        places = dict(_places(graph.contents))
        launches: dict[int, list[Span]] = defaultdict(list)
        for span in spans:
            if span.node in places:
                launches[span.launch].append(span)
        for replay, launch in enumerate(sorted(launches), last_replay + 1):
            outer: dict[int, list[Span]] = defaultdict(list)
            inner: dict[tuple[int, int], list[Span]] = defaultdict(list)
            for span in launches[launch]:
                place = places[span.node]
                outer[place.outermost].append(span)
                if place.body:
                    inner[span.node, span.run].append(span)
            events = {
                i: _event(graph.nodes[i], graph.nodes[i].lane, graph.name, replay, shares)
                for i, shares in outer.items()
            }
            self.events.extend(events.values())
            self.waits.extend(exposed_waits(events, graph.edges))
            for (handle, _), shares in inner.items():
                node, body, _ = places[handle]
                lane = f"{body}/{node.lane}"
                self.events.append(_event(node, lane, graph.name, replay, shares))

    def summary(self) -> dict[str, Any]:
        """Return how long each lane was busy, and how long lanes waited for each host step.

        The result can be passed to ``json.dumps``. Times are in nanoseconds.
        """
        busy: dict[str, int] = defaultdict(int)
        for event in self.events:
            busy[event.lane] += event.end_ns - event.start_ns
        waits_by_cause: dict[str, list[int]] = defaultdict(list)
        for wait in self.waits:
            waits_by_cause[wait.cause].append(wait.end_ns - wait.start_ns)
        exposed = {}
        for cause, durations in sorted(waits_by_cause.items()):
            exposed[cause] = {
                "waits": len(durations),
                "total": sum(durations),
                "largest": max(durations),
                "median": int(statistics.median(durations)),
            }
        return {
            "device": self.device,
            "replays": len(self.replays()),
            "busy_ns": dict(busy),
            "exposed_ns": exposed,
            "clock_error_ns": self.clock_error_ns,
            "lost_spans": self.lost,
        }

    def to_chrome(self) -> str:
        """Return the trace as JSON in Chrome's trace event format, which Perfetto can open.

        Each lane is a track. The waits of a lane for host steps (`waits`) are on a separate track.
        Times are in microseconds since the first event.
        """
        origin = min((event.start_ns for event in self.events), default=0)
        tracks: dict[str, int] = {}
        complete = []
        for event in self.events:
            track = tracks.setdefault(event.lane, len(tracks))
            complete.append(_complete_event(event.name, event.kind, track, event, origin))
        for wait in self.waits:
            track = tracks.setdefault(f"exposed waits of {wait.lane}", len(tracks))
            name = f"waits for {wait.cause}"
            complete.append(_complete_event(name, "exposed wait", track, wait, origin))
        metadata: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": self.device}}
        ]
        for name, track in tracks.items():
            metadata.append(
                {"ph": "M", "name": "thread_name", "pid": 1, "tid": track, "args": {"name": name}}
            )
        return json.dumps(
            {
                "traceEvents": [*metadata, *complete],
                "displayTimeUnit": "ns",
                "otherData": self.summary(),
            }
        )


class _Place(NamedTuple):
    """Where a node is: in the graph itself (`body` is "") or in the body or child graph `body`.

    `outermost` is the index of the graph's own node that is or contains the node.
    """

    node: Node
    body: str
    outermost: int


def _places(
    contents: Contents, body: str = "", outermost: int | None = None
) -> Iterator[tuple[int, _Place]]:
    """Iterate over the CUgraphNodes of a graph, at any depth, and their places."""
    for node, handle in zip(contents.nodes, contents.handles, strict=True):
        index = node.index if outermost is None else outermost
        yield int(handle), _Place(node, body, index)
        for inner in contents.inner.get(node.index, ()):
            yield from _places(inner, inner.name, index)


def _event(node: Node, lane: str, graph: str, replay: int, shares: Sequence[Span]) -> TraceEvent:
    """Return the event of a node, of which several workers may have executed a share."""
    start_ns = min(span.begin_ns for span in shares)
    end_ns = max(span.end_ns for span in shares)
    return TraceEvent(node.name, node.kind, lane, graph, replay, start_ns, end_ns, node)


def _complete_event(
    name: str, category: str, track: int, timed: TraceEvent | Wait, origin: int
) -> dict[str, Any]:
    """Return `timed` as a complete event (phase "X") of Chrome's trace event format.

    Its times are relative to `origin`.
    """
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": 1,
        "tid": track,
        "ts": (timed.start_ns - origin) / 1000,
        "dur": (timed.end_ns - timed.start_ns) / 1000,
        "args": {"replay": timed.replay},
    }


@contextmanager
def record(
    device: Device, watched: Mapping[GraphExec, Graph], capacity: int = CAPACITY
) -> Iterator[Trace]:
    """Record all replays of the given executables while the block runs.

    `watched` maps each executable to its graph. The executables must stay open until the block
    ends, when the yielded trace is filled. At most `capacity` spans are recorded; `Trace.lost`
    counts all others. Raise OptionError unless `device` is the soft device, because no other driver
    reports when a node runs.
    """
    if device.kind != "soft":
        raise OptionError("the driver of CUDA hardware does not report when a node runs")
    for executable, graph in watched.items():
        if not isinstance(executable, GraphExec) or not isinstance(graph, Graph):
            raise OptionError(
                f"record() needs graphs by executable, such as {{run: graph}}, not a {graph!r} "
                f"for {executable!r}"
            )
    check_integer("capacity", capacity, 1, 2**40)
    trace = Trace(device.describe())
    library = ctypes.CDLL(str(soft_library()))
    library.softcuda_trace_read.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    library.softcuda_trace_lost.restype = ctypes.c_int64
    library.softcuda_trace(ctypes.c_size_t(capacity))
    try:
        yield trace
        device.synchronize()
        count = int(library.softcuda_trace_read(None, 0))
        spans = (Span * count)()
        library.softcuda_trace_read(spans, count)
        trace.lost = int(library.softcuda_trace_lost())
    finally:
        library.softcuda_trace(ctypes.c_size_t(0))
    by_begin = sorted(spans, key=lambda span: (span.begin_ns, span.end_ns))
    for executable, graph in watched.items():
        trace.add_graph(graph, [span for span in by_begin if span.exec == executable.handle])
    trace.sort()


def exposed_waits(events: Mapping[int, TraceEvent], edges: Sequence[tuple[int, int]]) -> list[Wait]:
    """Return the exposed waits of one replay. `events` maps node indices to the replay's events.

    A node is ready on its own lane when its predecessors on that lane have ended. If a predecessor
    on another lane ends later, the time in between is an exposed wait, provided that this
    predecessor is a host step or follows a host step on its lane. For example, the lane "model"
    waits for a copy of mask rows on the lane "grammar", which follows the host step that fills the
    rows.
    """
    predecessors: dict[int, list[int]] = defaultdict(list)
    for start, end in edges:
        if start in events and end in events:
            predecessors[end].append(start)
    waits = []
    for i, event in events.items():
        if event.kind in HOST_KINDS:
            continue
        same_lane = [events[j] for j in predecessors[i] if events[j].lane == event.lane]
        after_host_steps = []
        for j in predecessors[i]:
            step = _last_host_step(j, events, predecessors)
            if events[j].lane != event.lane and step is not None:
                after_host_steps.append((events[j].end_ns, step.name))
        if not same_lane or not after_host_steps:
            continue
        ready_ns = max(other.end_ns for other in same_lane)
        end_ns, cause = max(after_host_steps)
        if end_ns > ready_ns:
            waits.append(Wait(event.lane, event.name, cause, event.replay, ready_ns, end_ns))
    return waits


def _last_host_step(
    node: int, events: Mapping[int, TraceEvent], predecessors: Mapping[int, Sequence[int]]
) -> TraceEvent | None:
    """Return the event of the last host step on the lane of `node`, up to and including `node`."""
    lane = events[node].lane
    while True:
        if events[node].kind in HOST_KINDS:
            return events[node]
        earlier = [j for j in predecessors[node] if events[j].lane == lane]
        if not earlier:
            return None
        node = max(earlier, key=lambda j: events[j].end_ns)
