"""Endurance: many replays, many changes; nothing grows, no call is lost and none is doubled."""

from __future__ import annotations

import ctypes
import gc
import weakref

import numpy as np
import pytest
from cudagraph_util import replay, resident_kib, settled

from graft import native
from graft.cudagraph.device import Device, Stream
from graft.cudagraph.graph import Graph
from graft.cudagraph.hostwork import NativeWork
from graft.native import _native

LIMIT_S = 600.0
MOST_KIB = 4096
TEXT = """
extern "C" __global__ void count(unsigned* counter, int place) { ++counter[place]; }
"""


class Semaphore:
    """A semaphore that nobody waits for: libc's own counter of native calls."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None)
        self.memory = ctypes.create_string_buffer(64)
        self.libc, self.address = libc, ctypes.addressof(self.memory)
        assert libc.sem_init(ctypes.c_void_p(self.address), 0, 0) == 0
        post = ctypes.cast(libc.sem_post, ctypes.c_void_p).value or 0
        self.work = NativeWork(post, self.address, keep=self.memory, name="sem_post")

    @property
    def value(self) -> int:
        out = ctypes.c_int()
        assert self.libc.sem_getvalue(ctypes.c_void_p(self.address), ctypes.byref(out)) == 0
        return out.value


def replay_many(device: Device, stream: Stream, module, count: int) -> None:
    """Two Python and two native host nodes between counting kernels, in flight by the dozen."""
    kernel = module["count"]
    counter, seen = device.zeros((2,), "uint32"), np.zeros(2, np.int64)
    semaphores = [Semaphore(), Semaphore()]

    def step(which: int) -> None:
        seen[which] += 1

    graph = Graph(device, "soak")
    a, b = graph.lane("a"), graph.lane("b")
    a.kernel(kernel, 1, 1, [counter, 0])
    b.wait(a.record())
    a.host(lambda: step(0), name="python 0")
    a.host(semaphores[0].work)
    b.host(semaphores[1].work)
    b.host(lambda: step(1), name="python 1")
    a.wait(b.record())
    a.kernel(kernel, 1, 1, [counter, 1])
    assert [node.kind for node in graph.nodes].count("host") == 4
    executable = graph.instantiate()

    def replay(times: int) -> None:
        for i in range(times):
            executable.launch(stream)
            if i % 16 == 15:
                executable.synchronize(LIMIT_S)
        executable.synchronize(LIMIT_S)

    warm = max(count // 10, 1000)
    replay(warm)
    settled()
    before, live = resident_kib(), (native.live_records(), native.live_resources())
    replay(count)
    settled()
    grown = resident_kib() - before
    total = warm + count
    assert executable.launches == total
    assert counter.to_host().tolist() == [total, total]
    assert seen.tolist() == [total, total] and [s.value for s in semaphores] == [total, total]
    assert (native.live_records(), native.live_resources()) == live
    assert grown < MOST_KIB, f"resident memory grew by {grown} KiB in {count} replays"
    executable.close()


def change_many(device: Device, stream: Stream, count: int) -> None:
    """Give a cell `count` values, some of which replays see, in order and each once."""
    seen: list[int] = []

    class Value:
        def __init__(self, number: int) -> None:
            self.number = number

    graph = Graph(device, "payloads")
    cell = graph.cell(Value(-1))
    graph.lane("main").host(lambda value: seen.append(value.number), cell=cell)
    executable = graph.instantiate()

    def change(times: int) -> list[int]:
        used = []
        for i in range(times):
            executable.set(cell, Value(i))
            if i % 1000 == 0:
                executable.launch(stream)
                used.append(i)
        executable.synchronize(LIMIT_S)
        return used

    expected = change(max(count // 10, 1000))
    settled()
    before = resident_kib()
    watch = weakref.ref(value := Value(-2))
    executable.set(cell, value)
    del value
    expected += change(count)
    replay(executable, stream)
    expected.append(count - 1)
    settled()
    assert seen == expected
    assert cell.held == 1 and watch() is None
    assert sum(isinstance(o, Value) for o in gc.get_objects()) == 1
    grown = resident_kib() - before
    assert grown < MOST_KIB, f"resident memory grew by {grown} KiB in {count} changes"
    executable.close()


def test_20000_replays_keep_memory_flat(device: Device, stream: Stream, module) -> None:
    """Resident memory does not grow with replays, and both sides count the same calls."""
    replay_many(device, stream, module, 20_000)


def test_50000_changes_of_a_cell_weigh_nothing(device: Device, stream: Stream) -> None:
    """Values that no replay can ask for are gone, and every replay saw the one set for it."""
    change_many(device, stream, 50_000)


@pytest.mark.soak
def test_a_million_replays_keep_memory_flat(device: Device, stream: Stream, module) -> None:
    """The same, for a million replays."""
    replay_many(device, stream, module, 1_000_000)


@pytest.mark.soak
def test_a_million_changes_of_a_cell_weigh_nothing(device: Device, stream: Stream) -> None:
    """The same, for a million payloads."""
    change_many(device, stream, 1_000_000)


@pytest.mark.soak
def test_a_million_answers_of_a_mailbox(device: Device, stream: Stream) -> None:
    """A million requests are answered once each."""
    from graft.cudagraph.mailbox import MailboxWorker

    worker, semaphore = MailboxWorker(wait="park"), Semaphore()
    graph = Graph(device, "answers")
    graph.lane("main").mailbox(semaphore.work, worker=worker, deadline_s=LIMIT_S)
    executable = graph.instantiate()

    def replay(times: int) -> None:
        for i in range(times):
            executable.launch(stream)
            if i % 64 == 63:
                executable.synchronize(LIMIT_S)
        executable.synchronize(LIMIT_S)

    replay(10_000)
    settled()
    before = resident_kib()
    replay(1_000_000)
    assert semaphore.value == 1_010_000 and worker.served == 1_010_000
    assert resident_kib() - before < MOST_KIB
    executable.close()
    assert _native.flush(LIMIT_S)
