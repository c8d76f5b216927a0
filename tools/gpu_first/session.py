"""The class `Session`, which all sections use to run cases, report values and time graphs."""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from graft.cudagraph.device import open_device
from graft.cudagraph.driver.dtypes import E4M3
from graft.cudagraph.driver.memory import DeviceArray, PinnedArray
from graft.cudagraph.errors import DeviceError, OptionError
from graft.cudagraph.graph.graph import Graph
from graft.cudagraph.lanes import StreamLane

PROBE_KERNELS = Path(__file__).parent / "kernels" / "probe.cu"
#: Maximum time in seconds of a wait for the device.
LIMIT_S = 20.0
#: Exit status of a section's process after an error that makes the device unusable.
DEVICE_LOST_STATUS = 75
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
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "num_hidden_layers": 3,
    "vocab_size": 2048,
}
Range = tuple[float, float] | None
#: Seeds of random arrays. Each array of a process gets another seed.
_seeds = itertools.count(1)


class TimedLane:
    """A graph lane that records the names of its kernels and the duration of its graph.

    A lane is an in-order sequence of graph nodes. When its block ends, `Session.timed_graph` sets
    `seconds` to the median duration of a replay.
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


class Session:
    """Device and output file of one section.

    Values, and the start and end of each case, are appended to `out` as lines of JSON. With
    `small`, arrays and models have sizes that the soft device can run. The cases in `skip` do not
    run.
    """

    def __init__(self, out: Path, small: bool, skip: Collection[str] = ()) -> None:
        self.device = open_device()
        self.small = small
        self.stream = self.device.stream("gpu first")
        self.shape = SMALL_SHAPE if small else FULL_SHAPE
        self.kernels = self.device.load(PROBE_KERNELS)
        #: Total size in bytes of arrays that are read in rotation. With this size, no array is
        #: still in the L2 cache when it is read again.
        self.cache_bytes = 0 if small else 4 * self.device.attribute("L2_CACHE_SIZE")
        self._sink = self.device.zeros((1,), "uint32")
        self._out = out
        self._skip = skip

    @property
    def folder(self) -> Path:
        """Output folder of the run."""
        return self._out.parent

    @property
    def is_soft(self) -> bool:
        """Whether the device is the soft device."""
        return self.device.kind == "soft"

    def case(self, name: str, run: Callable[..., None], *args: Any) -> None:
        """Call `run(*args)`, a part of the section that may fail without affecting other parts.

        The name of a case is unique in the section. If an option is not supported by the device,
        the case counts as refused. If the device can no longer be used, the process exits with
        `DEVICE_LOST_STATUS`.
        """
        if name in self._skip:
            return
        self._write({"event": "begin", "case": name, "time": time.monotonic()})
        try:
            run(*args)
        except OptionError as error:
            self.add(name, None, "", note=f"refused: {error}")
        except Exception as error:
            self.fail(name, f"{type(error).__name__}: {error}")
            if not self._device_works():
                sys.exit(DEVICE_LOST_STATUS)
        self._write({"event": "end", "case": name})

    def _device_works(self) -> bool:
        try:
            self.device.synchronize()
        except DeviceError:
            return False
        return True

    def _write(self, line: dict[str, Any]) -> None:
        append_line(self._out, line)

    def add(
        self, name: str, measured: float | None, unit: str, predicted: Range = None, note: str = ""
    ) -> None:
        """Append a measured value to the output file; None if it could not be measured.

        `predicted` is a range in the same unit, which is ignored for small sizes. `note` is the
        last column of the table.
        """
        predicted = None if self.small else predicted
        self._write(make_figure(name, measured, unit, predicted, note))

    def check(self, name: str, wrong: int, note: str = "") -> None:
        """Append the result of a check. `wrong` is the number of wrong values, which must be 0."""
        self._write(make_figure(name, wrong, "wrong", (0, 0), note, passed=wrong == 0))

    def fail(self, name: str, why: str) -> None:
        """Append the failure of a case that has no result. `why` is the reason."""
        self._write(failure(name, why))

    @contextmanager
    def timed_graph(self, programmatic: bool = False) -> Iterator[Any]:
        """Yield a `TimedLane` to which the block adds nodes, and time the graph afterwards.

        When the block ends, the graph is replayed several times, and the lane's ``seconds`` are set
        to the median duration of these replays except the first. With `programmatic`, kernels are
        connected by programmatic edges.
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

    def random(self, shape: tuple[int, ...], scale: float = 1.0) -> DeviceArray:
        """Return an array of random bfloat16 values between -scale and scale."""
        array = self.device.empty(shape, "bfloat16")
        fill_random(self.device, array, scale)
        return array

    def random_weight(self, shape: tuple[int, ...], dtype: str, scale: float = 0.02) -> DeviceArray:
        """Return a random matrix without NaN; E4M3 values have magnitudes below 2."""
        if dtype != E4M3:
            return self.random(shape, scale)
        array = self.device.empty(shape, dtype)
        kernel = self.kernels["fill_random_e4m3"]
        blocks = min(-(-array.nbytes // 256), 4096)
        StreamLane(self.stream).kernel(kernel, blocks, 256, [array, array.nbytes, next(_seeds)])
        self.stream.synchronize(LIMIT_S)
        return array

    def random_float32(self, shape: tuple[int, ...], scale: float = 1.0) -> DeviceArray:
        """Return an array of normally distributed float32 values."""
        values = np.random.default_rng(next(_seeds)).standard_normal(shape, np.float32)
        return self.device.from_host(scale * values)

    def read(self, lane: Any, data: DeviceArray | PinnedArray, blocks: int) -> None:
        """Add a kernel that reads an array; the grid has the given number of thread blocks."""
        lane.kernel(self.kernels["read_words"], blocks, 256, [data, data.nbytes // 16, self._sink])

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


def append_line(path: Path, line: dict[str, Any]) -> None:
    """Append a line of JSON to a file."""
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def make_figure(
    name: str,
    measured: float | None,
    unit: str,
    predicted: Range = None,
    note: str = "",
    passed: bool | None = None,
) -> dict[str, Any]:
    """Return a line of a section's output file: a measured value, or the result of a check.

    `passed` is None for a value that is not the result of a check.
    """
    return {
        "event": "figure",
        "name": name,
        "measured": measured,
        "unit": unit,
        "predicted": predicted,
        "note": note,
        "passed": passed,
    }


def failure(name: str, why: str) -> dict[str, Any]:
    """Return the line of a section's output file for a case that failed without a result."""
    return make_figure(name, None, "", note=f"failed: {why}", passed=False)


def fill_random(device: Any, array: DeviceArray, scale: float) -> None:
    """Fill an array with random bfloat16 values between -scale and scale, and synchronize."""
    stream = device.stream("random")
    count = array.nbytes // 2
    kernel = device.load(PROBE_KERNELS)["fill_random"]
    blocks = min(-(-count // 256), 4096)
    StreamLane(stream).kernel(kernel, blocks, 256, [array, count, scale, next(_seeds)])
    stream.synchronize(LIMIT_S)
