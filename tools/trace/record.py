"""Timelines of replays: which node ran when, on which lane, and which waits were exposed."""

from __future__ import annotations

import ctypes
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from graft.cudagraph.chooser import soft_library
from graft.cudagraph.device import Device
from graft.cudagraph.errors import OptionError
from graft.cudagraph.graph import Graph, GraphExec

#: Spans that a recording has room for, 40 bytes each.
CAPACITY = 1 << 20


class Span(ctypes.Structure):
    """One worker's share of one operation, as the soft device records it."""

    _fields_ = (
        ("exec", ctypes.c_uint64),
        ("node", ctypes.c_uint64),
        ("worker", ctypes.c_uint32),
        ("kind", ctypes.c_uint32),
        ("begin_ns", ctypes.c_uint64),
        ("end_ns", ctypes.c_uint64),
    )


@dataclass(frozen=True)
class TraceEvent:
    """Something that ran, in nanoseconds of ``time.monotonic_ns``; ``replay`` counts from 1."""

    name: str
    kind: str
    lane: str
    graph: str
    replay: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True)
class Wait:
    """Device work stood still for a host step of another lane, with nothing of its own to do."""

    lane: str
    node: str
    cause: str
    replay: int
    start_ns: int
    end_ns: int


@dataclass
class Trace:
    """Events of replays, and exposed waits between lanes, by begin.

    ``device`` is a line that names it; host and device events may be ``clock_error_ns`` apart;
    ``lost`` device spans found no room.
    """

    device: str
    events: list[TraceEvent] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    clock_error_ns: int = 0
    lost: int = 0

    def sort(self) -> None:
        """Order events and waits by begin."""
        self.events.sort(key=lambda event: event.start_ns)
        self.waits.sort(key=lambda wait: wait.start_ns)

    def replays(self) -> list[tuple[str, int]]:
        """Return (graph, replay) of every replay that has events, in order of begin."""
        return list(dict.fromkeys((event.graph, event.replay) for event in self.events))

    def only(self, graph: str, replay: int) -> Trace:
        """Return the part of one replay; OptionError when it is not there."""
        events = [e for e in self.events if (e.graph, e.replay) == (graph, replay)]
        if not events:
            raise OptionError(f"the trace has no replay {replay} of graph {graph!r}")
        begin = events[0].start_ns
        end = max(e.end_ns for e in events)
        waits = [w for w in self.waits if w.replay == replay and begin <= w.start_ns <= end]
        return Trace(self.device, events, waits, self.clock_error_ns, self.lost)

    def add_graph(self, graph: Graph, spans: Sequence[Span]) -> None:
        """Add the replays of one executable of ``graph`` from its spans by begin."""
        index = {node: graph.node_index(node) for node in {span.node for span in spans}}
        known = [(i, span) for span in spans if (i := index[span.node]) is not None]
        number = max((e.replay for e in self.events if e.graph == graph.name), default=0)
        for replay, launch in enumerate(split_launches(known, graph.edges), number + 1):
            shares: dict[int, list[Span]] = defaultdict(list)
            for i, span in launch:
                shares[i].append(span)
            ran = {}
            for i, own in shares.items():
                node = graph.nodes[i]
                begin = min(s.begin_ns for s in own)
                end = max(s.end_ns for s in own)
                ran[i] = TraceEvent(node.name, node.kind, node.lane, graph.name, replay, begin, end)
            self.events.extend(ran.values())
            self.waits.extend(exposed_waits(ran, graph.edges))

    def summary(self) -> dict[str, Any]:
        """Return busy time per lane and exposed waits per cause, ready for JSON."""
        busy: dict[str, int] = defaultdict(int)
        for event in self.events:
            busy[event.lane] += event.end_ns - event.start_ns
        exposed: dict[str, list[int]] = defaultdict(list)
        for wait in self.waits:
            exposed[wait.cause].append(wait.end_ns - wait.start_ns)
        return {
            "device": self.device,
            "replays": len(self.replays()),
            "busy_ns": dict(busy),
            "exposed_ns": {
                cause: {
                    "waits": len(ns),
                    "total": sum(ns),
                    "largest": max(ns),
                    "median": int(statistics.median(ns)),
                }
                for cause, ns in sorted(exposed.items())
            },
            "clock_error_ns": self.clock_error_ns,
            "lost_spans": self.lost,
        }

    def to_chrome(self) -> str:
        """Return JSON in Chrome's trace event format, which Perfetto opens; times in µs."""
        begin = min((event.start_ns for event in self.events), default=0)
        done = [(e.lane, e.name, e.kind, e.replay, e.start_ns, e.end_ns) for e in self.events]
        done += [
            (
                f"exposed waits of {w.lane}",
                f"waits for {w.cause}",
                "exposed wait",
                w.replay,
                w.start_ns,
                w.end_ns,
            )
            for w in self.waits
        ]
        rows = list(dict.fromkeys(row for row, *_ in done))
        out: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": self.device}},
            *(
                {"ph": "M", "name": "thread_name", "pid": 1, "tid": i, "args": {"name": row}}
                for i, row in enumerate(rows)
            ),
            *(
                {
                    "ph": "X",
                    "name": name,
                    "cat": kind,
                    "pid": 1,
                    "tid": rows.index(row),
                    "ts": (start - begin) / 1000,
                    "dur": (end - start) / 1000,
                    "args": {"replay": replay},
                }
                for row, name, kind, replay, start, end in done
            ),
        ]
        return json.dumps(
            {"traceEvents": out, "displayTimeUnit": "ns", "otherData": self.summary()}
        )


