"""Mailboxes that are late, fail or fault: who wins, and what is left afterwards."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from cudagraph_util import LIMIT_S, answered, in_time, run_program, until

from graft.cudagraph import DeadlineError, Graph, HostWorkError


def test_a_late_worker_loses_and_its_result_is_not_published(device, stream, transport):
    """The watchdog lets the device go on, names the step; late results go nowhere."""
    go, slow = threading.Event(), [False]

    def work(out: np.ndarray) -> None:
        if slow[0]:
            go.wait(LIMIT_S)
            out[:] = 99
        else:
            out[:] = 5

    later: list[int] = []
    graph = Graph(device, "late")
    output, result = device.pinned((4,), "int32"), device.zeros((4,), "int32")
    lane = graph.lane("main")
    getattr(lane, transport)(work, output=output, name="grammar", deadline_s=1.5)
    lane.copy(result, output)
    getattr(lane, transport)(lambda: later.append(1), name="after")
    run = graph.instantiate()
    in_time(run, stream)
    before = run.launches
    slow[0] = True
    run.launch(stream)
    run.launch(stream)  # in flight when the first of the two fails: it must not hang either
    with pytest.raises(HostWorkError, match=r"no answer within 1\.5 s") as failed:
        run.synchronize(LIMIT_S)
    assert (failed.value.node, failed.value.replay) == ("grammar", before + 1)
    assert graph.status.array[0] == 4 and graph.status.array[1] == before + 1
    with pytest.raises(HostWorkError):
        run.launch(stream)
    with pytest.raises(DeadlineError, match="given up is still running"):
        run.clear(timeout_s=0.05)
    assert graph.worker.native.stuck
    go.set()
    run.clear(timeout_s=LIMIT_S)
    assert result.to_host().tolist() == [5] * 4 and output.array.tolist() == [5] * 4
    assert later == [1]
    slow[0] = False
    for _ in range(3):
        in_time(run, stream)
    assert result.to_host().tolist() == [5] * 4 and later == [1] * 4
    run.close()


def test_worker_and_watchdog_never_both_answer(device, stream, transport):
    """Work about as long as its deadline: published by the worker or failed, never both."""
    number, rng = [0], np.random.default_rng(3)

    def work(out: np.ndarray) -> None:
        time.sleep(0.02 + float(rng.uniform(-0.01, 0.01)))
        out[:] = number[0]

    run, result = answered(device, transport, work, deadline_s=0.021)
    expected = 0
    for i in range(1, 41):
        number[0] = i
        run.launch(stream)
        try:
            run.synchronize(LIMIT_S)
            expected = i
        except HostWorkError:
            run.clear(LIMIT_S)
        assert result.to_host().tolist() == [expected] * 4
    run.close()


def test_a_spinning_kernel_gives_up_on_the_device_clock(device, stream):
    """Without any help of the host the kernel ends at its own deadline, and the replay fails."""
    go = threading.Event()

    def work(out: np.ndarray) -> None:
        go.wait(LIMIT_S)
        out[:] = 1

    run, result = answered(device, "spin", work, deadline_s=LIMIT_S, device_deadline_s=1.5)
    begun = time.monotonic()
    run.launch(stream)
    with pytest.raises(HostWorkError, match="gave up"):
        run.synchronize(LIMIT_S)
        until(lambda: run.check() is not None)  # the watchdog sees the word a little later
    assert time.monotonic() - begun < LIMIT_S
    go.set()
    run.clear(LIMIT_S)
    assert result.to_host().tolist() == [0] * 4
    in_time(run, stream)
    assert result.to_host().tolist() == [1] * 4
    run.close()


def test_a_request_that_is_not_reached_in_time_fails_the_replay(device, stream):
    """The replay deadline counts from the launch; the step then stands down when it is reached."""
    seen: list[int] = []
    go = threading.Event()
    graph = Graph(device, "queued")
    lane = graph.lane("main")
    lane.host(lambda: go.wait(LIMIT_S), name="gate")
    lane.mailbox(lambda: seen.append(1), name="asked late", replay_deadline_s=0.1)
    run = graph.instantiate()
    run.launch(stream)
    until(lambda: graph.status.array[0] == 4)
    go.set()
    with pytest.raises(HostWorkError, match="did not reach this step") as failed:
        run.synchronize(LIMIT_S)
    assert failed.value.node == "asked late" and seen == []
    run.close()


FAULT = """
text = 'extern "C" __global__ void bad(int* p) { for (int i = 0; i < 4096; ++i) p[i] = 1; }'
bad = load_text(device, text, "bad.cu")
graph, worker = Graph(device, "faults"), MailboxWorker(wait="spin")
lane = graph.lane("main")
lane.kernel(bad["bad"], 1, 1, [device.zeros((1,), "int32")])
lane.mailbox(lambda: None, worker=worker, name="never asked")
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


def test_a_fault_wakes_everybody_and_workers_sleep():
    """The wait ends with the fault's error, and a spinning worker spins no longer."""
    done = run_program(FAULT, GRAFT_DEVICE="soft")
    assert done.stdout.split() == ["CUDA_ERROR_ILLEGAL_ADDRESS", "True", "0"], done.stderr
