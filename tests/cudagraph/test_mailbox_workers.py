"""Threads that answer mailboxes: placement, settings, ends."""

from __future__ import annotations

import ctypes
import gc
import os
import sys

import pytest
from cudagraph_util import LIMIT_S, answered, compiled, replay, until

from graft.cudagraph.errors import OptionError
from graft.cudagraph.graph import Graph
from graft.cudagraph.hostwork import NativeWork, PythonWork
from graft.cudagraph.mailbox import MailboxWorker
from graft.native import _native


class Api(ctypes.Structure):
    """What the native function below is given."""

    _fields_ = (("output", ctypes.c_void_p), ("runs", ctypes.c_int))


SOURCE = """
struct Api { int* (*output)(); int runs; };
extern "C" void answer(void* data) {
  auto* api = static_cast<Api*>(data);
  ++api->runs;
  for (int i = 0; i < 4; ++i) api->output()[i] = 10 * i + api->runs;
}
"""


def test_native_work_writes_the_output(device, stream, tmp_path):
    """C++ asks where its results go, and what it wrote there is published."""
    library, offered = compiled(SOURCE, tmp_path), _native.native_api()
    api = Api(output=offered["current_output"])
    address = ctypes.cast(library.answer, ctypes.c_void_p).value or 0
    work = NativeWork(address, ctypes.addressof(api), keep=(library, api), name="answer")
    run, result = answered(device, "mailbox", work, worker=MailboxWorker())
    for i in range(1, 101):
        replay(run, stream)
        assert result.to_host().tolist() == [i, 10 + i, 20 + i, 30 + i]
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
