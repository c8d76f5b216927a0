"""Mailboxes: requests and answers, worker threads, deadlines and rejected options."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from cudagraph_util import LIMIT_S, mailbox_graph, replay, replay_in_time, run_program, wait_until

from graft.cudagraph import DeadlineError, Graph, GraphExec, HostWorkError, MailboxWorker
from graft.cudagraph.driver.driver import call, cu
from graft.cudagraph.graph import mailbox, nodes
from graft.cudagraph.host import hostwork
from graft.native import _native


def test_mailbox_answers_every_replay_of_unreferenced_graph(device, stream, transport):
    """The executable keeps callable, graph and worker alive."""

    def build() -> tuple[GraphExec, object]:
        count = [0]

        def work(out: np.ndarray) -> None:
            count[0] += 1
            out[:] = (count[0], count[0] * 3, 7, 11)

        return mailbox_graph(device, transport, work)

    run, result = build()
    gc.collect()
    for i in range(1, 1001):
        run.launch(stream)
        if i < 6 or i % 100 == 0:
            run.synchronize(LIMIT_S)
            assert result.to_host().tolist() == [i, 3 * i, 7, 11]
    run.synchronize(LIMIT_S)


def test_mailbox_continues_after_request_numbers_wrap(device, stream, transport, monkeypatch):
    """Requests are counted up to 2**32 - 1 and then from 1 again.

    The answers and the replay number in an error remain correct.
    """
    monkeypatch.setattr(mailbox, "FIRST_REQUEST", 2**32 - 6)
    count = [0]

    def work(out: np.ndarray) -> None:
        count[0] += 1
        if count[0] == 19:
            raise ValueError("no")
        out[:] = (count[0], 5, 7, 11)

    run, result = mailbox_graph(device, transport, work)
    for i in range(1, 19):
        run.launch(stream)
        if i % 2 == 0:
            run.synchronize(LIMIT_S)
            assert result.to_host().tolist() == [i, 5, 7, 11]
    run.launch(stream)
    with pytest.raises(HostWorkError, match="in replay 19") as caught:
        run.synchronize(LIMIT_S)
    assert caught.value.replay == 19 and count == [19]


def test_mailbox_wait_depends_on_request_and_lane(device, transport):
    graph = Graph(device, "shape")
    lane = graph.lane("grammar")
    array = device.zeros((4,), "int32")
    lane.fill(array, 1)
    getattr(lane, transport)(lambda: None, name="step")
    lane.fill(array, 2)
    kinds = [(node.kind, node.name) for node in graph.nodes]
    assert kinds[1:3] == [("request", "request: step"), ("wait", "answer: step")]
    assert graph.edges == [(0, 1), (1, 2), (2, 3)]


def test_mailbox_request_clears_answer_of_earlier_replay(device, stream, monkeypatch):
    """The wait node only waits; the next request clears the answer.

    A write by the wait node would not be ordered with the answer of the next replay.
    """
    boxes = []
    batches = []
    create = mailbox.Mailbox.__init__

    def recorded_create(box, *args, **options):
        boxes.append(box)
        create(box, *args, **options)

    def recorded_call(function, *args):
        if function is cu.cuGraphAddBatchMemOpNode:
            batches.append([int(item.operation) for item in args[-1].paramArray])
        return call(function, *args)

    def answer() -> int:
        return int(boxes[0]._words.array[mailbox.ACK, 0])

    monkeypatch.setattr(mailbox.Mailbox, "__init__", recorded_create)
    monkeypatch.setattr(nodes, "call", recorded_call)
    seen = []
    run, _ = mailbox_graph(device, "mailbox", lambda out: seen.append(answer()))
    assert batches == [[int(cu.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WAIT_VALUE_32)]]
    for _ in range(3):
        replay(run, stream)
        assert answer() == 1
    assert seen == [0, 0, 0]


def test_mailbox_work_rejects_driver_calls(device, stream):
    """Mailbox work may not allocate device memory, but may drop the last reference to an array."""
    graph = Graph(device, "forbidden")
    lane = graph.lane("main")

    def collect() -> None:
        cycle: list[object] = [held.pop()]
        cycle.append(cycle)
        del cycle
        gc.collect()

    held = [device.zeros((16,), "int32")]
    lane.mailbox(collect, name="collects")
    lane.mailbox(lambda: device.zeros((1,), "int32"), name="allocates")
    run = graph.instantiate()
    run.launch(stream)
    with pytest.raises(HostWorkError, match="must not call the driver") as failed:
        run.synchronize(LIMIT_S)
    assert failed.value.node == "allocates"


def test_mailbox_uses_new_definition_after_update(device, stream, transport):
    """A mailbox of the new definition continues the replay numbers of the executable."""
    seen: list[tuple[str, int]] = []

    def definition(name: str) -> Graph:
        graph = Graph(device, name)

        def work() -> None:
            seen.extend((name, n[1]) for n in _native.running_host_work() if n[0] == "number")

        getattr(graph.lane("main"), transport)(work, name="number")
        return graph

    first = definition("first")
    second = definition("second")
    run = first.instantiate()
    for _ in range(2):
        run.launch(stream)
    run.update(second)
    replay(run, stream, 2)
    assert seen == [("first", 1), ("first", 2), ("second", 3), ("second", 4)]


CHILD = """
graph, seen = Graph(device, "child"), []
grammar, model = graph.lane("grammar"), graph.lane("model")
array = device.zeros((1 << 16,), "int32")
for i in range(4):
    model.fill(array, i)
    grammar.wait(model.record())
    try:
        getattr(grammar, sys.argv[1])(lambda: seen.append(1), name=f"step {i}")
    except DeviceError as error:
        print(error.code_name, [node.kind for node in graph.nodes], graph.edges)
        sys.exit(0)
    answered = grammar.record()
    model.fill(array, i + 10)
    model.wait(answered)
