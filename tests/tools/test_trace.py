"""Timelines: what the soft device records, what counts as exposed, and what is written."""

from __future__ import annotations

import json
import time
from xml.etree import ElementTree

import pytest

from graft.cudagraph.errors import OptionError
from graft.cudagraph.graph import Graph
from graft.cudagraph.hostwork import PythonWork
from graft.tools import cli
from graft.tools.trace import draw_round
from graft.tools.trace.record import Span, TraceEvent, exposed_waits, record, split_launches
from graft.tools.trace.rounds import tie_clocks
from graft.tools.trace.timeline import draw

SLEEP_S = 0.02


@pytest.fixture
def soft(device):
    """The soft device; hardware's driver tells nothing."""
    if device.kind != "soft":
        pytest.skip("only the soft device's driver tells when a node runs")
    return device


@pytest.fixture
def traced(soft, stream):
    """Two launches of fill - slow host step on another lane - copy, and their trace."""
    one = soft.zeros((64,), "int32")
    two = soft.zeros((64,), "int32")
    graph = Graph(soft, "two lanes")
    model = graph.lane("model")
    grammar = graph.lane("grammar")
    model.fill(one, 1, name="before")
    grammar.wait(model.record("before done"))  # however busy the machine is, slow ends later
    grammar.host(PythonWork(time.sleep, SLEEP_S), name="slow")
    model.wait(grammar.record("slow done"))
    model.copy(two, one, name="after")
    executable = graph.instantiate()
    begun = time.monotonic_ns()
    with record(soft, {executable: graph}) as trace:
        executable.launch(stream)
        executable.launch(stream)
    trace.bounds = (begun, time.monotonic_ns())
    executable.launch(stream)
    executable.synchronize()
    yield trace
    executable.close()
    graph.close()


def test_every_node_of_every_traced_replay_is_there_once_and_its_waits_are_exposed(traced):
    """Two launches of three nodes, within the block's own times, in the order of the edges; `after`
    stands still from the end of `before`, that of its own lane, to the end of `slow`."""
    assert traced.replays() == [("two lanes", 1), ("two lanes", 2)]
    for replay in (1, 2):
        part = traced.only("two lanes", replay)
        events = {e.name: e for e in part.events}
        assert {n: (e.kind, e.lane) for n, e in events.items()} == {
            "before": ("fill", "model"),
            "slow": ("host", "grammar"),
            "after": ("copy", "model"),
        }
        before, slow, after = (events[name] for name in ("before", "slow", "after"))
        assert all(e.start_ns <= e.end_ns for e in part.events)
        assert after.start_ns >= slow.end_ns and after.start_ns >= before.end_ns
        assert slow.end_ns - slow.start_ns >= SLEEP_S * 1e9
        (wait,) = part.waits
        assert (wait.lane, wait.node, wait.cause) == ("model", "after", "slow")
        assert (wait.start_ns, wait.end_ns) == (before.end_ns, slow.end_ns)
    begin, end = traced.bounds
    assert all(begin <= e.start_ns and e.end_ns <= end for e in traced.events)
    assert traced.lost == 0
    summary = traced.summary()["exposed_ns"]["slow"]
    assert summary["waits"] == 2
    assert summary["total"] == sum(w.end_ns - w.start_ns for w in traced.waits)
    with pytest.raises(OptionError, match="no replay 9 of graph 'two lanes'"):
        traced.only("two lanes", 9)


def event(lane, kind, start, end):
    """An event of replay 1."""
    return TraceEvent(f"{lane} {start}", kind, lane, "g", 1, start, end)


def test_host_work_that_ends_in_time_is_not_exposed():
    """Only the part after the waiting lane's own work counts; host steps themselves never wait."""
    ran = {
        0: event("model", "kernel", 0, 50),
        1: event("grammar", "host", 0, 40),
        2: event("model", "kernel", 50, 60),
        3: event("grammar", "host", 50, 90),
        4: event("model", "kernel", 90, 95),
        5: event("grammar", "host", 95, 99),
    }
    edges = [(0, 2), (1, 2), (0, 3), (1, 3), (2, 4), (3, 4), (3, 5), (4, 5)]
    (wait,) = exposed_waits(ran, edges)
    assert (wait.cause, wait.start_ns, wait.end_ns) == ("grammar 50", 60, 90)


def test_launches_are_told_apart_and_shared_kernels_are_not():
    """A node seen again behind what depends on it begins a launch; a worker's late share does not,
    though nothing else runs."""
    spans = [
        (node, Span(1, 1, worker, 1, begin, end))
        for node, worker, begin, end in (
            (0, 0, 0, 10),
            (0, 1, 11, 12),
            (1, 0, 13, 20),
            (1, 1, 21, 28),
            (0, 0, 30, 40),
            (1, 0, 41, 50),
        )
    ]
    assert [len(launch) for launch in split_launches(spans, [(0, 1)])] == [4, 2]
    assert [len(launch) for launch in split_launches(spans[:2], [])] == [1, 1]


