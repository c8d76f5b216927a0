"""How long a replayed graph waits for host work: kernel, host step, kernel, by the device's clock.

Each transport runs an empty body between two kernels that stamp the device's time; the same graph
without a host step is the floor. Mailbox and spinning kernel are answered by one worker, which
spins where 4 cores are usable and otherwise sleeps 50 us between looks. "idle": no other Python
code runs. "busy": another thread runs Python bytecode, so a Python body has to wait for the GIL.
Usage::

    python -m graft.tools.callback_latency [--samples 1000] [--json build/callback_latency.json]
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from graft.cudagraph.device import Device, open_device
from graft.cudagraph.errors import GraftError
from graft.cudagraph.graph import Graph
from graft.cudagraph.hostwork import NativeWork, PythonWork

KERNELS = Path(__file__).parent / "kernels" / "clock.cu"
TRANSPORTS = ("none", "native", "mailbox", "spinkernel", "python")
WARM_UP = 20
QUANTILES = {"min": 0.0, "p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


def empty_work(transport: str) -> NativeWork | PythonWork:
    """Host work that does nothing, by either transport."""
    if transport == "python":
        return PythonWork(lambda: None)
    # free(NULL) is a C function of the right type that does nothing.
    address = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p).value or 0
    return NativeWork(address, 0, name="free(NULL)")


def measure(device: Device, transport: str, samples: int) -> np.ndarray:
    """Nanoseconds from the kernel before the host step to the kernel after it, per replay."""
    stamp = device.load(KERNELS)["stamp_ns"]
    stamps = device.pinned((2,), "uint64")
    stream = device.stream(f"latency {transport}")
    graph = Graph(device, f"latency {transport}")
    lane = graph.lane("main")
    lane.kernel(stamp, 1, 1, (stamps, 0), name="before")
    if transport in ("mailbox", "spinkernel"):
        add = lane.mailbox if transport == "mailbox" else lane.spin
        add(empty_work(transport), name="host work")
    elif transport != "none":
        lane.host(empty_work(transport), name="host work")
    lane.kernel(stamp, 1, 1, (stamps, 1), name="after")
    run = graph.instantiate()
    run.upload(stream)
    taken = np.empty(samples, np.int64)
    for i in range(-WARM_UP, samples):
        run.launch(stream)
        run.synchronize(timeout_s=60.0)
        if i >= 0:
            taken[i] = int(stamps.array[1]) - int(stamps.array[0])
    run.close()
    graph.close()
    stamps.close()
    stream.close()
    return taken


@contextmanager
def busy_python(busy: bool) -> Iterator[None]:
    """While open, another thread runs Python bytecode all the time, if asked to."""
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            sum(range(200))

    hog = threading.Thread(target=spin, name="busy Python")
    if busy:
        hog.start()
    try:
        yield
    finally:
        stop.set()
        if busy:
            hog.join()


def quantiles(nanoseconds: np.ndarray) -> dict[str, float]:
    """Order statistics in microseconds; none is interpolated."""
    ordered = np.sort(nanoseconds) / 1000.0
    last = len(ordered) - 1
    return {name: float(ordered[round(q * last)]) for name, q in QUANTILES.items()}


def measure_all(device: Device, samples: int) -> dict[str, Any]:
    """Every transport, idle and busy, with what a reader needs to judge the figures."""
    cells = []
    for busy in (False, True):
        for transport in TRANSPORTS:
            with busy_python(busy):
                taken = measure(device, transport, samples)
            cells.append({"transport": transport, "python": "busy" if busy else "idle",
                          "samples": samples, "us": quantiles(taken)})
    return {"device": device.describe(), "kind": device.kind, "cores": os.cpu_count(),
            "python": platform.python_version(),
            "switch_interval_us": sys.getswitchinterval() * 1e6, "cells": cells}


def table(result: dict[str, Any]) -> str:
    """The figures as lines of text."""
    lines = [f"device: {result['device']}",
             f"{'transport':<12}{'python':<7}" + "".join(f"{q:>10}" for q in QUANTILES) + "  us"]
    for cell in result["cells"]:
        figures = "".join(f"{cell['us'][q]:>10.1f}" for q in QUANTILES)
        lines.append(f"{cell['transport']:<12}{cell['python']:<7}{figures}")
    if result["kind"] == "soft":
        lines.append("these are times of the soft device, a CPU; a GPU's are not these")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table and write the JSON."""
    parser = argparse.ArgumentParser(description="Latency of host work in a replayed graph.")
    parser.add_argument("--samples", type=int, default=1000, help="replays per cell")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args(arguments)
    if options.samples < 1:
        parser.error("--samples must be at least 1")
    try:
        result = measure_all(open_device(), options.samples)
    except GraftError as error:
        print(f"graft: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print(table(result))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