run = graph.instantiate()
for _ in range(30):
    run.launch(stream)
run.synchronize(60.0)
print(len(seen))
"""


def child(transport: str, **env: str) -> list[str]:
    """Run CHILD in a process; return the first word and the rest of its output."""
    done = run_program(CHILD, transport, GRAFT_DEVICE="soft", **env)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().split(maxsplit=1)


def test_mailboxes_of_two_lanes_run_with_one_hardware_queue(transport):
    assert child(transport, SOFTCUDA_QUEUES="1", SOFTCUDA_WORKERS="1") == ["120"]


def test_mailbox_requires_memory_operations_and_spinkernel_does_not():
    """On a device without memory operations, mailbox() raises an error and adds no node.

    Device attributes of related features do not affect mailbox().
    """
    code, rest = child("mailbox", SOFTCUDA_MEMOPS="0")
    assert (code, rest) == ("CUDA_ERROR_NOT_SUPPORTED", "['fill'] []")
    assert child("spinkernel", SOFTCUDA_MEMOPS="0") == ["120"]
    off = {f"SOFTCUDA_ATTRIBUTE_{n}": "0" for n in (92, 93, 94, 98, 122, 123)}
    assert child("mailbox", **off) == ["120"]


def test_mailbox_records_and_threads_end_with_executable(device, stream):
    """The worker sleeps while it is idle, and its thread ends after its last owner is gone."""
    _native.flush(LIMIT_S)
    before = _native.live_records()
    worker = MailboxWorker(name="ending")
    run, _ = mailbox_graph(device, "mailbox", lambda out: None, worker=worker)
    replay(run, stream)
    wait_until(lambda worker=worker: worker.native.parked)

    def threads() -> int:
        found = 0
        for name in Path("/proc/self/task").glob("*/comm"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found += name.read_text().startswith("ending")
        return found

    assert threads() == 1
    run.close()
    del run, _
    gc.collect()
    wait_until(lambda: _native.live_records() <= before)
    del worker  # the last reference: the graph has released its reference to the worker
    wait_until(lambda: threads() == 0)


def test_mailbox_worker_runs_on_given_cores(device, stream):
    core = min(os.sched_getaffinity(0))
    where: list[set[int]] = []
    run, _ = mailbox_graph(
        device,
        "mailbox",
        lambda out: where.append(os.sched_getaffinity(0)),
        worker=MailboxWorker(cpus=[core]),
    )
    replay(run, stream)
    assert where == [{core}]


def test_mailbox_native_worker_holds_no_python_reference(device):
    """The worker's thread may drop the last native reference, which must not require the GIL."""
    worker = MailboxWorker()
    before = sys.getrefcount(worker.native)
    run, _ = mailbox_graph(device, "mailbox", lambda out: None, worker=worker)
    # An assert statement may hold a reference of its own, so the count is read before it.
    after = sys.getrefcount(worker.native)
    assert after == before
    run.close()


