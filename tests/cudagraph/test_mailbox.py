"""Mailboxes: requests, answers, shape, what is refused; the threads that answer."""

from __future__ import annotations

import gc
import os
import sys

import numpy as np
import pytest
from cudagraph_util import LIMIT_S, answered, replay, run_program, until

from graft.cudagraph import Graph, GraphExec, HostWorkError, MailboxWorker, OptionError, PythonWork
from graft.native import _native


def test_every_replay_gets_its_own_answer_after_everything_was_dropped(device, stream, transport):
    """The callable, its graph and its worker live as long as the executable, replay by replay."""

    def make() -> tuple[GraphExec, object]:
        count = [0]

        def work(out: np.ndarray) -> None:
            count[0] += 1
            out[:] = (count[0], count[0] * 3, 7, 11)

        return answered(device, transport, work)

    run, result = make()
    gc.collect()
    for i in range(1, 1001):
        run.launch(stream)
        if i < 6 or i % 100 == 0:
            run.synchronize(LIMIT_S)
            assert result.to_host().tolist() == [i, 3 * i, 7, 11]
    run.synchronize(LIMIT_S)
    run.close()


def test_the_wait_descends_from_its_request_and_the_request_from_the_lane(device, transport):
    """What the lane holds before is an ancestor of the request, and the request of the wait."""
    graph = Graph(device, "shape")
    lane, array = graph.lane("grammar"), device.zeros((4,), "int32")
    lane.fill(array, 1)
    getattr(lane, transport)(lambda: None, name="step")
    lane.fill(array, 2)
    kinds = [(node.kind, node.name) for node in graph.nodes]
    assert kinds[1:3] == [("request", "request: step"), ("wait", "answer: step")]
    assert graph.edges == [(0, 1), (1, 2), (2, 3)]
    graph.close()


def test_work_may_not_call_the_device_and_garbage_is_no_call(device, stream):
    """A driver call in work is refused by name; collecting a device array there is harmless."""
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
    run.close()


def test_an_updated_executable_asks_the_new_definition(device, stream, transport):
    """After update() requests go to the new work, and replays are numbered on."""
    seen: list[tuple[str, int]] = []

    def definition(name: str) -> Graph:
        graph = Graph(device, name)

        def work() -> None:
            seen.extend((name, n[1]) for n in _native.running_host_work() if n[0] == "number")

        getattr(graph.lane("main"), transport)(work, name="number")
        return graph

    first, second = definition("first"), definition("second")
    run = first.instantiate()
    for _ in range(2):
        run.launch(stream)
    run.update(second)
    replay(run, stream, 2)
    assert seen == [("first", 1), ("first", 2), ("second", 3), ("second", 4)]
    run.close()


def test_deadlines_and_operands_out_of_range_are_refused(device):
    """Nothing is added to the graph by a refused call."""
    graph = Graph(device, "refused")
    lane = graph.lane("main")
    for options in ({"deadline_s": 0.0}, {"deadline_s": float("inf")}, {"worker": "me"},
                    {"replay_deadline_s": -1.0}, {"output": np.zeros(3)}):  # fmt: skip
        with pytest.raises(OptionError):
            lane.mailbox(lambda: None, **options)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"device_deadline_s must be .* not 0\.0"):
        lane.spin(lambda: None, device_deadline_s=0.0)
    assert graph.nodes == []
    graph.close()


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
    done = run_program(CHILD, transport, GRAFT_DEVICE="soft", **env)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().split(maxsplit=1)


def test_one_hardware_queue_is_enough(transport):
    """Two lanes that meet at mailboxes finish although work waits behind the waits."""
    assert child(transport, SOFTCUDA_QUEUES="1", SOFTCUDA_WORKERS="1") == ["120"]


def test_without_memory_operations_a_mailbox_is_refused_and_spinning_works():
    """The refused pair leaves no node behind; every other attribute may be 0."""
    code, rest = child("mailbox", SOFTCUDA_MEMOPS="0")
    assert (code, rest) == ("CUDA_ERROR_NOT_SUPPORTED", "['fill'] []")
    assert child("spin", SOFTCUDA_MEMOPS="0") == ["120"]
    off = {f"SOFTCUDA_ATTRIBUTE_{n}": "0" for n in (92, 93, 94, 98, 122, 123)}
    assert child("mailbox", **off) == ["120"]


def test_one_worker_serves_several_graphs(device, stream):
    """Mailboxes of two graphs share a thread; each has words of its own."""
    worker, counts = MailboxWorker(wait="park"), [0, 0]

    def bump(i: int) -> None:
        counts[i] += 1

    runs = []
    for i in range(2):
        graph = Graph(device, f"graph {i}")
        for lane in ("a", "b"):
            graph.lane(lane).mailbox(PythonWork(bump, i), worker=worker, name=f"{i} {lane}")
        runs.append(graph.instantiate())
    other = device.stream("other")
    for _ in range(50):
        runs[0].launch(stream)
        runs[1].launch(other)
    for run in runs:
        run.synchronize(LIMIT_S)
        run.close()
    assert counts == [100, 100]
    other.close()


def test_everything_is_given_back(device, stream):
    """Records and threads end with the executable, and an idle worker sleeps."""
    _native.flush(LIMIT_S)
    before = _native.live_records()
    worker = MailboxWorker(name="ending")
    run, _ = answered(device, "mailbox", lambda out: None, worker=worker)
    replay(run, stream)
    until(lambda worker=worker: worker.native.parked)

    def threads() -> int:
        names = []
        for task in os.listdir("/proc/self/task"):
            try:
                with open(f"/proc/self/task/{task}/comm") as comm:
                    names.append(comm.read().strip())
            except FileNotFoundError:
                continue
        return sum(name.startswith("ending") for name in names)

    assert threads() == 1
    run.close()
    del run, _
    gc.collect()
    until(lambda: _native.live_records() <= before)
    del worker  # the last owner: its graph's port is gone
    until(lambda: threads() == 0)


@pytest.mark.parametrize("options", [{"cpus": [10**6]}, {"cpus": []}, {"wait": "hover"}])
def test_worker_settings_out_of_range_are_refused(options):
    """Each by an OptionError, before any thread is started."""
    with pytest.raises(OptionError):
        MailboxWorker(**options)


def test_threads_run_where_they_are_placed(device, stream):
    """`cpus` is the affinity of the worker's threads."""
    core = min(os.sched_getaffinity(0))
    where: list[set[int]] = []
    run, _ = answered(
        device, "mailbox", lambda out: where.append(os.sched_getaffinity(0)),
        worker=MailboxWorker(cpus=[core]),
    )  # fmt: skip
    replay(run, stream)
    assert where == [{core}]
    run.close()


def test_native_owners_of_a_worker_hold_no_python_reference(device):
    """A worker's thread may drop the last of them, and must not need the GIL for it."""
    worker = MailboxWorker()
    before = sys.getrefcount(worker.native)
    graph = Graph(device, "owners")
    graph.lane("main").mailbox(lambda: None, worker=worker)
    run = graph.instantiate()
    after = sys.getrefcount(worker.native)
    assert after == before
    run.close()
    graph.close()
