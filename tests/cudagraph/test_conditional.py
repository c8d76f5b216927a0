"""Conditional nodes (IF, IF-ELSE and WHILE) of explicit graphs."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from cudagraph_util import LIMIT_S, assert_raises, replay, run_program, wait_until, wait_until_freed

from graft.cudagraph import (
    Device,
    Graph,
    GraphLane,
    HostWorkError,
    MailboxWorker,
    OptionError,
    Stream,
    condition,
    if_,
    if_else,
    load_text,
    while_,
)

TEXT = """
#include "conditional.cuh"
extern "C" __global__ void add(int* data, int value) { *data += value; }
extern "C" __global__ void below(unsigned long long condition, const int* data, int limit) {
  cudaGraphSetConditional(condition, *data < limit ? 1u : 0u);
}
"""


def test_while_runs_body_until_kernel_clears_condition(
    device: Device, stream: Stream, module
) -> None:
    data = device.zeros((1,), "int32")
    after = device.zeros((1,), "int32")
    graph = Graph(device, "loop")
    lane = graph.lane("main")
    more = condition(graph, 1, name="more")
    body = while_(lane, more, name="rounds").lane("inside")
    body.kernel(module["add"], 1, 1, [data, 4])
    body.kernel(module["below"], 1, 1, [more, data, 30])
    lane.kernel(module["add"], 1, 1, [after, 1])
    assert [n.kind for n in graph.nodes] == ["while", "kernel"]
    executable = graph.instantiate()
    for total in (32, 36):
        replay(executable, stream)
        assert data.to_host()[0] == total
    assert after.to_host()[0] == 2


@pytest.mark.parametrize(("start", "expected"), [(0, 1), (50, 150)])
def test_if_else_runs_one_body(
    device: Device, stream: Stream, module, start: int, expected: int
) -> None:
    data = device.from_host(np.array([start], np.int32))
    graph = Graph(device, "branch")
    lane = graph.lane("main")
    small = condition(graph)
    lane.kernel(module["below"], 1, 1, [small, data, 10])
    then, otherwise = if_else(lane, small, name="small")
    then.lane("a").kernel(module["add"], 1, 1, [data, 1])
    otherwise.lane("a").kernel(module["add"], 1, 1, [data, 100])
    replay(graph, stream)
    assert data.to_host()[0] == expected


def test_conditional_body_keeps_operands_alive(device: Device, stream: Stream) -> None:
    """The executable keeps the operands of a body, and of a child graph in the body, alive.

    This includes arrays that were closed.
    """
    own = load_text(device, TEXT + "// another image\n", "conditional_keep.cu")
    data = device.zeros((1,), "int32")
    result = device.pinned((1,), "int32")
    seen = result.array
    inner = Graph(device, "inner")
    inner.lane("x").kernel(own["add"], 1, 1, [data, 7])
    graph = Graph(device, "outer")
    lane = graph.lane("main")
    body = if_(lane, condition(graph, 1)).lane("inside")
    body.child(inner)
    body.copy(result, data)
    executable = graph.instantiate()
    data.close()
    del own, data, result, inner, graph, lane, body
    wait_until_freed()
    others = [device.zeros((1,), "int32") for _ in range(20)]
    replay(executable, stream, 2)
    assert seen[0] == 14 and not any(o.to_host().any() for o in others)


def test_conditional_body_rejects_host_work(device: Device) -> None:
    """A body rejects host work, also inside a child graph. The rejected call adds no node."""
    graph = Graph(device, "g")
    body = while_(graph.lane("main"), condition(graph, 0), name="loop")
    lane = body.lane("inside")
    child = Graph(device, "child")
    middle = Graph(device, "middle")
    child.lane("x").host(print, name="fill")
    spinning = Graph(device, "spinning")
    spinning.lane("x").spinkernel(print, name="spun")
    assert_raises(
        OptionError,
        {
            r"host node 'masks'.*'loop'": lambda: lane.host(print, name="masks"),
            r"mailbox 'ask'.*'loop'.*spinkernel": lambda: lane.mailbox(print, name="ask"),
            r"host node 'child/fill'.*'loop'": lambda: lane.child(child),
            r"request node 'spinning/request: spun'.*'loop'": lambda: lane.child(spinning),
        },
    )
    middle.lane("x").child(child, name="deep")
    assert_raises(
        OptionError, {r"host node 'middle/deep/fill'.*'loop'": lambda: lane.child(middle)}
    )
    assert body.nodes == []
    assert not hasattr(body, "instantiate")


def test_condition_controls_exactly_one_node(device: Device, module) -> None:
    """The error names a condition that is used twice, in another graph or not at all."""
    first = Graph(device, "first")
    second = Graph(device, "second")
    go = condition(first, 1, name="go")
    lane = first.lane("main")
    assert_raises(
        OptionError,
        {
            r"'go'.*'second'": lambda: if_(second.lane("main"), go),
            r"'go'.*'first'.*no conditional node": first.instantiate,
        },
    )
    if_(lane, go)
    assert_raises(OptionError, {"'go' already controls a conditional node": lambda: if_(lane, go)})


def test_invalid_condition_handle_faults(device: Device) -> None:
    """The test runs in a child process, because a fault makes the context unusable."""
    if device.kind != "soft":
        pytest.skip("only the soft device checks conditional handles")
    done = run_program(f"""