@pytest.mark.overlap
def test_mailbox_deadline_releases_wait_and_discards_late_result(device, stream, transport):
    go = threading.Event()
    slow = [False]

    def work(out: np.ndarray) -> None:
        if slow[0]:
            go.wait(LIMIT_S)
            out[:] = 99
        else:
            out[:] = 5

    later: list[int] = []
    graph = Graph(device, "late")
    output = device.pinned((4,), "int32")
    result = device.zeros((4,), "int32")
    lane = graph.lane("main")
    getattr(lane, transport)(work, output=output, name="grammar", deadline_s=0.2)
    lane.copy(result, output)
    getattr(lane, transport)(lambda: later.append(1), name="after")
    run = graph.instantiate()
    replay_in_time(run, stream)
    before = run.launches
    slow[0] = True
    run.launch(stream)
    # The second launch is already in flight when the first one fails. It must not hang.
    run.launch(stream)
    with pytest.raises(HostWorkError, match=r"no answer within 0\.2 s") as failed:
        run.synchronize(LIMIT_S)
    assert (failed.value.node, failed.value.replay) == ("grammar", before + 1)
    assert graph.status.array[0] == 4 and graph.status.array[1] == before + 1
    with pytest.raises(HostWorkError):
        run.launch(stream)
    with pytest.raises(DeadlineError, match="missed its deadline is still running"):
        run.clear(timeout_s=0.05)
    assert graph.worker.native.stuck
    go.set()
    run.clear(timeout_s=LIMIT_S)
    assert result.to_host().tolist() == [5] * 4 and output.array.tolist() == [5] * 4
    assert later == [1]
    slow[0] = False
    for _ in range(3):
        replay_in_time(run, stream)
    assert result.to_host().tolist() == [5] * 4 and later == [1] * 4


def test_mailbox_is_answered_by_worker_or_watchdog_once(device, stream, transport):
    """Work that takes about as long as its deadline either publishes its result or fails."""
    number = [0]
    rng = np.random.default_rng(3)

    def work(out: np.ndarray) -> None:
        time.sleep(0.02 + float(rng.uniform(-0.01, 0.01)))
        out[:] = number[0]

    run, result = mailbox_graph(device, transport, work, deadline_s=0.021)
    expected = 0
    for i in range(1, 21):
        number[0] = i
        run.launch(stream)
        try:
            run.synchronize(LIMIT_S)
            expected = i
        except HostWorkError:
            run.clear(LIMIT_S)
        assert result.to_host().tolist() == [expected] * 4