@contextmanager
def record(
    device: Device, watched: Mapping[GraphExec, Graph], capacity: int = CAPACITY
) -> Iterator[Trace]:
    """Record every replay of executables while the block runs; the trace is full afterwards.

    Parameters
    ----------
    device : Device
        The soft device: CUDA's driver does not tell when a node runs.
    watched : mapping of GraphExec to Graph
        Executables and the definitions they were made from; open until the block has ended.
    capacity : int
        Spans that are kept.
    """
    if device.kind != "soft":
        raise OptionError("the driver of CUDA hardware does not tell when a node runs")
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


def split_launches(
    spans: Sequence[tuple[int, Span]], edges: Iterable[tuple[int, int]]
) -> list[list[tuple[int, Span]]]:
    """Split one executable's spans, by begin, into launches.

    Launches of an executable run one after another, and each runs a node once, though several
    workers may share it, one of them late. So a launch begins with a node that depends on none and
    was seen already, and after it one that depends on it, or where none does, when nothing runs.
    """
    behind: dict[int, set[int]] = defaultdict(set)
    late = set()
    for start, end in edges:
        behind[start].add(end)
        late.add(end)
    launches: list[list[tuple[int, Span]]] = []
    seen: set[int] = set()
    over = 0
    for node, span in spans:
        again = bool(behind[node] & seen) if behind[node] else span.begin_ns >= over
        if not launches or (node in seen - late and again):
            launches.append([])
            seen = set()
            over = 0
        launches[-1].append((node, span))
        seen.add(node)
        over = max(over, span.end_ns)
    return launches


def exposed_waits(ran: Mapping[int, TraceEvent], edges: Sequence[tuple[int, int]]) -> list[Wait]:
    """Return where device work stood still for host work of another lane, in one replay.

    A node that depends on other lanes is ready on its own lane when its own lane's nodes have
    ended. What the other lane's host step takes longer is exposed.
    """
    before: dict[int, list[TraceEvent]] = defaultdict(list)
    for start, end in edges:
        if start in ran:
            before[end].append(ran[start])
    waits = []
    for i, event in ran.items():
        own = [other.end_ns for other in before[i] if other.lane == event.lane]
        others = [other for other in before[i] if other.lane != event.lane and other.kind == "host"]
        if event.kind == "host" or not own or not others:
            continue
        ready = max(own)
        last = max(others, key=lambda other: other.end_ns)
        if last.end_ns > ready:
            waits.append(Wait(event.lane, event.name, last.name, event.replay, ready, last.end_ns))
    return waits
