"""Tests of graft.tools.trace: timelines of replays, and the picture of a round's graph."""

from __future__ import annotations

import json
import time
from xml.etree import ElementTree

import pytest

from graft.cudagraph.errors import OptionError
from graft.cudagraph.graph.graph import Graph
from graft.cudagraph.host.hostwork import PythonWork
from graft.grammar import GrammarSpec
from graft.models.engine.engine import Engine
from graft.models.request import Request
from graft.tools import cli
from graft.tools.demo_model import demo_model
from graft.tools.trace import draw_round
from graft.tools.trace.record import Trace, TraceEvent, exposed_waits, record
from graft.tools.trace.rounds import clock_offset, trace_rounds
from graft.tools.trace.timeline import draw

SLEEP_S = 0.02


@pytest.fixture
def soft(device):
    """Return the soft device. Other drivers do not report when a node runs."""
    if device.kind != "soft":
        pytest.skip("only the soft device's driver reports when a node runs")
    return device


@pytest.fixture
def trace(soft, stream):
    """Record two launches of a graph with a fill, a slow host step on another lane, and a copy."""
    one = soft.zeros((64,), "int32")
    two = soft.zeros((64,), "int32")
    graph = Graph(soft, "two lanes")
    model = graph.lane("model")
    grammar = graph.lane("grammar")
    model.fill(one, 1, name="before")
    # With this edge, the node "slow" always starts after the node "before" has ended.
    grammar.wait(model.record("before done"))
    grammar.host(PythonWork(time.sleep, SLEEP_S), name="slow")
    model.wait(grammar.record("slow done"))
    model.copy(two, one, name="after")
    executable = graph.instantiate()
    begin_ns = time.monotonic_ns()
    with record(soft, {executable: graph}) as trace:
        executable.launch(stream)
        executable.launch(stream)
    trace.bounds = (begin_ns, time.monotonic_ns())
    executable.launch(stream)
    executable.synchronize()
    yield trace
    executable.close()
    graph.close()


@pytest.mark.parametrize("replay", [1, 2])
def test_trace_has_every_node_and_exposed_wait_of_a_replay(trace, replay):
    """The node "after" waits from the end of "before", on its own lane, until "slow" has ended."""
    assert trace.replays() == [("two lanes", 1), ("two lanes", 2)]
    selected = trace.select("two lanes", replay)
    events = {event.name: event for event in selected.events}
    assert {name: (event.kind, event.lane) for name, event in events.items()} == {
        "before": ("fill", "model"),
        "slow": ("host", "grammar"),
        "after": ("copy", "model"),
    }
    before, slow, after = (events[name] for name in ("before", "slow", "after"))
    assert all(event.start_ns <= event.end_ns for event in selected.events)
    assert after.start_ns >= max(slow.end_ns, before.end_ns)
    assert slow.end_ns - slow.start_ns >= SLEEP_S * 1e9
    (wait,) = selected.waits
    assert (wait.lane, wait.node, wait.cause) == ("model", "after", "slow")
    assert (wait.start_ns, wait.end_ns) == (before.end_ns, slow.end_ns)


def test_trace_summary_counts_exposed_waits(trace):
    begin_ns, end_ns = trace.bounds
    for event in trace.events:
        assert begin_ns <= event.start_ns
        assert event.end_ns <= end_ns
    assert trace.lost == 0
    exposed = trace.summary()["exposed_ns"]["slow"]
    assert exposed["waits"] == 2
    assert exposed["total"] == sum(wait.end_ns - wait.start_ns for wait in trace.waits)


def test_trace_select_rejects_missing_replay(trace):
    with pytest.raises(OptionError, match="no replay 9 of graph 'two lanes'"):
        trace.select("two lanes", 9)


def make_event(lane: str, kind: str, start_ns: int, end_ns: int) -> TraceEvent:
    """Return an event of replay 1."""
    return TraceEvent(f"{lane} {start_ns}", kind, lane, "g", 1, start_ns, end_ns)