def test_spinkernel_ends_at_device_deadline(device, stream):
    """Without an answer, the waiting kernel ends at its own deadline and the replay fails."""
    go = threading.Event()

    def work(out: np.ndarray) -> None:
        go.wait(LIMIT_S)
        out[:] = 1

    run, result = mailbox_graph(
        device, "spinkernel", work, deadline_s=LIMIT_S, device_deadline_s=0.3
    )
    start = time.monotonic()
    run.launch(stream)
    with pytest.raises(HostWorkError, match=r"reached (its own|its) deadline"):
        run.synchronize(LIMIT_S)
        wait_until(lambda: run.check() is not None)  # the watchdog notices it shortly afterwards
    assert time.monotonic() - start < LIMIT_S
    go.set()
    run.clear(LIMIT_S)
    assert result.to_host().tolist() == [0] * 4
    replay_in_time(run, stream)
    assert result.to_host().tolist() == [1] * 4


def test_late_answer_leaves_next_request_in_place(device, stream):
    """The device posts its next request while the worker still runs the work of the previous one.

    The test writes the words that the kernels of `spinkernel` in a body would write.
    """
    words = np.zeros((4, mailbox.LINE_WORDS), np.uint32)
    request, answer, timed_out, completed = words[:, 0:1]
    graph = Graph(device, "late")
    graph.lane("main").fill(device.zeros((1,), "int32"))

    def work() -> None:
        timed_out[:] = request[0]  # the waiting kernel has reached its own deadline,
        request[0] += 1  # and the body runs again

    code, api, _ = _native.attach_mailbox(
        graph.handle,
        graph.state,
        graph.worker.native,
        "step",
        hostwork.as_work(work).native,
        tuple(word.ctypes.data for word in (request, answer, timed_out, completed)),
        (0, 0, 0),
        (LIMIT_S, 0.0),
        words,
    )
    assert code == 0, api
    run = graph.instantiate()
    request[0] = 1
    run.launch(stream)
    wait_until(lambda: answer[0] == 2 and request[0] == 0)
    completed[0] = 1
    with pytest.raises(HostWorkError, match="reached its deadline before the answer"):
        run.synchronize(LIMIT_S)


@pytest.mark.overlap
def test_mailbox_replay_deadline_counts_from_launch(device, stream):
    """If the request is posted too late, the replay fails and the work is skipped."""
    seen: list[int] = []
    go = threading.Event()
    graph = Graph(device, "queued")
    lane = graph.lane("main")
    lane.host(lambda: go.wait(LIMIT_S), name="gate")
    lane.mailbox(lambda: seen.append(1), name="late request", replay_deadline_s=0.1)
    run = graph.instantiate()
    run.launch(stream)
    wait_until(lambda: graph.status.array[0] == 4)
    go.set()
    with pytest.raises(HostWorkError, match="did not reach this step") as failed:
        run.synchronize(LIMIT_S)
    assert failed.value.node == "late request" and seen == []


REPLAYS = """
graph = Graph(device, "replays")
output, lane = device.pinned((1,), "int32"), graph.lane("main")
result, answers = device.zeros((1,), "int32"), iter(range(1, 9))
work = lambda out: out.fill(next(answers))
getattr(lane, sys.argv[1])(work, output=output, name="answer", replay_deadline_s=60.0)
lane.copy(result, output)
run = graph.instantiate()
for i in range(1, 5):
    try:
        run.launch(stream)
    except DeviceError as error:
        print(error.code_name)
        continue
    run.synchronize(30.0)
    print(i, result.to_host()[0], run.launches)
end = time.monotonic() + 60.0
while not graph.worker.native.parked and time.monotonic() < end:
    time.sleep(0.001)
print(graph.worker.native.parked, graph.worker.served)
"""


@pytest.mark.parametrize("setting", ["SOFTCUDA_LAUNCH_BLOCKING", "CUDA_LAUNCH_BLOCKING"])
@pytest.mark.full("-CUDA_LAUNCH_BLOCKING")
def test_mailbox_answers_launch_that_returns_after_completion(setting, transport):
    """The worker answers the requests of a launch whose driver call has not returned yet."""
    done = run_program(REPLAYS, transport, **{"GRAFT_DEVICE": "soft", setting: "1"})
    expected = [*(f"{i} {i} {i}" for i in range(1, 5)), "True 4"]
    assert done.stdout.splitlines() == expected, done.stderr


