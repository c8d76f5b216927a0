"""Common parts of the measurement's sections: output of values, timed graphs and random arrays."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from graft.cudagraph.device import open_device
from graft.cudagraph.errors import GraftError
from graft.cudagraph.graph import Graph
from graft.cudagraph.lanes import StreamLane
from graft.cudagraph.memory import DeviceArray, PinnedArray

PROBE_KERNELS = Path(__file__).parent / "kernels" / "probe.cu"
#: Maximum time in seconds of a wait for the device.
LIMIT_S = 60.0
#: Number of timed launches of a graph.
LAUNCHES = 7
#: Config values of an 8B Llama.
FULL_SHAPE = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
}
#: Config values of a model that the soft device can run.
SMALL_SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 3,
    "vocab_size": 2048,
}
Range = tuple[float, float] | None


class TimedLane:
    """A graph lane that records the names of its kernels and the duration of its graph.

    A lane is an in-order sequence of graph nodes.

    Attributes
    ----------
    seconds
        Median duration of a replay in seconds. `Bench.timed_graph` sets it when its block ends.
    """

    def __init__(self, lane: Any) -> None:
        self._lane = lane
        self._kernels: dict[str, None] = {}
        self.seconds = 0.0

    def kernel(self, kernel: Any, *args: Any, **options: Any) -> None:
        """Add a kernel node and record the kernel's name."""
        self._kernels[kernel.name] = None
        self._lane.kernel(kernel, *args, **options)

    @property
    def kernels(self) -> str:
        """Names of the kernels in the order of their first use."""
        return ", ".join(self._kernels)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lane, name)


class Bench:
    """Device and output file of one section.

    Parameters
    ----------
    out
        File to which each measured value is appended as a line of JSON.
    small
        Whether to use sizes that the soft device can run.

    Attributes
    ----------
    shape
        Config values of the model.
    cache_bytes
        Minimum total size in bytes of arrays that are read in rotation. With this size, no array is
        still in the L2 cache when it is read again.
    """

    def __init__(self, out: Path, small: bool) -> None:
        self.device = open_device()
        self.small = small
        self.stream = self.device.stream("gpu first")
        self.shape = SMALL_SHAPE if small else FULL_SHAPE
        self.kernels = self.device.load(PROBE_KERNELS)
        self.cache_bytes = 0 if small else 4 * self.device.attribute("L2_CACHE_SIZE")
        self._sink = self.device.zeros((1,), "uint32")
        self._out = out

    def add(
        self,
        name: str,
        measured: float | None,
        unit: str,
        predicted: Range = None,
        note: str = "",
    ) -> None:
        """Append a measured value to the output file.

        Parameters
        ----------
        name
            Name of the value in the table.
        measured
            Measured value; None if it could not be measured.
        unit
            Unit of the value and the prediction.
        predicted
            Predicted range (low, high). It is ignored for small sizes.
        note
            Text of the last column of the table.
        """
        figure = {
            "name": name,
            "measured": measured,
            "unit": unit,
            "note": note,
            "predicted": None if self.small else predicted,
        }
        with self._out.open("a") as file:
            file.write(json.dumps(figure) + "\n")

    @contextmanager
    def report_refusal(self, name: str) -> Iterator[None]:
        """Catch a graft error in the block, and record its message in place of a value."""
        try:
            yield
        except GraftError as error:
            self.add(name, None, "", note=f"refused: {error}")

    @contextmanager
    def timed_graph(self, programmatic: bool = False) -> Iterator[Any]:
        """Yield a `TimedLane` to which the block adds nodes, and time the graph afterwards.

        When the block ends, the graph is replayed several times, and the lane's ``seconds`` are set
        to the median duration of these replays except the first.

        Parameters
        ----------
        programmatic
            Whether kernels are connected by programmatic edges.
        """
        graph = Graph(self.device, "measured", programmatic=programmatic)
        lane = TimedLane(graph.lane("main"))
        yield lane
        executable = graph.instantiate()
        executable.upload(self.stream)
        begin = self.device.event("begin", timing=True)
        end = self.device.event("end", timing=True)
        times: list[float] = []
        for _ in range(1 + LAUNCHES):
            begin.record(self.stream)
            executable.launch(self.stream)
            end.record(self.stream)
            executable.synchronize(LIMIT_S)
            end.synchronize(LIMIT_S)
            times.append(end.elapsed_s(begin))
        executable.close()
        lane.seconds = statistics.median(times[1:])

    def random(
        self, shape: tuple[int, ...], scale: float = 1.0, dtype: str = "bfloat16"
    ) -> DeviceArray:
        """Return an array of random bfloat16 values between -scale and scale.

        If `dtype` is not bfloat16, the bits of these values are reinterpreted as that dtype.
        """
        array = self.device.empty(shape, dtype)
        fill_random(self.device, array, scale)
        return array

    def read(self, lane: Any, data: DeviceArray | PinnedArray, blocks: int) -> None:
        """Add a kernel that reads an array; the grid has the given number of thread blocks."""
        lane.kernel(
            self.kernels["read_words"],
            blocks,
            256,
            [data, data.nbytes // 16, self._sink],
        )

    def read_bandwidth(self) -> float:
        """Measure the read bandwidth in bytes per second, with the best of several grid sizes."""
        elements = 1 << (19 if self.small else 31)
        data = self.random((elements,))
        best = 0.0
        for blocks_per_multiprocessor in (4, 8, 16):
            blocks = blocks_per_multiprocessor * self.device.multiprocessor_count
            with self.timed_graph() as lane:
                self.read(lane, data, blocks)
            best = max(best, data.nbytes / lane.seconds)
        return best


def fill_random(device: Any, array: DeviceArray, scale: float) -> None:
    """Fill an array with random bfloat16 values between -scale and scale, and synchronize."""
    stream = device.stream("random")
    count = array.nbytes // 2
    kernel = device.load(PROBE_KERNELS)["fill_random"]
    blocks = min(-(-count // 256), 4096)
    StreamLane(stream).kernel(
        kernel,
        blocks,
        256,
        [array, count, scale],
    )
    stream.synchronize(LIMIT_S)