kernel = load_text(device, {TEXT!r}, "wrong.cu")["below"]
data = device.zeros((1,), "int32")
try:
    StreamLane(stream).kernel(kernel, 1, 1, [0, data, 3])
    stream.synchronize(60)
except DeviceError as error:
    print(error)
""")
    assert "not a conditional handle" in done.stdout and "below" in done.stdout, done.stderr
    assert done.returncode == 0


@pytest.mark.nvrtc
def test_conditional_header_compiles_with_nvrtc() -> None:
    """NVRTC compiles conditional.cuh without CUDA headers and leaves the function undefined."""
    from graft.cudagraph.kernels.compiler import nvrtc_options

    nvrtc = pytest.importorskip("cuda.bindings.nvrtc")
    code, program = nvrtc.nvrtcCreateProgram(TEXT.encode(), b"conditional_test.cu", 0, [], [])
    assert int(code) == 0
    options = [*nvrtc_options(), "--gpu-architecture=compute_90"]
    (code,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
    size = nvrtc.nvrtcGetProgramLogSize(program)[1]
    log = bytearray(size)  # not bytes, because NVRTC writes into the object
    nvrtc.nvrtcGetProgramLog(program, log)
    assert int(code) == 0, log.decode()
    text = bytearray(nvrtc.nvrtcGetPTXSize(program)[1])
    nvrtc.nvrtcGetPTX(program, text)
    assert b".extern .func cudaGraphSetConditional" in text


def test_while_body_runs_host_work_through_spinning_kernel(
    device: Device, stream: Stream, module
) -> None:
    """The worker serves every run of the body in all launches in flight, and then sleeps."""
    data = device.pinned((1,), "int32")
    worker = MailboxWorker(wait="park")
    seen = []
    graph = Graph(device, "loop")
    lane = graph.lane("main")
    more = condition(graph, 1, name="more")
    body = while_(lane, more, name="rounds").lane("inside")
    body.kernel(module["add"], 1, 1, [data, 1])

    def work() -> None:
        seen.append(int(data.array[0]))
        data.array[0] += 1  # the device sees this change before it continues

    body.spinkernel(work, worker=worker, name="ask")
    body.kernel(module["below"], 1, 1, [more, data, 20])
    executable = replay(graph, stream)
    assert seen == list(range(1, 20, 2))
    data.array[0] = 10
    replay(executable, stream, 4)
    assert seen[10:] == [*range(11, 20, 2), 21, 23, 25]
    assert graph.completed is not None
    assert graph.completed.array[0] == 5
    wait_until(lambda: worker.native.parked)


def test_host_work_in_body_runs_in_graph_that_is_extended_later(
    device: Device, stream: Stream, module
) -> None:
    """The node that counts launches depends on all other nodes, also on those added later.

    A second lane with a second conditional is added after the first executable was created.
    """
    calls = []
    data = [device.pinned((1,), "int32") for _ in range(2)]
    graph = Graph(device, "loops")
    lane = graph.lane("main")
    lane.count_completed()

    def add_loop(lane: GraphLane, index: int) -> None:
        more = condition(graph, 1, name=f"more {index}")
        body = while_(lane, more, name=f"rounds {index}").lane("inside")
        body.kernel(module["add"], 1, 1, [data[index], 1])
        body.spinkernel(lambda: calls.append(index), name=f"ask {index}", deadline_s=LIMIT_S)
        body.kernel(module["below"], 1, 1, [more, data[index], 3])

    add_loop(lane, 0)
    executable = replay(graph, stream)
    executable.close()
    assert calls == [0] * 3
    add_loop(graph.lane("other"), 1)
    for count in data:
        count.array[0] = 0
    with pytest.raises(OptionError, match="lane name 'completed launches' is reserved"):
        graph.lane("completed launches")
    executable = replay(graph, stream, 2)
    assert sorted(calls[3:]) == [0] * 4 + [1] * 4
    assert graph.completed is not None and graph.completed.array[0] == 3
    counters = [node for node in graph.nodes if node.name == "count completed launch"]
    assert len(counters) == 1
    dependencies = {before for before, after in graph.edges if after == counters[0].index}
    loops = [node.index for node in graph.nodes if node.kind == "while"]
    assert set(loops) <= dependencies
    executable.close()


@pytest.mark.parametrize("counts_before", [False, True])
def test_host_work_in_body_added_after_launches_runs(
    device: Device, stream: Stream, module, counts_before: bool
) -> None:
    """A worker that joins a graph after launches serves the body, and then sleeps."""
    data = device.pinned((1,), "int32")
    worker = MailboxWorker(wait="park")
    calls = []
    graph = Graph(device, "loop")
    lane = graph.lane("main")
    if counts_before:
        lane.count_completed()
    lane.fill(device.zeros((1,), "int32"))
    executable = replay(graph, stream, 3)
    executable.close()
    more = condition(graph, 1, name="more")
    body = while_(lane, more, name="rounds").lane("inside")
    body.kernel(module["add"], 1, 1, [data, 1])
    body.spinkernel(lambda: calls.append(int(data.array[0])), worker=worker, deadline_s=LIMIT_S)
    body.kernel(module["below"], 1, 1, [more, data, 3])
    executable = replay(graph, stream)
    assert calls == [1, 2, 3]
    wait_until(lambda: worker.native.parked)
    executable.close()


def test_while_body_fails_replay_if_answer_is_late(device: Device, stream: Stream, module) -> None:
    """A step that misses its deadline ends the waits of all later runs of the body."""
    go = threading.Event()
    data = device.zeros((1,), "int32")
    graph = Graph(device, "loop")
    lane = graph.lane("main")
    more = condition(graph, 1, name="more")
    body = while_(lane, more, name="rounds").lane("inside")
    body.spinkernel(lambda: go.wait(LIMIT_S), deadline_s=0.05, name="slow")
    body.kernel(module["add"], 1, 1, [data, 1])
    body.kernel(module["below"], 1, 1, [more, data, 3])
    executable = graph.instantiate()
    executable.launch(stream)
    with pytest.raises(HostWorkError, match=r"slow.*no answer within 0\.05 s"):
        executable.synchronize(LIMIT_S)
    go.set()
    assert data.to_host()[0] == 3


FAILING_BODY = (
    f"TEXT = {TEXT!r}"
    + """
