"""A fork: the child can do nothing with the device and ends well; the parent goes on."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import os, sys
from graft.cudagraph.device import open_device
from graft.cudagraph.errors import DeviceError
from graft.cudagraph.graph import Graph
device = open_device()
stream = device.stream()
calls = []
graph = Graph(device, "forked")
graph.lane("main").host(lambda: calls.append(1))
graph.lane("main").mailbox(lambda: calls.append(2))
graph.lane("main").record_event(device.event())
executable = graph.instantiate()
executable.launch(stream)
executable.synchronize(60)
child = os.fork()
if child == 0:
    try:
        executable.launch(stream)
    except DeviceError as error:
        print("child:", error, flush=True)
    del executable, graph
    sys.exit(7)
_, status = os.waitpid(child, 0)
for _ in range(3):
    executable.launch(stream)
executable.synchronize(60)
print("parent:", os.waitstatus_to_exitcode(status), len(calls))
"""


def test_a_forked_child_is_told_and_ends() -> None:
    """The child's driver call is refused by name, its exit is clean, the parent is undisturbed."""
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "child: cuGraphLaunch: this process was forked" in done.stdout
    assert "parent: 7 8" in done.stdout and done.stderr == ""
