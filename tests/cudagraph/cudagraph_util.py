"""Helpers of the tests of cudagraph: replays, release of resources, child processes."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fork_server import run_forked

from graft import native
from graft.cudagraph import Device, Graph, GraphExec, HostWorkError, Stream
from graft.cudagraph.driver.driver import call, cu, is_context_retained
from graft.cudagraph.host.hostwork import NativeWork
from graft.native import _native

LIMIT_S = 60.0
Finished = subprocess.CompletedProcess[str]
THREAD_LOCAL = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
#: First lines of programs that run in a child process.
PRELUDE = """
import gc, os, sys, threading, time, weakref
from graft.cudagraph import *
from graft.native import _native
device = open_device()
stream = device.stream()
"""


def replay(graph: Graph | GraphExec, stream: Stream, times: int = 1) -> GraphExec:
    """Launch an executable or a graph `times` times, wait, and return the executable."""
    run = graph.instantiate() if isinstance(graph, Graph) else graph
    for _ in range(times):
        run.launch(stream)
    run.synchronize(LIMIT_S)
    return run


def assert_raises(error: type[Exception], attempts: dict[str, Callable[[], object]]) -> None:
    """Check that each function raises the error with a message that matches its key."""
    for words, attempt in attempts.items():
        with pytest.raises(error, match=words):
            attempt()


def run_in_threads(*work: Callable[[], object]) -> None:
    """Call each function in its own thread and wait for all; re-raise exceptions."""
    with ThreadPoolExecutor(len(work)) as pool:
        for done in [pool.submit(each) for each in work]:
            done.result()


class ChangingSet(weakref.WeakSet[Any]):
    """A set that calls `change` in another thread while it is read for the first time.

    If `change` waits for a lock that the reader holds, it finishes after the set was read.
    """

    def __init__(self, items: Iterable[Any], change: Callable[[], object]) -> None:
        super().__init__(items)
        self.changer = threading.Thread(target=change)

    def __iter__(self) -> Iterator[Any]:
        for item in super().__iter__():
            if self.changer.ident is None:
                self.changer.start()
                self.changer.join(0.3)
            yield item


def wait_until(done: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    """Wait until `done()` is true.

    Tests use this function to wait for released resources, because a driver may run the destructors
    of user objects late, on its own thread.
    """
    end = time.monotonic() + limit_s
    while not done():
        assert time.monotonic() < end, (
            f"{native.live_records()} records live, {native.released_records()} released, "
            f"{native.live_resources()} handles"
        )
        time.sleep(0.001)


class Step:
    """A weakly referenceable callable that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> None:
        self.calls += 1


def wait_until_freed() -> int:
    """Wait until all resources of earlier tests are freed; return how many records are released.

    The reaper destroys dropped graphs. The driver may run the destructors of their user objects
    late, on its own thread. These destructors pass the records of host work to the reaper again.
    This function therefore drops one more graph, which keeps a token object alive. When the token
    is released, the resources that were dropped before it are released too.
    """
    gc.collect()
    if is_context_retained():
        for _ in range(2):
            assert _native.flush(LIMIT_S)
            token = Step()
            watch = weakref.ref(token)
            graph = int(call(cu.cuGraphCreate, 0))
            assert _native.attach_keep(graph, (token,))[0] == 0
            del token
            call(cu.cuGraphDestroy, graph)
            wait_until(lambda watch=watch: watch() is None)
        assert _native.flush(LIMIT_S)
    return native.released_records()


def wait_for_records(count: int) -> None:
    """Wait until `count` records of host work are released."""
    wait_until(lambda: native.released_records() >= count)


def resident_kib() -> int:
    """Return the resident memory of this process in KiB."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


def mailbox_graph(device: Device, transport: str, work: object, **options: object):
    """Build a graph of one mailbox, whose output is copied to the device.

    Returns
    -------
    (GraphExec, DeviceArray)
        Executable, and the device array that the mailbox's output is copied to.
    """
    graph = Graph(device, "one mailbox")
    output = device.pinned((4,), "int32")
    result = device.zeros((4,), "int32")
    lane = graph.lane("main")
    getattr(lane, transport)(work, output=output, name="answer", **options)
    lane.copy(result, output)
    return graph.instantiate(), result


def replay_in_time(run: GraphExec, stream: Stream) -> None:
    """Replay until an answer meets its deadline; the first ones may miss it on a busy machine."""
    for _ in range(200):
        try:
            replay(run, stream)
            return
        except HostWorkError:
            run.clear(LIMIT_S)
    raise AssertionError("the worker missed its deadline in 200 replays")


def run_python(code: str, *arguments: str, **environment: str) -> Finished:
    """Run code in a new process."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
    )


def run_program(code: str, *arguments: str, **environment: str) -> Finished:
    """Run PRELUDE (imports, a device and a stream) and then the code, in a forked process."""
    return run_forked(PRELUDE + code, *arguments, env={**os.environ, **environment})


def compile_library(source: str, folder: Path, name: str = "work.so") -> Path:
    """Build a shared library from C++ source; skip the test if there is no compiler."""
    (folder / "work.cpp").write_text(source)
    command = [
        os.environ.get("CXX", "c++"),
        "-shared",
        "-fPIC",
        f"-Wl,-soname,{name}",
        "-o",
        str(folder / name),
        str(folder / "work.cpp"),
    ]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip(f"no C++ compiler ({command[0]})")
    return folder / name


class ForeignCapture:
    """A graph that is captured and launched by direct driver calls, as another library would do."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def begin(self) -> None:
        call(cu.cuStreamBeginCapture, self.stream.handle, THREAD_LOCAL)

    def end(self, runs: bool = True) -> None:
        self.graph = call(cu.cuStreamEndCapture, self.stream.handle)
        self.exec = call(cu.cuGraphInstantiate, self.graph, 0) if runs else None

    def launch(self, times: int = 1, wait: bool = True) -> None:
        for _ in range(times):
            call(cu.cuGraphLaunch, self.exec, self.stream.handle)
        if wait:
            call(cu.cuStreamSynchronize, self.stream.handle)

    def drop(self) -> None:
        if self.exec is not None:
            call(cu.cuGraphExecDestroy, self.exec)
        call(cu.cuGraphDestroy, self.graph)


class Semaphore:
    """A libc semaphore, used to count calls of native work."""

    def __init__(self) -> None:
        self.libc = ctypes.PyDLL(None)  # calls through PyDLL keep the GIL
        self.memory = ctypes.create_string_buffer(64)
        assert self.libc.sem_init(self.memory, 0, 0) == 0

    def work(self, keep: object = None) -> NativeWork:
        """Return native work that increments the count."""
        post = ctypes.cast(self.libc.sem_post, ctypes.c_void_p).value or 0
        return NativeWork(post, ctypes.addressof(self.memory), keep=(self.memory, keep))

    @property
    def value(self) -> int:
        out = ctypes.c_int()
        assert self.libc.sem_getvalue(self.memory, ctypes.byref(out)) == 0
        return out.value