launches, failing, device_deadline_s = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
module = load_text(device, TEXT, "body.cu")
go, calls = threading.Event(), []

def work():
    calls.append(1)
    go.wait(60)
    if len(calls) == failing:
        raise ValueError("failed")

data = device.zeros((1,), "int32")
graph = Graph(device, "loop")
more = condition(graph, 1)
body = while_(graph.lane("main"), more).lane("inside")
body.kernel(module["add"], 1, 1, [data, 1])
limits = {"deadline_s": 60.0, "device_deadline_s": device_deadline_s}
body.spinkernel(work, **limits)
body.kernel(module["below"], 1, 1, [more, data, 2])
run = graph.instantiate()
blocking = os.environ.get("SOFTCUDA_LAUNCH_BLOCKING") == "1"
if blocking:
    go.set()
try:
    for _ in range(launches):
        run.launch(stream)
    if device_deadline_s < 1:
        stream.synchronize(60)
    go.set()
    run.synchronize(60)
except HostWorkError as error:
    print(error.replay, graph.status.array[1], len(calls))
"""
)


# The first launch runs the body twice, each later launch once.
@pytest.mark.parametrize(
    ("launches", "failing", "replay_number"),
    [(1, 1, 1), (1, 2, 1), (3, 1, 1), (3, 2, 1), (3, 3, 2)],
)
@pytest.mark.parametrize("blocking", ["0", "1"])
@pytest.mark.full("0-1-1-1", "0-1-2-1", "0-3-1-1", "0-3-2-1", "1-1-1-1", "1-3-1-1", "1-3-2-1")
def test_failure_in_body_has_number_of_its_replay(
    launches: int, failing: int, replay_number: int, blocking: str
) -> None:
    """A failure names its replay during the launch call and with several launches in flight."""
    settings = {"GRAFT_DEVICE": "soft", "SOFTCUDA_LAUNCH_BLOCKING": blocking}
    done = run_program(FAILING_BODY, str(launches), str(failing), "60", **settings)
    assert done.stdout.split() == [str(replay_number)] * 2 + [str(failing)], done.stderr


def test_late_answer_in_body_fails_replay_that_posted_the_request() -> None:
    """The waiting kernel reaches its deadline, and the next launch begins before the answer."""
    settings = {"GRAFT_DEVICE": "soft", "SOFTCUDA_LAUNCH_BLOCKING": "0"}
    done = run_program(FAILING_BODY, "3", "0", "0.1", **settings)
    assert done.stdout.split() == ["1", "1", "1"], done.stderr
