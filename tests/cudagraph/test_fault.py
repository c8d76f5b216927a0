"""A context fault during a replay."""

from __future__ import annotations

import subprocess
import sys

import pytest

from graft.cudagraph.device import Device

SCRIPT = r"""
from graft.cudagraph.device import open_device
from graft.cudagraph.errors import DeviceError
from graft.cudagraph.graph import Graph
from graft.cudagraph.kernels import load_text
device = open_device()
stream = device.stream()
kernel = load_text(device, '''
extern "C" __global__ void stray(int* data, long long offset) { data[offset] = 1; }
''', "stray.cu")["stray"]
data = device.zeros((4,), "int32")
ran = []
graph = Graph(device, "faulty")
lane = graph.lane("main")
lane.host(lambda: ran.append("before"))
lane.kernel(kernel, 1, 1, [data, 1 << 40])
lane.host(lambda: ran.append("after"))
executable = graph.instantiate()
raised = []
try:
    executable.launch(stream)  # the fault may come before the call has returned
    executable.synchronize(60)
except DeviceError as error:
    raised.append(error.code)
    print("typed:", error.code_name)
print("ran:", *ran)
try:
    executable.launch(stream)
except DeviceError as error:
    raised.append(error.code)
executable.close()
graph.close()
data.close()
print("raised:", len(set(raised)), len(raised))
"""


@pytest.mark.parametrize("ending", ["", "del executable, graph, lane, kernel, data, stream"])
def test_a_fault_is_typed_and_the_process_ends(device: Device, ending: str) -> None:
    """The wait raises one typed error; later host steps do not run; closing and exit are quiet."""
    command = [sys.executable, "-c", SCRIPT + ending]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "typed: CUDA_ERROR_ILLEGAL_ADDRESS"
    assert lines[1:] == ["ran: before", "raised: 1 2"] and done.stderr == ""
