"""What the sections share: figures, timed graphs, random arrays, and the shapes measured."""

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
from graft.cudagraph.memory import DeviceArray, PinnedArray

KERNELS = Path(__file__).parent / "kernels" / "probe.cu"
LIMIT_S = 60.0
LAUNCHES = 7
#: An 8B Llama, and something that a CPU can run.
FULL = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
}
SMALL = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 3,
    "vocab_size": 2048,
}
Range = tuple[float, float] | None


class Timed:
    """A lane that notes which kernels are added to it, and then what its graph took."""

    def __init__(self, lane: Any) -> None:
        self._lane = lane
        self._kernels = dict[str, None]()
        self.seconds = 0.0

    def kernel(self, kernel: Any, *args: Any, **options: Any) -> None:
        """Add it."""
        self._kernels[kernel.name] = None
        self._lane.kernel(kernel, *args, **options)

    @property
    def kernels(self) -> str:
        """Their names."""
        return ", ".join(self._kernels)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lane, name)


class Bench:
    """One section's device and its figures, each of which is a line of ``out`` at once."""

    def __init__(self, out: Path, small: bool) -> None:
        self.device = open_device()
        self.small = small
        self._out = out
        self.stream = self.device.stream("gpu first")
        self.shape = SMALL if small else FULL
        self.kernels = self.device.load(KERNELS)
        self.sink = self.device.zeros((1,), "uint32")
        # Copies of what is read in turns are more than this, so that no cache holds them.
        self.cached = 0 if small else 4 * self.device.attribute("L2_CACHE_SIZE")

    def add(
        self, what: str, measured: float | None, unit: str, predicted: Range = None, note: str = ""
    ) -> None:
        """Write a figure down."""
        line = {
            "what": what,
            "measured": measured,
            "unit": unit,
            "note": note,
            "predicted": None if self.small else predicted,
        }
        with self._out.open("a") as file:
            file.write(json.dumps(line) + "\n")

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """What graft refuses within becomes a figure without a value."""
        try:
            yield
        except GraftError as error:
            self.add(what, None, "", note=f"refused: {error}")

    @contextmanager
    def timed(self, programmatic: bool = False) -> Iterator[Any]:
        """Replay what is added to a lane within, and give it the median's ``seconds``."""
        graph = Graph(self.device, "measured", programmatic=programmatic)
        lane = Timed(graph.lane("main"))
        yield lane
        run = graph.instantiate()
        times = list[float]()
        run.upload(self.stream)
        begin, end = (self.device.event(name, timing=True) for name in ("begin", "end"))
        for _ in range(1 + LAUNCHES):
            begin.record(self.stream)
            run.launch(self.stream)
            end.record(self.stream)
            run.synchronize(LIMIT_S)
            end.synchronize(LIMIT_S)
            times.append(end.elapsed_s(begin))
        run.close()
        lane.seconds = statistics.median(times[1:])

    def random(
        self, shape: tuple[int, ...], scale: float = 1.0, dtype: str = "bfloat16"
    ) -> DeviceArray:
        """bfloat16 made on the device; or what its bits are in another dtype."""
        array = self.device.empty(shape, dtype)
        fill_random(self.device, array, scale)
        return array

    def read(self, lane: Any, data: DeviceArray | PinnedArray, blocks: int) -> None:
        """Add a kernel that reads all of an array."""
        lane.kernel(self.kernels["read_words"], blocks, 256, [data, data.nbytes // 16, self.sink])

    def read_ceiling(self) -> float:
        """Bytes a second that kernels can read, by the best of some grids."""
        data = self.random((1 << (31 - 12 * self.small),))
        best = 0.0
        for blocks in (4, 8, 16):
            with self.timed() as lane:
                self.read(lane, data, blocks * self.device.multiprocessor_count)
            best = max(best, data.nbytes / lane.seconds)
        return best


def fill_random(device: Any, array: DeviceArray, scale: float) -> None:
    """Fill a bfloat16 array, and wait."""
    from graft.cudagraph.lanes import StreamLane

    stream = device.stream("random")
    count = array.nbytes // 2
    StreamLane(stream).kernel(
        device.load(KERNELS)["fill_random"], min(-(-count // 256), 4096), 256, [array, count, scale]
    )
    stream.synchronize(LIMIT_S)