def test_chrome_events_and_picture_hold_what_the_trace_holds(traced):
    """The JSON has one complete event per node and wait, in µs; the SVG parses and names all."""
    rows = json.loads(traced.to_chrome())["traceEvents"]
    complete = [row for row in rows if row["ph"] == "X"]
    assert len(complete) == len(traced.events) + len(traced.waits)
    slow = [row for row in complete if row["name"] == "slow"]
    assert [row["dur"] for row in slow] == [
        pytest.approx((e.end_ns - e.start_ns) / 1000) for e in traced.events if e.name == "slow"
    ]
    names = {row["args"]["name"] for row in rows if row["ph"] == "M"}
    assert {"model", "grammar", traced.device} <= names
    text = draw(traced.only("two lanes", 2), "A <picture>")
    assert traced.device in text
    titles = [
        node.text for node in ElementTree.fromstring(text).iter() if node.tag.endswith("title")
    ]
    for name in ("before", "slow", "after", "waits for slow"):
        assert sum(title.startswith(f"{name}:") for title in titles) == 1


def test_spans_that_find_no_room_are_counted(soft, stream):
    """A full buffer loses and counts; nothing is recorded outside of a recording."""
    array = soft.zeros((4,), "int32")
    graph = Graph(soft, "small")
    for _ in range(5):
        graph.lane("only").fill(array)
    executable = graph.instantiate()
    with record(soft, {executable: graph}, capacity=2) as trace:
        executable.launch(stream)
    executable.launch(stream)
    executable.synchronize()
    assert len(trace.events) == 2 and trace.lost == 3
    executable.close()
    graph.close()


def test_the_device_clock_is_tied_within_the_stated_error(device):
    """The soft device's clock is the host's, so its offset must lie within the error."""
    offset, error = tie_clocks(device)
    assert error > 0 and (device.kind != "soft" or abs(offset) <= error)


def test_generate_writes_the_timeline_of_its_rounds(soft, tmp_path):
    """`--trace` writes JSON with every round's nodes and a picture of one; outputs are the same."""
    path = tmp_path / "rounds.json"
    arguments = ["generate", "--prompt", "name: Olga Novak; age: 42", "--regex", "[0-9]{4}"]
    assert cli.main([*arguments, "--trace", str(path)]) == 0
    trace = json.loads(path.read_text())
    rounds = [
        row["args"]["replay"]
        for row in trace["traceEvents"]
        if row["ph"] == "X" and row["name"] == "begin"
    ]
    assert rounds == list(range(1, len(rounds) + 1))
    assert trace["otherData"]["replays"] == len(rounds) > 0
    names = {row["name"] for row in trace["traceEvents"]}
    assert {"open: missing rows", "commit, fill row 0", "stamp target forward", "gate, up"} <= names
    picture = path.with_suffix(".svg").read_text()
    ElementTree.fromstring(picture)
    assert soft.describe() in picture


@pytest.mark.parametrize(
    "name, said", [("trace.txt", "must end in .json"), ("none/trace.json", "there is no folder")]
)
def test_a_trace_that_could_not_be_written_is_refused_first(tmp_path, capsys, name, said):
    """The path is checked before the model is loaded."""
    arguments = ["generate", "--prompt", "x", "--trace", str(tmp_path / name)]
    assert cli.main(arguments) == 2
    assert said in capsys.readouterr().err


def test_folded_runs_keep_every_meeting_of_the_lanes(device):
    """Folding joins nodes between meetings only: no edge between lanes is lost or moved."""
    graph = Graph(device, "two lanes")
    model = graph.lane("model")
    grammar = graph.lane("grammar")
    word = device.pinned((4,), "int32")
    for name in ("a", "b"):
        model.fill(word, name=name)
    known = model.record("known")
    grammar.wait(known)
    grammar.host(int, name="work")
    done = grammar.record("done")
    model.fill(word, name="c")
    model.wait(done)
    for name in ("d", "e", "f"):
        model.fill(word, name=name)
    runs, edges = draw_round.fold(graph)
    assert [(run.name, run.lane) for run in runs] == [
        ("a … b (2)", "model"),
        ("work", "grammar"),
        ("c", "model"),
        ("d … f (3)", "model"),
    ]
    assert edges == [(0, 1), (0, 2), (1, 3), (2, 3)]
    graph.close()


def test_the_round_is_drawn(tmp_path, capsys):
    """The drawing of a real round names the steps of both lanes, as SVG and as DOT."""
    assert draw_round.main([str(tmp_path / "round.svg"), "--fold"]) == 0
    assert draw_round.main([str(tmp_path / "round.dot")]) == 0
    picture = (tmp_path / "round.svg").read_text()
    ElementTree.fromstring(picture)
    for step in ("open", "commit", "fill row 1", "draft 3"):
        assert step in picture
    assert (tmp_path / "round.dot").read_text().count("host") == 4
    with pytest.raises(SystemExit):
        draw_round.main([str(tmp_path / "round.png")])
