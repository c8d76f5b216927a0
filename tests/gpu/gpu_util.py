"""Helpers of the tests that check and measure a GPU: timed graphs and random arrays."""

import itertools
import statistics
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from graft.cudagraph import Graph, StreamLane
from graft.cudagraph.driver.dtypes import E4M3
from graft.cudagraph.streams import Event

PROBE = Path(__file__).parent / "kernels" / "probe.cu"
#: Time limit of a wait for the device.
LIMIT_S = 8.0
#: Number of timed launches of a graph.
LAUNCHES = 7
_seeds = itertools.count(1)


def launch_times(executable, stream, launches=LAUNCHES):
    """Return the duration of each launch in seconds, after a launch that is not timed."""
    begin = Event("begin", timing=True)
    end = Event("end", timing=True)
    times = []
    for _ in range(1 + launches):
        begin.record(stream)
        executable.launch(stream)
        end.record(stream)
        executable.synchronize(LIMIT_S)
        end.synchronize(LIMIT_S)
        times.append(end.elapsed_s(begin))
    return times[1:]


@contextmanager
def timed_graph(device, stream, programmatic=False):
    """Yield an object with the graph and a lane to fill; set its `seconds` to the median time."""
    graph = Graph(device, "measured", programmatic=programmatic)
    timed = SimpleNamespace(graph=graph, lane=graph.lane("main"), seconds=0.0)
    yield timed
    executable = graph.instantiate()
    executable.upload(stream)
    timed.seconds = statistics.median(launch_times(executable, stream))
    executable.close()


def random_array(device, shape, dtype="bfloat16", scale=1.0):
    """Return an array of random values between -scale and scale, generated on the device.

    E4M3 values have magnitudes below 2.
    """
    array = device.empty(shape, dtype)
    stream = device.stream("random")
    kernels = device.load(PROBE)
    if dtype == E4M3:
        args = [array, array.nbytes, next(_seeds)]
        kernel = kernels["fill_random_e4m3"]
    elif dtype == "bfloat16":
        args = [array, array.nbytes // 2, scale, next(_seeds)]
        kernel = kernels["fill_random"]
    else:
        values = np.random.default_rng(next(_seeds)).standard_normal(shape, np.float32)
        return device.from_host(scale * values)
    StreamLane(stream).kernel(kernel, min(-(-args[1] // 256), 4096), 256, args)
    stream.synchronize(LIMIT_S)
    stream.close()
    return array