def test_mailbox_expects_no_request_of_failed_launch(transport):
    """After a launch that the driver rejects, the next replays work and the worker can sleep."""
    done = run_program(REPLAYS, transport, GRAFT_DEVICE="soft", SOFTCUDA_FAIL="cuGraphLaunch:2")
    expected = ["1 1 1", "CUDA_ERROR_OUT_OF_MEMORY", "3 2 2", "4 3 3", "True 3"]
    assert done.stdout.splitlines() == expected, done.stderr


TIMED = """
from graft.tools.doctor import check_device
print("at most 1 s" in check_device().detail)
answered = threading.Event()
graph, result = Graph(device, "timed"), device.zeros((1,), "int32")
lane = graph.lane("main")
lane.spinkernel(lambda: answered.wait(60), name="slow", deadline_s=30.0)
lane.fill(result, 1)
run = graph.instantiate()
run.launch(stream)
try:
    run.synchronize(60.0)
except HostWorkError as error:
    print("reached its own deadline" in str(error) or "reached its deadline" in str(error))
answered.set()
run.clear(60.0)
print(result.to_host()[0])
"""


def test_spinkernel_ends_before_device_ends_kernels() -> None:
    """A kernel that runs longer than the device allows would make the context unusable."""
    done = run_program(TIMED, GRAFT_DEVICE="soft", SOFTCUDA_ATTRIBUTE_17="4")
    assert done.stdout.split() == ["True", "True", str(0x01010101)], done.stderr


FAULT = """
text = 'extern "C" __global__ void bad(int* p) { for (int i = 0; i < 4096; ++i) p[i] = 1; }'
bad = load_text(device, text, "bad.cu")
graph, worker = Graph(device, "faults"), MailboxWorker(wait="spin")
lane = graph.lane("main")
lane.kernel(bad["bad"], 1, 1, [device.zeros((1,), "int32")])
lane.mailbox(lambda: None, worker=worker, name="never requested")
run = graph.instantiate()
try:
    run.launch(stream)
    run.synchronize(60.0)
except DeviceError as error:
    print(error.code_name)
end = time.monotonic() + 60.0
while not worker.native.parked and time.monotonic() < end:
    time.sleep(0.001)
print(worker.native.parked, worker.served)
"""


UNNOTICED_FAULT = """
text = 'extern "C" __global__ void bad(int* p) { for (int i = 0; i < 4096; ++i) p[i] = 1; }'
bad, go = load_text(device, text, "bad.cu"), threading.Event()
graph, worker = Graph(device, "faults"), MailboxWorker(wait=sys.argv[1])
lane = graph.lane("main")
lane.host(lambda: go.wait(60))
lane.kernel(bad["bad"], 1, 1, [device.zeros((1,), "int32")])
lane.mailbox(lambda: None, worker=worker, name="never requested")
run = graph.instantiate()
run.launch(stream)
end = time.monotonic() + 60.0
while worker.native.parked and time.monotonic() < end:
    time.sleep(0.001)
print(worker.native.parked)
go.set()
while not worker.native.parked and time.monotonic() < end:
    time.sleep(0.001)
print(worker.native.parked)
"""


@pytest.mark.parametrize("wait", ["spin", "park"])
def test_worker_sleeps_after_device_fault_although_host_does_not_call_driver(wait: str) -> None:
    settings = {"GRAFT_DEVICE": "soft", "SOFTCUDA_LAUNCH_BLOCKING": "0"}
    done = run_program(UNNOTICED_FAULT, wait, **settings)
    assert done.stdout.split() == ["False", "True"], done.stderr


def test_mailbox_waits_end_after_device_fault():
    """After a kernel fault, synchronize() raises an error and a spinning worker goes to sleep."""
    done = run_program(FAULT, GRAFT_DEVICE="soft")
    assert done.stdout.split() == ["CUDA_ERROR_ILLEGAL_ADDRESS", "True", "0"], done.stderr
