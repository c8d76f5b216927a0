"""Threads that answer mailboxes: sharing, placement, settings, ends."""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from mailbox_util import LIMIT_S, TRANSPORTS, answered, asleep, in_time, until

from graft.cudagraph.errors import DeadlineError, HostWorkError, OptionError
from graft.cudagraph.graph import Graph
from graft.cudagraph.hostwork import NativeWork, PythonWork
from graft.cudagraph.mailbox import MailboxWorker, current_part
from graft.native import _native


class Api(ctypes.Structure):
    """What the native function below is given."""

    _fields_ = (("output", ctypes.c_void_p), ("part", ctypes.c_void_p), ("runs", ctypes.c_int))


SOURCE = """
struct Api { int* (*output)(); void (*part)(int*, int*); int runs; };
extern "C" void answer(void* data) {
  auto* api = static_cast<Api*>(data);
  int index = 0, count = 0;
  api->part(&index, &count);
  if (index == 0) ++api->runs;
  const int runs = __atomic_load_n(&api->runs, __ATOMIC_RELAXED);
  for (int i = index; i < 4; i += count) api->output()[i] = 10 * index + (index == 0 ? runs : 1);
}
"""


def test_native_work_writes_its_part_of_the_output(device, stream, tmp_path):
    """Two threads of C++ share the rows of one answer, and only their output is published."""
    (tmp_path / "work.cpp").write_text(SOURCE)
    command = [os.environ.get("CXX", "c++"), "-shared", "-fPIC", "-o", str(tmp_path / "work.so"),
               str(tmp_path / "work.cpp")]  # fmt: skip
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip(f"no C++ compiler ({command[0]})")
    library, offered = ctypes.CDLL(str(tmp_path / "work.so")), _native.mailbox_api()
    api = Api(output=offered["current_output"], part=offered["read_part"])
    address = ctypes.cast(library.answer, ctypes.c_void_p).value or 0
    work = NativeWork(address, ctypes.addressof(api), keep=(library, api), name="answer")
    run, result = answered(device, "mailbox", work, worker=MailboxWorker(threads=2))
    for i in range(1, 101):
        run.launch(stream)
        run.synchronize(LIMIT_S)
        assert result.to_host().tolist() == [i, 11, i, 11]
    run.close()


def test_several_threads_share_each_request(device, stream):
    """Each thread does its part once a replay, and the answer follows the last of them."""
    parts: list[tuple[int, int]] = []
    done: list[int] = []

    def work() -> None:
        part = current_part()
        time.sleep(0.002 * part[0])
        parts.append(part)

    graph, worker = Graph(device, "shared"), MailboxWorker(threads=3)
    lane = graph.lane("main")
    lane.mailbox(work, worker=worker, name="rows")
    lane.host(lambda: done.append(len(parts)))
    run = graph.instantiate()
    for _ in range(20):
        run.launch(stream)
    run.synchronize(LIMIT_S)
    assert done == [3 * i for i in range(1, 21)]
    assert all(sorted(parts[3 * i : 3 * i + 3]) == [(0, 3), (1, 3), (2, 3)] for i in range(20))
    assert current_part() == (0, 1)
    run.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_late_part_keeps_the_whole_answer_back(device, stream, transport):
    """One of three threads overruns: nothing is published, and no launch before it returned."""
    go, slow = threading.Event(), [False]

    def work(out: np.ndarray) -> None:
        part, count = current_part()
        if slow[0] and part == 1:
            go.wait(LIMIT_S)
        out[part::count] = 7 if slow[0] else 3

    worker = MailboxWorker(threads=3)
    run, result = answered(device, transport, work, worker=worker, deadline_s=0.3)
    in_time(run, stream)
    slow[0] = True
    run.launch(stream)
    run.launch(stream)
    with pytest.raises(HostWorkError, match="no answer within"):
        run.synchronize(LIMIT_S)
    assert worker.stuck and result.to_host().tolist() == [3] * 4
    with pytest.raises(HostWorkError):
        run.launch(stream)
    with pytest.raises(DeadlineError, match="given up is still running"):
        run.clear(timeout_s=0.05)
    go.set()
    run.clear(LIMIT_S)
    assert not worker.stuck and result.to_host().tolist() == [3] * 4
    for _ in range(3):
        in_time(run, stream)
        assert result.to_host().tolist() == [7] * 4
    run.close()


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
    worker = MailboxWorker(threads=2, name="ending")
    run, _ = answered(device, "mailbox", lambda out: None, worker=worker)
    run.launch(stream)
    run.synchronize(LIMIT_S)
    until(functools.partial(asleep, worker, 2))

    def threads() -> int:
        names = []
        for task in os.listdir("/proc/self/task"):
            try:
                with open(f"/proc/self/task/{task}/comm") as comm:
                    names.append(comm.read().strip())
            except FileNotFoundError:
                continue
        return sum(name.startswith("ending") for name in names)

    assert threads() == 2
    run.close()
    del run, _
    gc.collect()
    until(lambda: _native.live_records() <= before)
    del worker  # the last owner: its graph's port is gone
    until(lambda: threads() == 0)


@pytest.mark.parametrize(
    "options",
    [{"threads": 0}, {"threads": 65}, {"cpus": [10**6]}, {"cpus": []}, {"wait": "hover"},
     {"spin_us": -1.0}, {"sleep_us": float("nan")}],
)  # fmt: skip
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
    run.launch(stream)
    run.synchronize(LIMIT_S)
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