def test_exposed_waits_begin_when_the_lane_is_idle():
    """A wait starts when the waiting lane has finished its other work."""
    events = {
        0: make_event("model", "kernel", 0, 50),
        1: make_event("grammar", "host", 0, 40),
        2: make_event("model", "kernel", 50, 60),
        3: make_event("grammar", "host", 50, 90),
        4: make_event("model", "kernel", 90, 95),
        5: make_event("grammar", "host", 95, 99),
    }
    edges = [(0, 2), (1, 2), (0, 3), (1, 3), (2, 4), (3, 4), (3, 5), (4, 5)]
    (wait,) = exposed_waits(events, edges)
    assert (wait.cause, wait.start_ns, wait.end_ns) == ("grammar 50", 60, 90)


def test_exposed_waits_include_copies_after_host_steps():
    """The model waits for a copy of mask rows, which waits for the host step that fills them."""
    events = {
        0: make_event("model", "kernel", 0, 30),
        1: make_event("grammar", "host", 0, 80),
        2: make_event("grammar", "copy", 82, 85),
        3: make_event("model", "kernel", 86, 90),
        4: make_event("other", "kernel", 0, 95),
        5: make_event("model", "kernel", 96, 99),
    }
    edges = [(1, 2), (0, 3), (2, 3), (3, 5), (4, 5)]
    (wait,) = exposed_waits(events, edges)
    assert (wait.node, wait.cause) == ("model 86", "grammar 0")
    assert (wait.start_ns, wait.end_ns) == (30, 85)


def test_trace_rounds_report_waits_for_mask_rows(soft):
    """The kernel "draft 1" waits while the previous kernel has ended but its mask row is
    missing."""
    grammar = GrammarSpec.regex("[a-z ]{20,}")
    with (
        Engine(*demo_model(), max_batch_size=1, draft_length=2) as engine,
        trace_rounds(engine) as trace,
    ):
        engine.generate([Request(prompt="x", grammar=grammar, max_tokens=16, closing="off")])
    expected = {}
    for key in trace.replays():
        end_ns: dict[str, int] = {}
        for event in trace.select(*key).events:
            end_ns.setdefault(event.name, event.end_ns)
        wait_ns = end_ns["mask rows 0 to 0"] - end_ns["draft head"]
        if wait_ns > 0:
            expected[key[1]] = wait_ns
    waits = [wait for wait in trace.waits if wait.node == "draft 1"]
    assert {wait.replay: wait.end_ns - wait.start_ns for wait in waits} == expected
    assert {wait.cause for wait in waits} <= {"commit, fill row 0"}


def test_trace_to_chrome_has_one_event_per_node_and_wait(trace):
    rows = json.loads(trace.to_chrome())["traceEvents"]
    complete = [row for row in rows if row["ph"] == "X"]
    assert len(complete) == len(trace.events) + len(trace.waits)
    durations_us = [row["dur"] for row in complete if row["name"] == "slow"]
    assert durations_us == [
        pytest.approx((event.end_ns - event.start_ns) / 1000)
        for event in trace.events
        if event.name == "slow"
    ]
    names = {row["args"]["name"] for row in rows if row["ph"] == "M"}
    assert {"model", "grammar", trace.device} <= names


def test_trace_draw_has_one_box_per_node_and_wait(trace):
    svg = draw(trace.select("two lanes", 2), "A <picture>")
    assert trace.device in svg
    elements = ElementTree.fromstring(svg).iter()
    titles = [element.text for element in elements if element.tag.endswith("title")]
    for name in ("before", "slow", "after", "waits for slow"):
        assert sum(title.startswith(f"{name}:") for title in titles) == 1


def test_trace_draw_has_time_axis_and_legend(trace):
    replay = trace.select("two lanes", 2)
    root = ElementTree.fromstring(draw(replay, "title"))
    texts = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert "0" in texts
    assert "time in µs" in texts
    assert {"fill", "host", "copy", "exposed wait"} <= set(texts)
    duration_us = (replay.events[-1].end_ns - replay.events[0].start_ns) / 1000
    ticks_us = [float(text.replace(",", "")) for text in texts if text.replace(",", "").isdigit()]
    assert duration_us / 2 < max(ticks_us) <= duration_us


