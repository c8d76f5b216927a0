"""Which transports of host work this machine has, found out by trying each in a child process."""

from __future__ import annotations

import functools
import os

from graft.cudagraph.chooser import ask_child
from graft.cudagraph.context import Context
from graft.cudagraph.errors import OptionError
from graft.cudagraph.hostwork import SPIN_CORES, usable_cores

TRANSPORTS = ("auto", "native", "mailbox", "spinkernel")
REPLAYS = 3
REPLAY_LIMIT_S = 2.0
#: Starting Python, opening the device and compiling two small kernels, on a busy machine.
CHILD_LIMIT_S = 60.0

#: Three replays of one request and its wait; a driver that hangs here hangs a child.
_PROBE = f"""
import sys
from graft.cudagraph.device import open_device
from graft.cudagraph.errors import GraftError
from graft.cudagraph.graph import Graph
try:
    device = open_device(sys.argv[1], int(sys.argv[2]))
    stream, graph, seen = device.stream(), Graph(device, "probe"), []
    add = getattr(graph.lane("main"), sys.argv[3])
    add(lambda: seen.append(1), deadline_s={REPLAY_LIMIT_S} / 2, name="probe")
    run = graph.instantiate()
    for _ in range({REPLAYS}):
        run.launch(stream)
        run.synchronize({REPLAY_LIMIT_S})
    print("answered", len(seen))
except GraftError as error:
    print("refused", " ".join(str(error).split()))
"""


@functools.cache
def probe_transport(transport: str, kind: str, ordinal: int = 0) -> str:
    """Try "mailbox" or "spinkernel" in a child process; "" when it works, else why not."""
    method = {"mailbox": "mailbox", "spinkernel": "spin"}.get(transport)
    if method is None:
        raise OptionError(f"transport {transport!r} needs no probe")
    said, why = ask_child(
        "-c",
        _PROBE,
        kind,
        str(ordinal),
        method,
        limit_s=CHILD_LIMIT_S,
        environment={**os.environ, "GRAFT_DEVICE": kind},
    )
    return "" if said == f"answered {REPLAYS}" else why or said


def choose_transport(wanted: str, device: Context) -> tuple[str, str]:
    """Turn "auto" into a transport that works here, and say why in one line.

    "auto" takes the mailbox where 4 cores or more are usable and the probe passes, then the
    spinning kernel, then native host nodes; with fewer cores native host nodes, because a worker
    would take a core from the work it waits for. Any other value is taken as it is.

    Raises
    ------
    OptionError
        The transport is unknown, or asked for by name and does not work here.
    """
    if wanted not in TRANSPORTS:
        raise OptionError(f"transport must be one of {', '.join(TRANSPORTS)}, not {wanted!r}")
    if wanted == "native":
        return wanted, "asked for"
    if wanted != "auto":
        why = probe_transport(wanted, device.kind, device.ordinal)
        if why:
            raise OptionError(f"transport {wanted!r} does not work on this machine: {why}")
        return wanted, "asked for"
    cores = usable_cores()
    if cores < SPIN_CORES:
        return "native", f"{cores} usable cores, fewer than {SPIN_CORES}"
    reasons: list[str] = []
    for transport in ("mailbox", "spinkernel"):
        why = probe_transport(transport, device.kind, device.ordinal)
        if not why:
            return transport, "; ".join([f"{cores} usable cores, probe passed", *reasons])
        reasons.append(f"no {transport}: {why}")
    return "native", "; ".join(reasons)
