"""Which driver calls wait for a running host function, or for a pending mailbox wait.

A native host function that never takes the GIL waits on a semaphore, called by the driver in a
host node or by a mailbox worker whose answer the device waits for. Meanwhile one driver call is
made, on the same stream or on another. The semaphore is posted when the call has returned, or when
it has not after 200 ms: then the call waits for host work. Each measurement is a child process
with a limit, so that a call that never returns costs one row.
Usage::

    python -m graft.tools.driver_waits [--calls cuMemAlloc ...] [--json build/driver_waits.json]

What a call that waits means: whoever makes it while holding the GIL, and while a host function
wants the GIL, hangs.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from graft.cudagraph.compiler import cache_folder
from graft.cudagraph.device import Device, open_device
from graft.cudagraph.driver import call, cu
from graft.cudagraph.errors import GraftError
from graft.cudagraph.graph import Graph
from graft.cudagraph.hostwork import NativeWork

if TYPE_CHECKING:
    from graft.cudagraph.streams import Stream

__all__ = ["CALLS", "SITUATIONS", "main", "measure", "table"]

HOLD_S = 0.2
LIMIT_S = 120.0
#: What is going on while a call is timed.
SITUATIONS = ("host function", "mailbox wait")
STREAMS = ("same", "other")
PTX = b"""
.version 7.0
.target sm_52
.address_size 64
.visible .entry nothing() { ret; }
\0"""
Timed = Callable[[], object]


def _image(device: Device) -> bytes:
    if device.kind != "soft":
        return PTX
    from graft.native.softcuda.compile import compile_cpu

    image: bytes = compile_cpu('extern "C" __global__ void nothing() {}', "nothing.cu",
                               cache_dir=cache_folder() / "soft")
    return image


def _launch(device: Device, stream: Stream, *, load: bool) -> Timed:
    module = call(cu.cuModuleLoadData, _image(device))
    function = call(cu.cuModuleGetFunction, module, b"nothing")

    def launch() -> None:
        call(cu.cuLaunchKernel, function, 1, 1, 1, 1, 1, 1, 0, stream.handle, 0, 0)

    if load:
        launch()
        stream.synchronize()
    return launch


def _empty_graph() -> Any:
    graph = call(cu.cuGraphCreate, 0)
    call(cu.cuGraphAddEmptyNode, graph, None, 0)
    return graph


def _graph_launch(device: Device, stream: Stream) -> Timed:
    run = call(cu.cuGraphInstantiate, _empty_graph(), 0)
    call(cu.cuGraphUpload, run, stream.handle)
    stream.synchronize()
    return lambda: call(cu.cuGraphLaunch, run, stream.handle)


def _prepared(make: Callable[[Device, Stream], Any], use: Callable[[Any, Stream], object]
              ) -> Callable[[Device, Stream], Timed]:
    """A timed call that uses what was made before."""

    def prepare(device: Device, stream: Stream) -> Timed:
        made = make(device, stream)
        return lambda: use(made, stream)

    return prepare


def _pair(device: Device, stream: Stream) -> tuple[Any, Any]:
    return call(cu.cuMemHostAlloc, 4096, 0), call(cu.cuMemAlloc, 4096)


def _nothing(device: Device, stream: Stream) -> None:
    return None


#: Name of a call -> what makes it ready to be timed. The stream is the one it is to use.
CALLS: dict[str, Callable[[Device, Stream], Timed]] = {
    "cuMemAlloc": _prepared(_nothing, lambda _, s: call(cu.cuMemAlloc, 4096)),
    "cuMemFree": _prepared(lambda d, s: call(cu.cuMemAlloc, 4096),
                           lambda p, s: call(cu.cuMemFree, p)),
    "cuMemHostAlloc": _prepared(_nothing, lambda _, s: call(cu.cuMemHostAlloc, 4096, 0)),
    "cuMemFreeHost": _prepared(lambda d, s: call(cu.cuMemHostAlloc, 4096, 0),
                               lambda p, s: call(cu.cuMemFreeHost, p)),
    "cuMemcpyHtoD": _prepared(_pair, lambda p, s: call(cu.cuMemcpyHtoD, p[1], p[0], 4096)),
    "cuMemcpyHtoDAsync": _prepared(
        _pair, lambda p, s: call(cu.cuMemcpyHtoDAsync, p[1], p[0], 4096, s.handle)),
    "cuMemsetD8Async": _prepared(
        _pair, lambda p, s: call(cu.cuMemsetD8Async, p[1], 0, 4096, s.handle)),
    "cuModuleLoadData": _prepared(lambda d, s: _image(d),
                                  lambda image, s: call(cu.cuModuleLoadData, image)),
    "cuModuleUnload": _prepared(lambda d, s: call(cu.cuModuleLoadData, _image(d)),
                                lambda module, s: call(cu.cuModuleUnload, module)),
    "cuLaunchKernel (first)": lambda d, s: _launch(d, s, load=False),
    "cuLaunchKernel": lambda d, s: _launch(d, s, load=True),
    "cuStreamCreate": _prepared(_nothing, lambda _, s: call(cu.cuStreamCreate, 1)),
    "cuStreamDestroy": _prepared(lambda d, s: call(cu.cuStreamCreate, 1),
                                 lambda made, s: call(cu.cuStreamDestroy, made)),
    "cuStreamQuery": _prepared(_nothing, lambda _, s: s.query()),
    "cuEventCreate": _prepared(_nothing, lambda _, s: call(cu.cuEventCreate, 0)),
    "cuEventRecord": _prepared(lambda d, s: call(cu.cuEventCreate, 0),
                               lambda e, s: call(cu.cuEventRecord, e, s.handle)),
    "cuEventDestroy": _prepared(lambda d, s: call(cu.cuEventCreate, 0),
                                lambda e, s: call(cu.cuEventDestroy, e)),
    "cuGraphInstantiate": _prepared(lambda d, s: _empty_graph(),
                                    lambda graph, s: call(cu.cuGraphInstantiate, graph, 0)),
    "cuGraphLaunch": _graph_launch,
    "cuGraphExecDestroy": _prepared(lambda d, s: call(cu.cuGraphInstantiate, _empty_graph(), 0),
                                    lambda run, s: call(cu.cuGraphExecDestroy, run)),
    "cuGraphDestroy": _prepared(lambda d, s: _empty_graph(),
                                lambda graph, s: call(cu.cuGraphDestroy, graph)),
    "cuCtxSynchronize": _prepared(_nothing, lambda _, s: call(cu.cuCtxSynchronize)),
}


def _child(name: str, situation: str, place: str, hold_s: float) -> tuple[float, bool]:
    """Make one call while host work is held: its seconds, and whether it waited."""
    device = open_device()
    stream, other = device.stream("host work"), device.stream("other")
    timed = CALLS[name](device, stream if place == "same" else other)
    libc = ctypes.CDLL(None)
    begun, gate = (ctypes.create_string_buffer(64) for _ in range(2))  # two sem_t
    for semaphore in (begun, gate):
        libc.sem_init(semaphore, 0, 0)
    graph = Graph(device, "held")
    lane = graph.lane("main")
    add = lane.host if situation == "host function" else lane.mailbox
    post, wait = (ctypes.cast(function, ctypes.c_void_p).value or 0
                  for function in (libc.sem_post, libc.sem_wait))
    lane.host(NativeWork(post, ctypes.addressof(begun), name="sem_post"), name="begun")
    add(NativeWork(wait, ctypes.addressof(gate), name="sem_wait"), name="held")
    run = graph.instantiate()
    run.upload(stream)
    stream.synchronize()
    returned = threading.Event()
    waited: list[bool] = []

    def release() -> None:
        waited.append(not returned.wait(hold_s))
        libc.sem_post(gate)

    run.launch(stream)
    libc.sem_wait(begun)
    time.sleep(0.01)  # the held step is next: let it begin
    releaser = threading.Thread(target=release)
    releaser.start()
    start = time.monotonic()
    timed()  # the binding lets the GIL go, so the releaser can run
    took = time.monotonic() - start
    returned.set()
    releaser.join()
    run.synchronize(timeout_s=LIMIT_S)
    return took, waited[0]


def measure(names: Sequence[str], situations: Sequence[str] = SITUATIONS,
            streams: Sequence[str] = STREAMS, hold_s: float = HOLD_S) -> list[dict[str, Any]]:
    """Make every call in every situation, each in a child process.

    Host work is held for ``hold_s`` seconds, or until the call has returned.

    Returns
    -------
    list of dict
        ``call``, ``situation``, ``stream``, ``seconds`` (None where the child failed), ``waits``
        (None likewise), ``error``.
    """
    rows: list[dict[str, Any]] = []
    cells = [(n, s, p) for n in names for s in situations for p in streams]
    for name, situation, place in tqdm(cells, desc="calls", unit="call", disable=None):
        command = [sys.executable, "-m", "graft.tools.driver_waits", "--child",
                   name, situation, place, str(hold_s)]
        row: dict[str, Any] = {"call": name, "situation": situation, "stream": place,
                               "seconds": None, "waits": None, "error": ""}
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            row["error"] = f"did not return within {LIMIT_S:.0f} s"
        else:
            if done.returncode == 0:
                row["seconds"], row["waits"] = json.loads(done.stdout.splitlines()[-1])
            else:
                row["error"] = (done.stderr.strip().splitlines() or ["died"])[-1]
        rows.append(row)
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """One line a call: what it did in each situation, in milliseconds."""
    columns = list(dict.fromkeys((row["situation"], row["stream"]) for row in rows))
    lines = [f"{'':<24}" + "".join(f"{f'{s}, {p} stream':>28}" for s, p in columns)]
    for name in dict.fromkeys(row["call"] for row in rows):
        cells = []
        for column in columns:
            row = next(r for r in rows if (r["call"], r["situation"], r["stream"])
                       == (name, *column))
            cells.append(row["error"][:26] if row["seconds"] is None else
                         f"{'waits' if row['waits'] else 'returns'} {row['seconds'] * 1e3:9.2f} ms")
        lines.append(f"{name:<24}" + "".join(f"{cell:>28}" for cell in cells))
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table and write JSON."""
    parser = argparse.ArgumentParser(description="Which driver calls wait for host work.")
    parser.add_argument("--calls", nargs="+", choices=list(CALLS), default=list(CALLS),
                        metavar="CALL")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        if options.child:
            name, situation, place, hold_s = options.child
            print(json.dumps(_child(name, situation, place, float(hold_s))))
            return 0
        device = open_device()
        rows = measure(options.calls)
    except GraftError as error:
        print(f"graft: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print(f"device: {device.describe()}\n{table(rows)}")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        result = {"device": device.describe(), "kind": device.kind, "hold_s": HOLD_S,
                  "driver": int(call(cu.cuDriverGetVersion)), "date": time.strftime("%Y-%m-%d"),
                  "python": platform.python_version(), "calls": rows}
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