def test_trace_draw_labels_fit_into_their_boxes():
    events = [make_event("model", "kernel", 100 * i, 100 * i + 99) for i in range(200)]
    events += [make_event("grammar", "host", 10_000, 11_000), make_event("long", "host", 0, 20_000)]
    root = ElementTree.fromstring(draw(Trace("device", events), "title"))
    labels = []
    for group in root.findall("{*}g"):
        width = float(group.find("{*}rect").get("width"))
        label = group.find("{*}text")
        if label is not None:
            labels.append(label.text)
            assert 6.6 * len(label.text) <= width
    assert labels == ["gramma…", "long 0"]


def test_record_counts_spans_beyond_capacity(soft, stream):
    """Launches after the end of the recording are not counted."""
    array = soft.zeros((4,), "int32")
    graph = Graph(soft, "small")
    for _ in range(5):
        graph.lane("only").fill(array)
    executable = graph.instantiate()
    with record(soft, {executable: graph}, capacity=2) as trace:
        executable.launch(stream)
    executable.launch(stream)
    executable.synchronize()
    assert len(trace.events) == 2
    assert trace.lost == 3
    executable.close()
    graph.close()


def test_record_rejects_graphs_that_are_not_given_by_executable(soft):
    graph = Graph(soft, "small")
    context = record(soft, {graph: graph.instantiate()})
    with graph, pytest.raises(OptionError, match="needs graphs by executable"), context:
        pass


def test_clock_offset_is_within_its_error(device):
    """The measured offset is 0 within its error, because the soft device uses the host's clock."""
    offset_ns, error_ns = clock_offset(device)
    assert error_ns > 0
    assert device.kind != "soft" or abs(offset_ns) <= error_ns


def test_generate_trace_option_writes_rounds(soft, tmp_path):
    path = tmp_path / "rounds.json"
    arguments = ["generate", "--prompt", "name: Olga Novak; age: 42", "--regex", "[0-9]{4}"]
    assert cli.main([*arguments, "--trace", str(path)]) == 0
    trace = json.loads(path.read_text())
    rows = [row for row in trace["traceEvents"] if row["ph"] == "X"]
    rounds = [row["args"]["replay"] for row in rows if row["name"] == "begin"]
    assert rounds == list(range(1, len(rounds) + 1))
    assert trace["otherData"]["replays"] == len(rounds) > 0
    names = {row["name"] for row in rows}
    assert {"open: missing rows", "commit, fill row 0", "stamp target forward", "gate, up"} <= names
    svg = path.with_suffix(".svg").read_text()
    ElementTree.fromstring(svg)
    assert soft.describe() in svg


def test_draw_round_fold_keeps_edges_between_lanes(device):
    graph = Graph(device, "two lanes")
    model = graph.lane("model")
    grammar = graph.lane("grammar")
    array = device.pinned((4,), "int32")
    for name in ("a", "b"):
        model.fill(array, name=name)
    before = model.record("before")
    grammar.wait(before)
    grammar.host(int, name="work")
    done = grammar.record("done")
    model.fill(array, name="c")
    model.wait(done)
    for name in ("d", "e", "f"):
        model.fill(array, name=name)
    folded = draw_round.fold(graph)
    assert [(run.name, run.lane) for run in folded.nodes] == [
        ("a … b (2)", "model"),
        ("work", "grammar"),
        ("c", "model"),
        ("d … f (3)", "model"),
    ]
    assert folded.edges == [(0, 1), (0, 2), (1, 3), (2, 3)]
    assert folded.tails.keys() == {"model", "grammar"}
    graph.close()


def test_draw_round_writes_svg_and_dot(tmp_path):
    assert draw_round.main([str(tmp_path / "round.svg"), "--fold"]) == 0
    assert draw_round.main([str(tmp_path / "round.dot")]) == 0
    svg = (tmp_path / "round.svg").read_text()
    ElementTree.fromstring(svg)
    for step in ("open", "commit", "fill row 1", "draft 3"):
        assert step in svg
    assert (tmp_path / "round.dot").read_text().count("host") == 4
