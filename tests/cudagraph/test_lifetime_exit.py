"""The interpreter ends with replays in flight: no crash, no hang, no noise."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import time
from graft.cudagraph.device import open_device
from graft.cudagraph.graph import Graph
from graft.cudagraph.hostwork import hostfunc
device = open_device()
stream = device.stream()
data = device.zeros((1024,), "int32")
graph = Graph(device, "leaving")
lane = graph.lane("main")
event = device.event()
lane.wait_event(event)
for _ in range(20):
    lane.mailbox(lambda: time.sleep(0.0005))
    lane.host(lambda: time.sleep(0.001))
    lane.fill(data)
lane.record_event(event)
lane.if_(graph.condition(1)).lane("inside").fill(data)
executable = graph.instantiate()
for _ in range(50):
    executable.launch(stream)
hostfunc(stream, print, "never or later")
{ending}
"""


@pytest.mark.parametrize("ending", ["", "raise SystemExit(3)", "del executable, graph, lane, data"])
def test_the_process_ends_with_replays_in_flight(ending: str) -> None:
    """Whatever is dropped first, the exit code is the script's and nothing is printed."""
    command = [sys.executable, "-c", SCRIPT.format(ending=ending)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == (3 if "SystemExit" in ending else 0), done.stderr
    assert done.stderr == ""
