"""What host work in one stream costs another: a neighbour's kernels beside each arm."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from graft.cudagraph.graph import Graph
from graft.cudagraph.lanes import StreamLane
from graft.tools.latency_arms import KERNELS, LIMIT_S, Arm

if TYPE_CHECKING:
    from graft.cudagraph.device import Device

__all__ = ["Neighbour", "clock_tick_ns", "harm"]

KERNEL_COUNT, BLOCKS, THREADS, ROUNDS = 64, 8, 128, 200


class Neighbour:
    """A graph of computing kernels on a stream of its own, timed by the device's clock."""

    def __init__(self, device: Device) -> None:
        self.stream = device.stream("neighbour")
        self.stamps = device.pinned((2,), "uint64")
        self._out = device.zeros((BLOCKS * THREADS,), "float32")
        module = device.load(KERNELS)
        self._graph = Graph(device, "neighbour")
        lane = self._graph.lane("main")
        lane.kernel(module["stamp_ns"], 1, 1, (self.stamps, 0), name="before")
        for i in range(KERNEL_COUNT):
            lane.kernel(module["churn"], BLOCKS, THREADS, (self._out, ROUNDS), name=f"churn {i}")
        lane.kernel(module["stamp_ns"], 1, 1, (self.stamps, 1), name="after")
        self._run = self._graph.instantiate()

    def beside(self, arm: Arm | None) -> int:
        """Nanoseconds the kernels took while ``arm`` replayed again and again, or alone."""
        if arm is not None:
            arm.prepare()
        self._run.launch(self.stream)
        while arm is not None and not self.stream.query():
            arm.called.clear()
            arm.run()
        self._run.synchronize(timeout_s=LIMIT_S)
        return int(self.stamps.array[1]) - int(self.stamps.array[0])

    def close(self) -> None:
        """Drop graph, stream and memory."""
        self._run.close()
        self._graph.close()
        self.stream.close()
        self.stamps.close()
        self._out.close()


def harm(device: Device, arms: Sequence[Arm], repeats: int, rng: random.Random
         ) -> list[dict[str, Any]]:
    """Time the neighbour beside every arm and alone, in a new random order each time.

    Returns
    -------
    list of dict
        ``transport``, ``neighbour_us`` (median) and ``of_alone`` (its ratio to the neighbour's time
        with nothing beside it); the first is "alone".
    """
    neighbour = Neighbour(device)
    named: dict[str, Arm | None] = {"alone": None, **{arm.name: arm for arm in arms}}
    took: dict[str, list[int]] = {name: [] for name in named}
    order = list(named)
    try:
        for _ in range(repeats + 1):
            rng.shuffle(order)
            for name in order:
                took[name].append(neighbour.beside(named[name]))
    finally:
        neighbour.close()
    medians = {name: float(np.median(times[1:])) for name, times in took.items()}
    return [{"transport": name, "neighbour_us": median / 1000.0,
             "of_alone": median / medians["alone"]} for name, median in medians.items()]


def clock_tick_ns(device: Device) -> int:
    """Smallest step of the device's clock that 64 steps showed, in nanoseconds."""
    stream, found = device.stream("tick"), device.pinned((1,), "uint64")
    kernel = device.load(KERNELS)["clock_tick_ns"]
    StreamLane(stream).kernel(kernel, 1, 1, (found, 64))
    stream.synchronize()
    tick = int(found.array[0])
    stream.close()
    found.close()
    return tick
